"""Matrix products: half precision with float32 results, and symmetric ones.

A half-precision result would round every logit, and its gradient, to 8 or 11 bits. GPUs multiply
half-precision matrices into float32. Some CPUs do so for bfloat16, through the extension. On other
CPUs the matrices are converted to float32 one tile at a time.
"""

import functools

import torch
from torch import Tensor

from fastkd._core import extension
from fastkd._core.numerics import empty, upcast, working_dtype

# Entries of a matrix that are converted or added at a time: on the CPU, on a GPU.
TILE_ENTRIES = (1 << 20, 1 << 24)

# A symmetric product of smaller n isn't worth dividing into blocks.
LEAST_BLOCKED = 256

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
    if _uses_half_product(x):
        torch.ops.fastkd_cpp.half_product(out, x, weight.T, False)
        return out
    wide = x.float()
    for tile in _tiles(weight):
        torch.mm(wide, weight[tile].float().T, out=out[:, tile])
    return out


def product_back(grad: Tensor, weight: Tensor) -> Tensor:
    """grad (M, N) · weight (N, K); ``grad`` comes from `scaled_for_products`."""
    if weight.dtype not in HALF:
        return grad @ weight
    if _on_gpu(weight):
        return torch.mm(grad, weight, out_dtype=torch.float32)
    if _uses_half_product(weight):
        out = grad.new_empty(len(grad), weight.shape[1])
        torch.ops.fastkd_cpp.half_product(out, grad, weight, False)
        return out
    out = grad.new_zeros(len(grad), weight.shape[1])
    for tile in _tiles(weight):
        out.addmm_(grad[:, tile], weight[tile].float())
    return out


def add_product(total: Tensor, grad: Tensor, x: Tensor, factor: Tensor | None, first: bool) -> None:
    """Add gradᵀ (N, M) · x (M, K), times ``factor``, to ``total`` (N, K) of the working dtype.

    With ``first`` the product overwrites ``total``. If it is the only product, ``total`` may be
    bfloat16 on the CPU. ``grad`` and ``factor`` come from `scaled_for_products`. No second matrix
    of the size of ``total`` is allocated.

    On a GPU a product of bfloat16 is added by the multiplication itself, which reads and writes
    ``total`` once. In float16 the factor comes between the two: a tile of products is written,
    multiplied and added.
    """
    if _uses_half_product(x):
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
    if factor is None and first:
        torch.mm(grad.T, x, out_dtype=torch.float32, out=total)
        return
    if factor is None and _adds_to_float32(x.device):
        torch.addmm(total, grad.T, x, out_dtype=torch.float32, out=total)
        return
    for tile in _tiles(total):
        out = total[tile]
        rows = grad[:, tile].T
        part = torch.mm(rows, x, out_dtype=torch.float32, out=out if first else None)
        if factor is not None:
            part *= factor
        if not first:
            out += part


def scaled_for_products(grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """``grad`` for products with tensors of ``dtype``, and the factor to multiply those by.

    For a GPU the gradient is rounded to ``dtype``, if it isn't yet; a CPU's bfloat16 products round
    it themselves. In float16 small probabilities would underflow: the gradient is divided by a
    power of 2, the factor, that brings its largest entry near float16's largest number.
    """
    if dtype not in HALF or not _on_gpu(grad):
        return grad.to(torch.promote_types(dtype, torch.float32)), None
    if dtype == torch.bfloat16 or grad.numel() == 0:
        return grad.to(dtype), None
    factor = torch.exp2(grad.abs().amax().clamp_min(2.0**-80).log2().ceil() - 14)
    return (grad / factor).to(dtype), factor


def symmetric_product(x: Tensor, y: Tensor) -> Tensor:
    """XY, which must be symmetric: for large n only the lower blocks are multiplied."""
    n = x.shape[-2]
    if n < LEAST_BLOCKED:
        return x @ y
    product = x.new_empty(*x.shape[:-1], n)
    for i in range(4):
        start, end = i * n // 4, (i + 1) * n // 4
        block = x[..., start:, :] @ y[..., start:end]  # (*, n - start, end - start)
        product[..., start:, start:end] = block
        product[..., start:end, start:] = block.mT
    return product


def multiplied_in_half(x: Tensor) -> bool:
    """Whether ``x`` is half precision and products take it without conversion."""
    return x.dtype in HALF and (_on_gpu(x) or _uses_half_product(x))


def _uses_half_product(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _has_half_product()


@functools.cache
def _has_half_product() -> bool:
    older = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")  # CPU or environment
    return extension.CPU and not older and bool(torch.ops.fastkd_cpp.has_half_product())


@functools.cache
def _adds_to_float32(device: torch.device) -> bool:
    """Whether `torch.addmm` adds a product of bfloat16 to a float32 matrix; torch 2.8 refused."""
    total = torch.zeros(1, 1, device=device)
    half = total.bfloat16()
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _on_gpu(x: Tensor) -> bool:
    return x.device.type in ("cuda", "meta")


def _tiles(matrix: Tensor) -> list[slice]:
    rows, columns = matrix.shape
    step = max(TILE_ENTRIES[matrix.device.type == "cuda"] // max(columns, 1), 1)
    return [slice(start, start + step) for start in range(0, rows, step)]
