"""Matrix products: of half types that leave in float32, as sums in the losses do, and symmetric.

A product in a half type rounds every logit to 8 or 11 bits, and gradients of logits with it. GPUs
multiply half types into float32 as they are; so do some CPUs, by the extension, and bfloat16 alone.
On others the matrices are widened a part at a time.
"""

import functools

import torch
from torch import Tensor

from fastkd._core import extension
from fastkd._core.memory import empty
from fastkd._core.numerics import upcast, working_dtype

# Entries of a matrix that are widened, or added to another, at a time: on the CPU and on a GPU.
TILES = (1 << 20, 1 << 24)

# Largest n of a symmetric product that is not worth dividing into blocks.
WHOLE_PRODUCT = 256

HALF = (torch.bfloat16, torch.float16)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (M, K) · weight (N, K)ᵀ in the working dtype; both have one dtype."""
    if _on_gpu(x):
        if x.dtype not in HALF:
            return x @ weight.T
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    out = empty((len(x), len(weight)), working_dtype(x), x.device)
    if x.dtype not in HALF:
        return torch.mm(x, weight.T, out=out)
    if _by_half_product(x):
        torch.ops.fastkd_cpp.half_product(out, x, weight.T, False)
        return out
    wide = x.float()
    for tile in _tiles(weight):
        torch.mm(wide, weight[tile].float().T, out=out[:, tile])
    return out


def product_back(grad: Tensor, weight: Tensor) -> Tensor:
    """grad (M, N) · weight (N, K), where ``grad`` is `ready` for ``weight``."""
    if weight.dtype not in HALF:
        return grad @ weight
    if _on_gpu(weight):
        return torch.mm(grad, weight, out_dtype=torch.float32)
    if _by_half_product(weight):
        out = grad.new_empty(len(grad), weight.shape[1])
        torch.ops.fastkd_cpp.half_product(out, grad, weight, False)
        return out
    out = grad.new_zeros(len(grad), weight.shape[1])
    for tile in _tiles(weight):
        out.addmm_(grad[:, tile], weight[tile].float())
    return out


def add_product(total: Tensor, grad: Tensor, x: Tensor, factor: Tensor | None, first: bool) -> None:
    """Add gradᵀ (N, M) · x (M, K), times ``factor``, to ``total`` (N, K) of the working dtype.

    The ``first`` to be added takes the place of what stands there; if no other follows, that may be
    of bfloat16 on the CPU. ``grad`` and ``factor`` are `ready` for ``x``. No second matrix of the
    size of ``total``.
    """
    if _by_half_product(x):
        torch.ops.fastkd_cpp.half_product(total, grad.T, x, not first)
        return
    if x.dtype not in HALF or not _on_gpu(x):
        wide = upcast(x)
        if total.dtype == wide.dtype:
            total.addmm_(grad.T, wide, beta=0 if first else 1)
            return
        for tile in _tiles(total):
            total[tile] = grad[:, tile].T @ wide
        return
    for tile in _tiles(total):
        out = total[tile]
        rows = grad[:, tile].T
        part = torch.mm(rows, x, out_dtype=torch.float32, out=out if first else None)
        if factor is not None:
            part *= factor
        if not first:
            out += part


def ready(grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A gradient in the working dtype for products with tensors of ``dtype``, and their factor.

    On a CPU that multiplies bfloat16 its products round it, as is done here for a GPU. Float16 has
    no room for small probabilities: there the gradient is multiplied by a power of 2 that takes its
    largest entry near the largest number, and the products are divided by it.
    """
    if dtype not in HALF or not _on_gpu(grad):
        return grad, None
    if dtype == torch.bfloat16 or grad.numel() == 0:
        return grad.to(dtype), None
    factor = torch.exp2(grad.abs().amax().clamp_min(2.0**-80).log2().ceil() - 14)
    return (grad / factor).to(dtype), factor


def symmetric_product(x: Tensor, y: Tensor) -> Tensor:
    """XY where it is symmetric: of a large one only the lower blocks are multiplied."""
    n = x.shape[-2]
    if n < WHOLE_PRODUCT:
        return x @ y
    product = x.new_empty(*x.shape[:-1], n)
    for i in range(4):
        start, end = i * n // 4, (i + 1) * n // 4
        block = x[..., start:, :] @ y[..., start:end]  # (*, n - start, end - start)
        product[..., start:, start:end] = block
        product[..., start:end, start:] = block.mT
    return product


def multiplied_as_is(x: Tensor) -> bool:
    """Whether ``x`` is of a half type and enters products as such."""
    return x.dtype in HALF and (_on_gpu(x) or _by_half_product(x))


def _by_half_product(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _has_half_product()


@functools.cache
def _has_half_product() -> bool:
    older = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")  # or is told to be
    return extension.CPU and not older and bool(torch.ops.fastkd_cpp.has_half_product())


def _on_gpu(x: Tensor) -> bool:
    return x.device.type in ("cuda", "meta")


def _tiles(matrix: Tensor) -> list[slice]:
    rows, columns = matrix.shape
    step = max(TILES[matrix.device.type == "cuda"] // max(columns, 1), 1)
    return [slice(start, start + step) for start in range(0, rows, step)]
