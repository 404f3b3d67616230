"""The compiled extension ``fastkd._C`` (C++ and CUDA). The package works without it."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor


def _load(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _eigh_meta(a: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of eigenvalues and eigenvectors."""
    torch._check(a.dim() >= 2 and a.shape[-1] == a.shape[-2], lambda: "a must be square")
    return a.new_empty(a.shape[:-1]), a.new_empty(a.shape)


def _roots_meta(a: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of root, inverse root and rank."""
    root, inverse = (a.new_empty(a.shape, dtype=_scalar(a).dtype) for _ in range(2))
    return root, inverse, a.new_empty(a.shape[:-2], dtype=torch.int64)


def _layer_norm_mse_meta(x: Tensor, *rest: Any) -> list[Tensor]:
    """Shapes of the loss and of the requested gradients."""
    return [_scalar(x), *(_gradient(x) for needed in rest[-2:] if needed)]


def _relation_terms_meta(student: Tensor, *rest: Any) -> list[Tensor]:
    """Shapes of the two weighted losses and of the student's gradient."""
    terms = student.new_empty(2, dtype=_scalar(student).dtype)
    return [terms, student.new_empty(student.shape, dtype=terms.dtype)] if rest[-1] else [terms]


def _scalar(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


def _rows_meta(logits: Tensor, *rest: Any, reduction: str = "none", **options: Any) -> Tensor:
    """Shape of the losses of rows, or of their sum."""
    return _scalar(logits).new_empty(logits.shape[:1] if reduction == "none" else ())


def _loss_meta(
    student: Tensor, samples: torch.Size, reduction: str, gradient: bool
) -> list[Tensor]:
    """Shapes of the loss (one a sample for reduction "none") and of the gradient."""
    loss = _scalar(student)
    loss = loss.new_empty(samples) if reduction == "none" else loss
    return [loss, _gradient(student)] if gradient else [loss]


def _gradient(x: Tensor) -> Tensor:
    """A gradient computed in the forward pass: float16 would underflow before the loss scale."""
    return x.new_empty(x.shape, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype)


def _states_meta(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *rest: Any,
    count: float,
    narrow: bool,
    **options: Any,
) -> list[Tensor]:
    """Shapes of the loss, the terms, and the requested gradients."""
    shape = () if count else (hidden.shape[0],)
    results = [_scalar(hidden).new_empty(sizes) for sizes in (shape, (4, *shape))]
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is not None and options[f"needs_{name}"]:
            rounds = narrow and x is weight and x.dtype == torch.bfloat16
            results.append(x.new_empty(x.shape, dtype=x.dtype if rounds else _scalar(x).dtype))
    return results


# Name of an operator → function that returns empty results, for tracing.
CPP_OPERATORS = {
    "layer_norm_mse": _layer_norm_mse_meta,
    "hidden_states": lambda student, *rest: _loss_meta(student, student.shape[:1], *rest[-2:]),
    "soft_targets": _rows_meta,
    "top_k_soft_targets": _rows_meta,
    "matched_soft_targets": _rows_meta,
    "log_totals": _rows_meta,
    "is_top_k": lambda *inputs: True,
    "attention": lambda student, *rest: _loss_meta(student, student.shape[:1], *rest[-2:]),
    "knn": lambda student, *rest, reduction, gradient, **options: _loss_meta(
        student, student.shape[:1], reduction, gradient
    ),
    "relation_terms": _relation_terms_meta,
    "cos_nce": lambda student, *rest, reduction, gradient, **options: _loss_meta(
        student, student.shape[:2], reduction, gradient
    ),
    "cross_entropy": _rows_meta,
    "cross_entropy_of_states": _states_meta,
    "half_product": lambda *matrices, unit="fastest": None,
    "take_pages": lambda x: None,
}

# A library of an older build lacks operators.
CPU = (
    _load("fastkd._C")
    and all(hasattr(torch.ops.fastkd_cpp, name) for name in CPP_OPERATORS)
    and hasattr(torch.ops.fastkd, "roots_by_products")
)
CUDA = CPU and torch.version.cuda is not None and _load("fastkd._C_cuda")

LEAST_CAPABILITY = (8, 0)
# GPUs with fast float64 tensor cores: A100, H100.
FLOAT64_CAPABILITIES = ((8, 0), (9, 0))


def _capability(device: torch.device) -> tuple[int, int]:
    gpu = torch.cuda.get_device_properties(device)  # a constant to torch.compile
    return gpu.major, gpu.minor


_known_capability = functools.cache(_capability)  # torch.compile would warn about the cache


def why_not_gpu(device: torch.device) -> str | None:
    """Why Triton and CUDA kernels can't run on a CUDA device, or None if they can."""
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA GPUs, and this torch is built for AMD's"
    compiling = torch.compiler.is_compiling()
    capability = (_capability if compiling else _known_capability)(device)
    if capability < LEAST_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"its kernels need compute capability 8.0 or later, and {device} has {found}"
    return None


def multiplies_float64(device: torch.device) -> bool:
    """Whether a GPU has fast float64 products."""
    compiling = torch.compiler.is_compiling()
    return (_capability if compiling else _known_capability)(device) in FLOAT64_CAPABILITIES


if CPU:
    for name, shapes in CPP_OPERATORS.items():
        torch.library.register_fake(f"fastkd_cpp::{name}")(shapes)
    torch.library.register_fake("fastkd::eigh")(_eigh_meta)
    for name in ("symmetric_roots", "roots_by_products"):
        torch.library.register_fake(f"fastkd::{name}")(_roots_meta)
