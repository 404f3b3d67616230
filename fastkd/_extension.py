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


CPU = _load("fastkd._C")
CUDA = CPU and torch.version.cuda is not None and _load("fastkd._C_cuda")


def cuda_roots_fit(n: int, device: torch.device) -> bool:
    """Whether a block's shared memory holds the matrix and its eigenvectors; csrc/jacobi.h."""
    properties = torch.cuda.get_device_properties(device)
    memory = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    return 8 * (2 * n * (n | 1) + n + 2 + 512) + 4 * (n + 1) <= memory


def _roots_meta(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of (root, values, vectors), for tracing."""
    torch._check(a.dim() >= 2 and a.shape[-1] == a.shape[-2], lambda: "a must be square")
    return a.new_empty(a.shape), a.new_empty(a.shape[:-1]), a.new_empty(a.shape)


if CPU:
    torch.library.register_fake("fastkd::sqrtm")(_roots_meta)
    torch.library.register_fake("fastkd::inv_sqrtm")(lambda a, ridge: _roots_meta(a))
    torch.library.register_fake("fastkd::jacobi_roots")(lambda a, inverse, ridge: _roots_meta(a))
