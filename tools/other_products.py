"""A pytest plugin: entries of matrix products differ in the last bits, as with another BLAS.

A BLAS library adds an entry's terms in an order that depends on the processor, on the matrices'
sizes and on the entry's place. Here every third entry of a product is computed in float64 with
reversed terms, and rounded. PyTorch's kernels are replaced in its dispatcher, where products of the
backward pass and of C++ pass too. The extension's own products and MKL calls don't.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORMS = ("mm", "mm.out", "bmm", "bmm.out")
FORMS += tuple(name + form for name in ("addmm", "baddbmm") for form in ("", ".out", "_"))
LIBRARY = torch.library.Library("aten", "IMPL")


class _Replacing:
    """Whether a replaced kernel is running; kernels call each other."""

    now = False


def another_order(a: Tensor, b: Tensor) -> Tensor:
    """The product in float64, with its terms in reversed order."""
    return a.double().flip(-1) @ b.double().flip(-2)


def replaced(original: Any) -> Callable[..., Tensor]:
    """A kernel that computes as ``original``, but every third entry by `another_order`."""

    def kernel(keys: Any, *given: Any, **options: Any) -> Tensor:
        *total, a, b = given
        if _Replacing.now or not a.is_floating_point():
            return original.call_boxed(keys, *given, **options)  # type: ignore[no-any-return]
        _Replacing.now = True
        try:
            exact = another_order(a, b) * options.get("alpha", 1)
            beta = options.get("beta", 1)
            if total and beta != 0:
                exact += beta * total[0]
            found: Tensor = original.call_boxed(keys, *given, **options)
            rows, columns = found.shape[-2:]
            place = (torch.arange(rows)[:, None] + 2 * torch.arange(columns) + rows) % 3 == 0
            found.copy_(torch.where(place, exact.to(found.dtype), found))
        finally:
            _Replacing.now = False
        return found

    return kernel


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a kernel is overridden, once
    for form in FORMS:
        found = torch.library.get_kernel(f"aten::{form}", "CPU")
        LIBRARY.impl(form, replaced(found), "CPU", with_keyset=True)
