"""Arguments of the soft-target losses besides logits and hidden states: labels, top k, drafts."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fastkd._core import check, extension
from fastkd._core.numerics import as_rows, values_readable, working_dtype
from fastkd.lm.heads import Head, as_head
from fastkd.lm.log_probs import token_log_probs, token_options

Tail = Literal["bucket", "renormalise"]
TeacherMass = Literal["renormalised", "whole"]

# Divergences of a part of the vocabulary and the teacher's whole mass.
OF_WHOLE_MASS = ("forward_kl", "reverse_kl", "total_variation", "negative_log_acceptance")

# Log-probabilities may exceed 0 by this, for rounding error.
SLACK = 1e-2


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """Cross-entropy of the student with labels, as ``task`` of `linear_soft_target_loss`.

    For a position with logits z and label y, p = softmax(z) at temperature 1 and Z = Σ exp(z):
    −(1 − ε)·log p_y − (ε/V)·Σ log p + ``z_loss``·(log Z)².

    Args:
        labels: (...) integers, the leading dimensions of the hidden states. A label belongs to the
            hidden state at its own position: shift the next tokens yourself.
        weight: of this term in the loss.
        weights: (...), floating, any sign, without gradient: factors of the positions' losses, as
            in `fastkd.soft_target_loss`.
        label_smoothing: ε, 0 to 1.
        z_loss: coefficient of (log Z)², which keeps logits from drifting.
        ignore_index: positions with this label count neither here nor in the soft targets.

    Raises:
        ValueError, TypeError: labels that are not integers, or a number out of range.

    >>> CrossEntropy(torch.tensor([1, 0, -100]), weight=0.5).weight
    0.5
    """

    labels: Tensor
    weight: float = 1.0
    _: KW_ONLY
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        check.integers("labels", self.labels)
        check.number("weight", self.weight, at_least=0)
        check.fraction("label_smoothing", self.label_smoothing)
        check.number("z_loss", self.z_loss, at_least=0)
        check.integer("ignore_index", self.ignore_index)


def counted_labels(
    labels: Tensor, V: int, mask: Tensor | None, ignore_index: int
) -> tuple[Tensor | None, Tensor]:
    """Mask (...) of the positions that count, None if all do, and int64 labels, 0 elsewhere.

    A position counts if the mask keeps it and it has a label; that label must be below V.
    """
    labels = labels.long()  # a narrow dtype could not represent ignore_index
    if mask is None and values_readable(labels) and labels.numel():
        least, largest = (int(x) for x in labels.aminmax())
        if least >= 0 and largest < V and not least <= ignore_index <= largest:
            return None, labels
    labelled = labels != ignore_index
    counts = labelled if mask is None else labelled & mask
    all_count = values_readable(counts) and bool(counts.all())
    if not all_count:
        labels = labels.masked_fill(~counts, 0)
    if values_readable(labels) and labels.numel():
        least, largest = (int(x) for x in labels.aminmax())
        if least < 0 or largest >= V:
            wrong = least if least < 0 else largest
            raise ValueError(
                f"labels must be token ids 0 to {V - 1} or ignore_index={ignore_index}, got {wrong}"
            )
    return None if all_count else counts, labels


@dataclass(frozen=True, eq=False)
class TopK:
    """A teacher's k most probable tokens, in place of its logits or its hidden states and head.

    A teacher's cache, an inference server or a file often stores no more of a distribution.

    Args:
        ids: (..., K) integers, token ids; no id twice at a position.
        log_probs: (..., K), natural logarithms of their probabilities in the teacher's whole
            distribution **at the call's temperature**. −inf marks an unused entry, with any id:
            pad shorter lists with it.
        tail: "bucket" makes all other tokens one outcome, for student and teacher: never negative,
            exact if K = V, and a lower bound of the whole divergence (of "adaptive_kl" and "mixed"
            too if their weights are equal). Its probability is 1 minus the sum, but at least the
            rounding error of the stored values: a confident teacher's tokens add up to 1. Where the
            student excludes all other tokens, a rest that small is 0. "renormalise" makes the k
            tokens a distribution, for student and teacher: the student's probabilities of all other
            tokens have no effect.

    Raises:
        ValueError, TypeError: shapes that differ, ids that are not integers, log-probabilities
            above 0, or another tail.

    >>> top = TopK(torch.tensor([[2, 0]]), torch.tensor([[0.6, 0.3]]).log())
    >>> top.tail
    'bucket'
    """

    ids: Tensor
    log_probs: Tensor
    tail: Tail = "bucket"

    def __post_init__(self) -> None:
        check.floating("log_probs", self.log_probs)
        check.no_grad("log_probs", self.log_probs)
        check.integers("ids", self.ids)
        check.shape("ids", self.ids, self.log_probs.shape, "the shape of log_probs")
        check.device("ids", self.ids, "log_probs", self.log_probs)
        if self.ids.shape[-1] == 0:
            raise ValueError("ids must have at least one token a position, got none")
        check.choice("tail", self.tail, get_args(Tail))

    @staticmethod
    def of(
        hidden: Tensor,
        head: Tensor | Head,
        k: int,
        *,
        temperature: float = 1.0,
        tail: Tail = "bucket",
        chunk_bytes: int | None = None,
    ) -> "TopK":
        """The k most probable tokens of a teacher's head, without all logits in memory.

        Args:
            hidden: (..., D) last hidden states of the teacher, without grad.
            head: (V, D) weight, or a `Head`.
            k: tokens kept at a position, at most V.
            temperature: that of the call which the result goes to.
            tail: as in `TopK`.
            chunk_bytes: of logits in memory at a time, by default 64 MiB on the CPU and 2 GiB on a
                GPU.

        Returns:
            ids and log-probabilities (..., k), most probable first, in float32 (float64 for
            float64).

        Raises:
            ValueError, TypeError: a wrong shape, dtype, device or number, or hidden states that
                require grad.

        >>> top = TopK.of(torch.zeros(2, 3), torch.randn(5, 3), k=2)
        >>> top.ids.shape, round(top.log_probs[0, 0].exp().item(), 4)
        (torch.Size([2, 2]), 0.2)
        """
        head = as_head("head", head)
        options = token_options(hidden, head, temperature, chunk_bytes)
        check.no_grad("hidden", hidden)
        check.positive_int("k", k)
        if k > len(head.weight):
            raise ValueError(f"k must be at most the head's {len(head.weight)} tokens, got {k}")
        with torch.no_grad():
            values, _, ids = token_log_probs(head.on(as_rows(hidden)), None, k, options)
        shape = (*hidden.shape[:-1], k)
        return TopK(ids.reshape(shape), values.reshape(shape), tail)

    def map(self, change: Callable[[Tensor], Tensor]) -> "TopK":
        """With ``change`` applied to ids and log-probabilities."""
        return TopK(change(self.ids), change(self.log_probs), self.tail)

    def check(self, leading: torch.Size, V: int, device: torch.device, mask: Tensor | None) -> None:
        """Raise unless ids are below V, at the student's positions and on its device."""
        shape = (*leading, self.ids.shape[-1])
        check.shape("ids", self.ids, shape, "the student's positions, K")
        check.device("ids", self.ids, "the student", device)
        if self.ids.shape[-1] > V:
            raise ValueError(
                f"ids has {self.ids.shape[-1]} tokens a position, but the vocabulary has {V}; "
                "pass at most that many"
            )
        if not values_readable(self.ids) or self.ids.numel() == 0:
            return
        ids = self.ids.long()  # a narrow dtype could not represent V
        if ids.is_cpu and extension.CPU:  # the checks in PyTorch take 15 operations
            rows = as_rows(ids), as_rows(self.log_probs.detach())
            real = None if mask is None else mask.flatten()
            if torch.ops.fastkd_cpp.is_top_k(*rows, real, V, SLACK):
                return
        kept = self.log_probs != -torch.inf
        kept = kept if mask is None else kept & mask[..., None]
        largest = self.log_probs.masked_fill(~kept, 0).max().item()
        if largest > SLACK:
            raise ValueError(f"log_probs must be logarithms of probabilities, got {largest:.4g}")
        inside = (ids >= 0) & (ids < V)
        if not bool((inside | ~kept).all()):
            wrong = ids[~inside & kept][0].item()
            raise ValueError(f"ids must be token ids 0 to {V - 1}, got {wrong}")
        unique = -1 - torch.arange(ids.shape[-1], device="cpu").expand(shape)
        ranked = torch.where(kept, ids, unique).sort(-1)[0]
        if bool((ranked[..., 1:] == ranked[..., :-1]).any()):
            raise ValueError("ids must not have a token twice at a position")

    def rows(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """ids (R, K) as int64 and log-probabilities (R, K), finite where masked."""
        ids, log_probs = as_rows(self.ids.long()), as_rows(self.log_probs)
        ids = ids.masked_fill(log_probs == -torch.inf, 0)
        if mask is not None:  # masked positions get the first ids and a mass of one half
            K, real = ids.shape[-1], mask.reshape(-1, 1)
            ids = torch.where(real, ids, torch.arange(K, device=ids.device))
            log_probs = log_probs.where(real, -math.log(2 * K))
        return ids, log_probs


@dataclass(frozen=True, eq=False)
class ImportanceRatio:
    """Ratios of the student to the policy that drew a token, as ``ratio`` of
    `linear_soft_target_loss`: min(q(id) / exp(old_log_prob), ``at_most``), without gradient.

    q is the student at temperature 1.

    Args:
        ids: (...) integers, the drawn tokens, of the leading dimensions of the hidden states.
        old_log_probs: (...) natural logarithms of their probabilities when they were drawn.
        at_most: bound of the ratio, above 0.

    Raises:
        ValueError, TypeError: shapes that differ, a wrong dtype, or a bound that is not positive.

    >>> ImportanceRatio(torch.tensor([2]), torch.tensor([-0.5]), at_most=2.0).at_most
    2.0
    """

    ids: Tensor
    old_log_probs: Tensor
    _: KW_ONLY
    at_most: float

    def __post_init__(self) -> None:
        check.floating("old_log_probs", self.old_log_probs, min_ndim=0)
        check.no_grad("old_log_probs", self.old_log_probs)
        check.integers("ids", self.ids)
        check.shape("ids", self.ids, self.old_log_probs.shape, "the shape of old_log_probs")
        check.number("at_most", self.at_most, above=0)

    def rows(
        self, V: int, leading: torch.Size, like: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """ids (...) as int64 and logarithms in the working dtype of ``like``, 0 where masked."""
        check.shape("ids", self.ids, leading, "the leading dimensions of student_hidden")
        for name, x in (("ids", self.ids), ("old_log_probs", self.old_log_probs)):
            check.device(name, x, "student_hidden", like)
        ids, old = self.ids.long(), self.old_log_probs.to(working_dtype(like))
        if mask is not None:
            ids, old = ids.masked_fill(~mask, 0), old.masked_fill(~mask, 0)
        check.ids_below("ids", ids, V)
        return ids, old


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens and positions of a draft model in those of its teacher, as ``draft`` of
    `linear_soft_target_loss`.

    Args:
        vocabulary: (V,) int64, the teacher's token ids of the student's V tokens, if the student's
            head has a part of the teacher's vocabulary. Labels are the student's ids. Ids, not
            EAGLE's offsets: ``d2t + torch.arange(len(d2t))``. Offsets that repeat are refused;
            offsets that all differ can't be told from ids.
        mass: of a ``vocabulary``: "renormalised" compares p_t normalised over these tokens; "whole"
            p_t normalised over the teacher's whole vocabulary, for forward and reverse KL, total
            variation and negative log acceptance. KL then is the sum over these tokens, and the
            student has probability 0 for all others.
        soft_mask: (...), bool or 0/1, 1 = the position has a soft target. Others have the task
            alone, whatever the teacher's states, weights and ratios there, and stay in the divisor.
            The terms that need the teacher are 0 there.
        rows: (...) int64, the teacher's row for each of the student's positions: indices into
            ``teacher_hidden`` (..., Dt), flattened to (T, Dt). Several positions may have one row,
            whose logits are computed once.

    Raises:
        ValueError: another mass. `linear_soft_target_loss` checks the tensors.

    >>> Draft(torch.tensor([7, 0, 4]), "whole").mass
    'whole'
    """

    vocabulary: Tensor | None = None
    mass: TeacherMass = "renormalised"
    _: KW_ONLY
    soft_mask: Tensor | None = None
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        check.choice("mass", self.mass, get_args(TeacherMass))

    def head(self, student: Head, teacher: Tensor | Head | None, vocabulary: object) -> Head:
        """The teacher's head for a student of the tokens ``vocabulary``: whole, or of these."""
        assert self.vocabulary is not None
        if vocabulary is not None:
            raise ValueError("vocabulary has no use beside draft.vocabulary; leave it out")
        whole = as_head("teacher_head", teacher)
        check.vocabulary_part("draft.vocabulary", self.vocabulary, whole.weight.shape[0])
        check.device("draft.vocabulary", self.vocabulary, "student_head", student.weight)
        shape = (student.weight.shape[0],)
        check.shape("draft.vocabulary", self.vocabulary, shape, "the student's tokens")
        return whole if self.mass == "whole" else whole.subset(self.vocabulary)

    def check_divergence(self, form: str) -> None:
        """Raise unless the whole mass is compared by a divergence of `OF_WHOLE_MASS`."""
        if self.vocabulary is not None and self.mass == "whole" and form not in OF_WHOLE_MASS:
            raise ValueError(
                f"draft.mass='whole' needs divergence {', '.join(map(repr, OF_WHOLE_MASS))}, got "
                f"{form!r}; take 'renormalised'"
            )

    def check_rows(self, leading: torch.Size, student_hidden: Tensor) -> None:
        """Raise unless ``rows`` are int64, at the student's positions and on its device."""
        rows = self.rows
        if not isinstance(rows, Tensor):
            raise TypeError(f"draft.rows must be a Tensor, got {type(rows).__name__}")
        if rows.dtype != torch.int64:
            raise TypeError(f"draft.rows must be int64, got {rows.dtype}")
        check.shape("draft.rows", rows, leading, "the leading dimensions of student_hidden")
        check.device("draft.rows", rows, "student_hidden", student_hidden)


NO_DRAFT = Draft()
