"""Base class of the losses' Modules."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import nn

from fastkd._core import check


@dataclass(eq=False, repr=False)
class LossModule(nn.Module):
    """A loss as a Module; a subclass is a dataclass, ``eq=False, repr=False``, of its options.

    Options are checked whenever they are set, in the constructor and later. Those in ``fixed``
    decided what the constructor made, and can't be changed.
    """

    fixed: ClassVar[tuple[str, ...]] = ()
    _words: ClassVar[dict[str, tuple[str, ...]]]  # of each option that takes nothing else

    def __init_subclass__(cls) -> None:
        """Read the fixed words once: Dynamo can't trace it when a graph sets an option."""
        super().__init_subclass__()
        hints = get_type_hints(cls).items()
        cls._words = {name: get_args(x) for name, x in hints if get_origin(x) is Literal}

    def __post_init__(self) -> None:
        super().__init__()
        self.check_options()

    def check_options(self) -> None:
        """Raise for a wrong option. Subclasses add what isn't one of a type's fixed words."""
        for name, words in self._words.items():
            check.choice(name, getattr(self, name), words)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dataclass_fields__ or "_parameters" not in vars(self):
            super().__setattr__(name, value)
            return
        before = getattr(self, name)
        if value is before:
            return
        if name in self.fixed:
            kind = type(self).__name__
            raise ValueError(f"{name} is fixed; make a new {kind}(..., {name}={value!r})")
        super().__setattr__(name, value)
        try:
            self.check_options()
        except Exception:
            super().__setattr__(name, before)
            raise

    def options(self, *names: str) -> dict[str, Any]:
        """Options by name, for the function that computes the loss."""
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        """Positional options, and keyword options that differ from their defaults."""
        options = ((x, getattr(self, x.name)) for x in fields(self))
        shown = (x.name for x, value in options if not x.kw_only or value != x.default)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
