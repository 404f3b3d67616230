"""What a student's words are compared with besides a teacher's logits: labels, and its top k."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fastkd._core.checks import (
    check_choice,
    check_floating,
    check_fraction,
    check_int,
    check_labels,
    check_no_grad,
    check_number,
    check_shape,
)
from fastkd._core.numerics import as_rows, values_readable

Tail = Literal["bucket", "renormalise"]

# How far above 0 the logarithm of a probability may be, for rounding's sake.
SLACK = 1e-2


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The student's cross-entropy with labels, a task for `linear_soft_target_loss`.

    Of a position with logits z and label y, p = softmax(z) at temperature 1 and Z = Σ exp(z):
    −(1 − ε)·log p_y − (ε/V)·Σ log p + ``z_loss``·(log Z)².

    Args:
        labels: (...) integers, the leading dimensions of the hidden states. A label belongs to the
            hidden state it is given with: shift next words before.
        weight: of this term in the loss.
        label_smoothing: ε, 0 to 1.
        z_loss: coefficient of (log Z)², which keeps logits from drifting.
        ignore_index: positions with this label count neither here nor in the soft targets.

    Raises:
        ValueError, TypeError: labels that are no integers, or an impossible number.

    >>> CrossEntropy(torch.tensor([1, 0, -100]), weight=0.5).weight
    0.5
    """

    labels: Tensor
    weight: float = 1.0
    _: KW_ONLY
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        if not isinstance(self.labels, Tensor):
            raise TypeError(f"labels must be a Tensor, got {type(self.labels).__name__}")
        _check_integers("labels", self.labels)
        check_number("weight", self.weight, at_least=0)
        check_fraction("label_smoothing", self.label_smoothing)
        check_number("z_loss", self.z_loss, at_least=0)
        check_int("ignore_index", self.ignore_index)

    def places(
        self, V: int, shape: torch.Size, device: torch.device, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Positions (...) that count, None where all do, and labels as int64, 0 at the others.

        Those count that the mask keeps and that have a label, and all of these must be words.
        """
        check_labels("labels", self.labels, tuple(shape), device)
        labels = self.labels.long()  # a narrow type would wrap the number that is ignored
        if mask is None and values_readable(labels) and labels.numel():
            least, largest = (int(x) for x in labels.aminmax())
            if least >= 0 and largest < V and not least <= self.ignore_index <= largest:
                return None, labels
        counted = labels != self.ignore_index
        counted = counted if mask is None else counted & mask
        if values_readable(counted) and bool(counted.all()):
            left = None
        else:
            left, labels = counted, labels.masked_fill(~counted, 0)
        if values_readable(labels) and labels.numel():
            least, largest = (int(x) for x in labels.aminmax())
            if least < 0 or largest >= V:
                wrong = least if least < 0 else largest
                raise ValueError(
                    f"labels must be words 0 to {V - 1} or ignore_index={self.ignore_index}, "
                    f"got {wrong}"
                )
        return left, labels


@dataclass(frozen=True, eq=False)
class TopK:
    """A teacher's k most probable words, in the place of its logits or hidden states and head.

    A teacher's cache, an inference server or a file often keeps no more of a distribution.

    Args:
        ids: (..., K) integers, the words; none twice in a row.
        log_probs: (..., K), natural logarithms of their probabilities in the teacher's whole
            distribution **at the call's temperature**. −inf is no word: lists that are shorter
            are filled up with it, and any id.
        tail: "bucket" makes all other words one outcome, on both sides: never negative, exact
            when K = V, and a lower bound of the whole divergence (of "adaptive_kl" and
            "mixed" too wherever their weights are the same). Log-probabilities that add up to 1
            or more leave it a probability of 0: then reverse KL is infinite. "renormalise" makes
            the k words a distribution on both sides: it says nothing about the rest, which the
            student may take for likely.

    Raises:
        ValueError, TypeError: shapes that differ, ids that are no integers, log-probabilities
            above 0, or another tail.

    >>> top = TopK(torch.tensor([[2, 0]]), torch.tensor([[0.6, 0.3]]).log())
    >>> top.tail
    'bucket'
    """

    ids: Tensor
    log_probs: Tensor
    tail: Tail = "bucket"

    def __post_init__(self) -> None:
        check_floating("log_probs", self.log_probs)
        check_no_grad("log_probs", self.log_probs)
        if not isinstance(self.ids, Tensor):
            raise TypeError(f"ids must be a Tensor, got {type(self.ids).__name__}")
        _check_integers("ids", self.ids)
        check_shape("ids", self.ids, self.log_probs.shape, "the shape of log_probs")
        if self.ids.device != self.log_probs.device:
            raise ValueError(
                f"ids is on {self.ids.device} but log_probs is on {self.log_probs.device}"
            )
        if self.ids.shape[-1] == 0:
            raise ValueError("ids must have at least one word a position, got none")
        check_choice("tail", self.tail, get_args(Tail))

    def check(self, leading: torch.Size, V: int, device: torch.device, mask: Tensor | None) -> None:
        """Raise unless these are words below V of the student's positions, on its device."""
        shape = (*leading, self.ids.shape[-1])
        check_shape("ids", self.ids, shape, "the student's positions, K")
        if self.ids.device != device:
            raise ValueError(f"ids is on {self.ids.device} but the student is on {device}")
        if self.ids.shape[-1] > V:
            raise ValueError(f"ids has {self.ids.shape[-1]} words of a vocabulary of {V}")
        if not values_readable(self.ids) or self.ids.numel() == 0:
            return
        kept = self.log_probs != -torch.inf
        kept = kept if mask is None else kept & mask[..., None]
        largest = self.log_probs.masked_fill(~kept, 0).max().item()
        if largest > SLACK:
            raise ValueError(f"log_probs must be logarithms of probabilities, got {largest:.4g}")
        ids = self.ids.long()  # of a narrow type, V would wrap
        inside = (ids >= 0) & (ids < V)
        if not bool((inside | ~kept).all()):
            wrong = ids[~inside & kept][0].item()
            raise ValueError(f"ids must be words 0 to {V - 1}, got {wrong}")
        places = -1 - torch.arange(ids.shape[-1], device="cpu").expand(shape)
        ranked = torch.where(kept, ids, places).sort(-1)[0]
        if bool((ranked[..., 1:] == ranked[..., :-1]).any()):
            raise ValueError("ids must not have a word twice in a row")

    def rows(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """ids (R, K) as int64 and log-probabilities (R, K), finite where masked."""
        ids, log_probs = as_rows(self.ids.long()), as_rows(self.log_probs)
        ids = ids.masked_fill(log_probs == -torch.inf, 0)
        if mask is not None:  # elsewhere the first words, of half the mass
            K, real = ids.shape[-1], mask.reshape(-1, 1)
            ids = torch.where(real, ids, torch.arange(K, device=ids.device))
            log_probs = log_probs.where(real, -math.log(2 * K))
        return ids, log_probs


def _check_integers(name: str, x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {x.dtype}")
