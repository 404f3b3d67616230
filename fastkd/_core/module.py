"""Base class of the losses' Modules."""

from dataclasses import dataclass, fields
from typing import Any

from torch import nn


@dataclass(eq=False, repr=False)
class LossModule(nn.Module):
    """A loss as a Module; a subclass is a dataclass, ``eq=False, repr=False``, of its options."""

    def __post_init__(self) -> None:
        super().__init__()

    def options(self, *names: str) -> dict[str, Any]:
        """Options by name, for the function that computes the loss."""
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        """Positional options, and keyword options that differ from their defaults."""
        options = ((x, getattr(self, x.name)) for x in fields(self))
        shown = (x.name for x, value in options if not x.kw_only or value != x.default)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
