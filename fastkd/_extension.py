"""The C++/CUDA extension ``fastkd._C``, where it is built; the package works without it."""

import importlib

import torch
from torch import Tensor


def _load(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


# A library left from an older build lacks operators.
CPU = _load("fastkd._C") and hasattr(torch.ops.fastkd, "eigh")
CUDA = CPU and torch.version.cuda is not None and _load("fastkd._C_cuda")


def _eigh_meta(a: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of (values, vectors), for tracing."""
    torch._check(a.dim() >= 2 and a.shape[-1] == a.shape[-2], lambda: "a must be square")
    return a.new_empty(a.shape[:-1]), a.new_empty(a.shape)


def _roots_meta(a: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of (root, values, vectors)."""
    return a.new_empty(a.shape), *_eigh_meta(a)


if CPU:
    torch.library.register_fake("fastkd::eigh")(_eigh_meta)
    for name in ("sqrtm", "inv_sqrtm", "roots_by_threads"):
        torch.library.register_fake(f"fastkd::{name}")(_roots_meta)
