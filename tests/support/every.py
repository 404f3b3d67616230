"""Every loss on every backend, as parameters of the general tests, and inputs for them."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastkd._core.registry import LOSSES
from tests.losses import FILES, subjects
from tests.support.interpreter import MARKS
from tests.support.subject import D_S, D_T, B, N, Subject

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ("torch", "triton", "cpp")
# The table: every loss on every backend, and whether it takes a mask.
TABLE = {(backend, s.name): s.masked for backend in BACKENDS for s in subjects(backend)}


def parameters(*backends: str, masked: bool = False) -> list:
    """Parameters of a test with a ``loss``, which the fixture of conftest.py makes of them."""
    return [
        pytest.param((backend, name), marks=MARKS[backend], id=f"{backend}: {name}")
        for (backend, name), takes_mask in TABLE.items()
        if backend in backends and (takes_mask or not masked)
    ]


every_loss = pytest.mark.parametrize("loss", parameters(*BACKENDS), indirect=True)
every_loss_with_mask = pytest.mark.parametrize(
    "loss", parameters(*BACKENDS, masked=True), indirect=True
)


def rows(table: str, *more: str) -> list:
    """Parameters (file, backend) of the rows with a ``table``, and ``more`` backends."""
    return [
        pytest.param(
            FILES[loss.name], backend, marks=MARKS.get(backend, ()), id=f"{backend}: {loss.name}"
        )
        for loss in LOSSES
        if hasattr(FILES.get(loss.name), table)
        for backend in (
            "torch",
            *(("triton",) * bool(loss.triton)),
            *(("cpp",) * bool(loss.cpp)),
            *more,
        )
    ]


@contextlib.contextmanager
def inputs_of(backend: str, device: torch.device) -> Iterator[None]:
    """A row's tensors: on the device of the kernels; a reference's in float64."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if backend == "reference" else dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(dtype)


def made(backend: str, name: str) -> Subject:
    torch.manual_seed(0)
    subject = next(s for s in subjects(backend) if s.name == name).to(DEVICE)
    subject.runs_on = backend
    return subject


def features(
    dtype: torch.dtype = torch.float32, batch: int = B, device: torch.device = DEVICE
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(batch, N, D_S, generator=generator, dtype=torch.float64)
    teacher = torch.randn(batch, N, D_T, generator=generator, dtype=torch.float64)
    return student.to(device, dtype).requires_grad_(), teacher.to(device, dtype)


def padding(batch: int = B, device: torch.device = DEVICE) -> Tensor:
    """A tokenizer's mask: 1 at real tokens, on the left of each row."""
    lengths = torch.arange(batch) % (N - 1) + 2
    return (torch.arange(N) < lengths[:, None]).long().to(device)


def value_and_gradient(
    loss: Subject, student: Tensor, teacher: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    student = student.detach().requires_grad_()
    value = loss(student, teacher, mask)
    value.backward()
    return value.detach(), student.grad


@functools.cache
def usual(backend: str, name: str) -> tuple[Tensor, Tensor]:
    """A loss's value and gradient of `features` and `padding`, which many tests compare with."""
    return value_and_gradient(made(backend, name), *features(), padding())
