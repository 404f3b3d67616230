"""The vocabulary head of a language model: what makes words' logits of its last hidden states."""

import torch
from torch import Tensor

from fastkd._checks import check_device, check_floating, check_number, check_shape
from fastkd._linear_soft_targets import HeadForm


class Head:
    """logits = cap·tanh(scale·(h Wᵀ + b)/cap), or scale·(h Wᵀ + b) without a cap.

    Goes wherever a head's weight does. `Head.of` reads a model's.

    Args:
        weight: W (V, D), any floating dtype.
        bias: b (V).
        scale: of all logits, as Granite and Cohere have it.
        softcap: cap > 0 that no logit exceeds, as Gemma has it.

    Raises:
        ValueError, TypeError: a shape, dtype or number that can't be.

    >>> head = Head(torch.randn(10, 4), torch.zeros(10), softcap=30.0)
    >>> head.logits(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 10])
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        check_floating("weight", weight, 2)
        if bias is not None:
            check_floating("bias", bias)
            check_shape("bias", bias, (weight.shape[0],), "the vocabulary")
            check_device("bias", bias, "weight", weight)
        check_number("scale", scale)
        if softcap is not None:
            check_number("softcap", softcap, above=0)
        self.weight = weight
        self.bias = bias
        self.scale = float(scale)
        self.softcap = None if softcap is None else float(softcap)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it is made of."""
        return [x for x in (self.weight, self.bias) if x is not None]

    @property
    def form(self) -> HeadForm:
        return HeadForm(self.scale, self.softcap or 0.0)

    def on(self, hidden: Tensor) -> list[Tensor | None]:
        """Itself on hidden states (R, D), as `fastkd._linear_soft_targets` takes heads."""
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        return [hidden.to(dtype), self.weight.to(dtype), self.bias]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), in the wider of their dtypes."""
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        logits = hidden.to(dtype) @ self.weight.to(dtype).T
        if self.bias is not None:
            logits = logits + self.bias.to(dtype)
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def detach(self) -> "Head":
        """The same without gradients: a teacher's side of a head that both share."""
        bias = None if self.bias is None else self.bias.detach()
        return Head(self.weight.detach(), bias, self.scale, self.softcap)

    def __repr__(self) -> str:
        V, D = self.weight.shape
        return f"Head({V} words of {D}, bias={self.bias is not None}, scale={self.scale}, " + (
            f"softcap={self.softcap})"
        )


def as_head(name: str, head: Tensor | Head | None) -> Head:
    """A head, or the head of a weight (V, D)."""
    if isinstance(head, Head):
        return head
    if not isinstance(head, Tensor):
        raise TypeError(f"{name} must be a Tensor or Head, got {type(head).__name__}")
    check_floating(name, head, 2)
    return Head(head)
