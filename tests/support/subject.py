"""Adapters for the tests of all losses: a function by name, and losses with one signature."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fastkd
from fastkd import functional

B, N, D_S, D_T = 6, 3, 8, 12
Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def function_of(name: str, backend: str) -> Callable[..., Tensor]:
    """A public function on a backend; "reference" is its `*_ref` function."""
    if backend == "reference":
        return getattr(functional, f"{name}_ref")
    return functools.partial(getattr(fastkd, name), backend=backend)


class Subject(nn.Module):
    """A loss as ``(student (B, N, Ds), teacher (B, N, Dt), mask (B, N)) -> scalar``.

    ``masked``: it takes a mask. ``same_size``: Ds must equal Dt.
    """

    runs_on: str

    def __init__(
        self,
        name: str,
        call: Loss,
        module: nn.Module | None = None,
        *,
        masked: bool = True,
        same_size: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.call, self.module = name, call, module
        self.masked, self.same_size = masked, same_size

    def forward(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.same_size and isinstance(student, Tensor):
            teacher = teacher[..., : student.shape[-1]]
        return self.call(student, teacher, mask if self.masked else None)


def labels(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=getattr(x, "device", None)) % 2


def of_module(name: str, module: nn.Module, labelled: bool = False, **options: bool) -> Subject:
    def call(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        given = {"labels": labels(student)} if labelled else {}
        return module(student, teacher, mask=mask, **given)

    return Subject(name, call, module, **options)
