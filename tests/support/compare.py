"""Comparisons of all tests: error at most that of plain PyTorch plus TOLERANCE."""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Allowed error relative to the oracle's norm, above the reference's own error in that dtype.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
DTYPES = tuple(TOLERANCE)


def relative_error(actual: Tensor, oracle: Tensor, floor: float = 1e-8) -> float:
    """‖actual − oracle‖ / ‖oracle‖ in float64; NaN anywhere gives inf."""
    actual, oracle = actual.detach().double().cpu(), oracle.detach().double().cpu()
    assert actual.shape == oracle.shape, (actual.shape, oracle.shape)
    error = (actual - oracle).norm() / oracle.norm().clamp_min(floor)
    return float("inf") if error.isnan() else error.item()


def assert_accurate(
    actual: Tensor,
    oracle: Tensor,
    dtype: torch.dtype,
    reference: Tensor | None = None,
    floor: float = 1e-8,
) -> None:
    """Assert that the error of ``actual`` is at most that of ``reference`` plus TOLERANCE.

    ``floor``: the least size that an error is compared with, for what is nothing but the rounding
    of larger terms that cancel.
    """
    allowed = TOLERANCE[dtype]
    if reference is not None:
        allowed += relative_error(reference, oracle, floor)
    error = relative_error(actual, oracle, floor)
    assert error <= allowed, f"relative error {error:.3g} > {allowed:.3g} in {dtype}"


def every_two_meet(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of options that contain every pair of choices of two options."""
    rows = list(itertools.product(*(range(len(choices)) for choices in options)))
    bits: dict[Any, int] = {}  # of each pair of choices
    pairs = [
        sum(bits.setdefault(two, 1 << len(bits)) for two in itertools.combinations(choice, 2))
        for choice in (tuple(enumerate(row)) for row in rows)
    ]
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        number = max(range(len(rows)), key=lambda i: (pairs[i] & missing).bit_count())
        missing &= ~pairs[number]
        chosen.append(tuple(map(operator.getitem, options, rows[number])))
    return chosen


def raises(
    words: str, call: Callable[..., Any], *given: Any, error: Any = ValueError, **options: Any
) -> None:
    """Assert that ``call(*given, **options)`` raises ``error`` with a message of these words."""
    with pytest.raises(error, match=words):
        call(*given, **options)


def value_and_grad(
    function: Callable[..., Tensor],
    student: Tensor,
    *arguments: Any,
    upstream: Tensor | float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Value and gradient of ``student``, which keeps its strides."""
    return values_and_grads(function, [student], *arguments, upstream=upstream, **options)


def values_and_grads(
    function: Callable[..., Tensor],
    learning: Sequence[Tensor],
    *given: Any,
    upstream: Tensor | float = 3.0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Value of ``function(*learning, *given)`` and gradients of ``learning``, strides kept."""
    learning = [x.detach().requires_grad_() for x in learning]
    value = function(*learning, *given, **options)
    if not isinstance(upstream, Tensor):
        upstream = torch.full_like(value, upstream)
    return value.detach(), *torch.autograd.grad(value, learning, upstream.to(value))


def assert_matches_reference(
    loss: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    backend: str,
    learning: Tensor | Sequence[Tensor],
    *given: Any,
    upstream: Tensor | float = 3.0,
    products: torch.dtype | None = None,
    gradient_floor: float = 1e-8,
    **options: Any,
) -> None:
    """Assert value, gradients and dtypes, as accurate as ``reference`` in the same dtype.

    ``products``: the dtype of the products that the value is computed from, if its rounding is in
    the value.
    """
    learning = [learning] if isinstance(learning, Tensor) else learning
    dtype = learning[0].dtype
    if backend == "triton" and dtype == torch.float64:
        raises("float64 is left to", loss, *learning, *given, backend=backend, **options)
        return

    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    options["upstream"] = upstream
    actual = values_and_grads(loss, learning, *given, backend=backend, **options)
    plain = values_and_grads(reference, learning, *given, **options)
    exact = {name: double(x) for name, x in options.items()}
    oracle = values_and_grads(reference, [*map(double, learning)], *map(double, given), **exact)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = (working, *(x.dtype for x in learning))
    assert tuple(x.dtype for x in actual) == dtypes
    floors = (1e-8, *[gradient_floor] * len(learning))
    rounded = (products or dtypes[0], *dtypes[1:])
    for a, o, p, kind, floor in zip(actual, oracle, plain, rounded, floors, strict=True):
        assert_accurate(a, o, kind, p, floor)


class Operations(TorchDispatchMode):
    """Context that records the operators that run inside, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any]]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls.append((operator, args))
        return operator(*args, **kwargs or {})


def counted(
    function: Callable[..., Any], backend: str = "eager"
) -> tuple[Callable[..., Any], list[Any]]:
    """The function compiled with fullgraph, and the list of its graphs."""
    graphs: list[Any] = []
    compiler = torch._dynamo.lookup_backend(backend)

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return compiler(graph, inputs)

    torch._dynamo.reset()  # drop graphs compiled from the same lines before
    return torch.compile(function, fullgraph=True, backend=count), graphs


def count_graphs(function: Callable[..., Tensor], calls: Iterable[Sequence[Any]]) -> int:
    """Number of graphs for the calls' arguments; asserts eager's values and gradients.

    Sizes in which the first two calls differ must stay symbolic from the first graph on.
    """
    compiled, graphs = counted(function)
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    calls = iter(calls)
    two = list(itertools.islice(calls, 2))
    for x, y in zip(tree_leaves(two[0]), tree_leaves(two[-1]), strict=True):
        if isinstance(x, Tensor):
            for dim, (size, other) in enumerate(zip(x.shape, y.shape, strict=True)):
                if size != other:
                    torch._dynamo.mark_dynamic(x, dim)
    for call in itertools.chain(two, calls):
        learnt = [x for x in call if isinstance(x, Tensor) and x.requires_grad] + parameters
        values = [run(*call) for run in (compiled, function)]
        actual, expected = ((v, *torch.autograd.grad(v.sum(), learnt)) for v in values)
        torch.testing.assert_close(actual, expected)
    return len(graphs)
