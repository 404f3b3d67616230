"""A benchmark case: inputs of some sizes, and the providers that compute the same loss on them."""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastkd._core import dispatch

REFERENCE = "reference"
COMPILED = "torch.compile"
COMPILED_GRAPH = "torch.compile, CUDA graph"
NEEDS_CUDA = "Triton kernels need a CUDA device"


class Bound:
    """A provider with its inputs: `step` runs forward and backward once.

    ``between`` runs before every timed step, untimed: what training changes from step to step.
    """

    def __init__(
        self,
        forward: Callable[[], Tensor],
        leaves: Sequence[Tensor],
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.forward = forward
        self.leaves = list(leaves)
        self.between = between

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss, and its gradients with respect to the leaves."""
        loss = self.forward()
        return loss.detach(), torch.autograd.grad(loss, self.leaves)


class GraphBound(Bound):
    """Forward and backward captured once in a CUDA graph; a step is one replay."""

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound.forward, bound.leaves, bound.between)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                bound.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = bound.step()

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.graph.replay()
        return self.result


Bind = Callable[[dict[str, Any]], Bound]
WhyNot = Callable[[torch.device], str | None]


@dataclass(frozen=True)
class Provider:
    """One way to compute a case's loss.

    ``why_not`` gives the reason why it can't run on a device, or None. ``own_objective`` marks a
    peer that minimises something else: timed, not compared. ``own_leaves`` marks a provider whose
    trained tensors are not the inputs': only its value is compared.
    """

    name: str
    bind: Bind
    why_not: WhyNot = lambda device: None
    own_objective: bool = False
    own_leaves: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    """One group of the benchmark: a loss at one size. The first provider is the reference.

    ``make(device=, dtype=, **sizes)`` returns the inputs; those that require grad are the leaves.
    ``bytes_moved`` and ``operations`` are the minimum of forward and backward: each input read
    once, each gradient written once. ``check_sizes`` replaces sizes for the check against float64
    where the full size would not fit. ``oracle`` replaces the reference in that check where its
    autograd gives no gradient. ``sweep`` names the size that grows along cases of equal title.
    ``headline`` puts the case into the README. ``data``: what a language model's numbers have that
    the inputs share, if they do.
    """

    loss: str
    title: str
    set: str
    sizes: dict[str, int]
    dtype: torch.dtype
    make: Callable[..., dict[str, Any]]
    providers: tuple[Provider, ...]
    bytes_moved: int
    operations: int
    check_sizes: dict[str, int] = field(default_factory=dict)
    oracle: Callable[..., Tensor] | None = None
    sweep: str = ""
    headline: bool = False
    data: str = ""

    @property
    def key(self) -> str:
        """Name of the group: loss, title, sizes and dtype."""
        sizes = " ".join(f"{name}{value}" for name, value in self.sizes.items())
        return f"{self.loss}/{self.title}/{sizes}/{str(self.dtype).removeprefix('torch.')}"


def ours(loss: str, provider: str) -> bool:
    """Whether a provider is fastkd's own code."""
    return provider.startswith("fastkd") or (loss == "step" and provider != REFERENCE)


def call(function: Callable[..., Tensor], **options: Any) -> Bind:
    """Bind ``function(**inputs, **options)``; leaves are the inputs that require grad."""

    def bind(inputs: dict[str, Any]) -> Bound:
        return Bound(lambda: function(**inputs, **options), leaves_of(inputs))

    return bind


def leaves_of(inputs: Any) -> list[Tensor]:
    """Tensors that require grad, in order, through dicts and lists."""
    return [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]


def compiled(function: Callable[..., Tensor]) -> Provider:
    """The reference under torch.compile, in several graphs where one is not possible."""

    def bind(inputs: dict[str, Any]) -> Bound:
        # Every case recompiles the same function; past a limit dynamo would run eagerly, silently.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return call(torch.compile(function, dynamic=False))(inputs)

    return Provider(COMPILED, bind)


def compiled_graph(function: Callable[..., Tensor]) -> Provider:
    """The reference under torch.compile, forward and backward captured in one CUDA graph."""
    return Provider(
        COMPILED_GRAPH, lambda inputs: GraphBound(compiled(function).bind(inputs)), no_graphs
    )


def why_not_by(name: str, backend: str) -> WhyNot:
    """Reason why a public function's ``backend`` can't run on a device."""

    def why_not(device: torch.device) -> str | None:
        x = torch.empty(0, device=device)
        triton = backend == "triton" and name in dispatch.TRITON_FUNCTIONS
        if triton and device.type != "cuda":
            return NEEDS_CUDA
        return dispatch.why_not(backend, name, x)

    return (lambda device: None) if backend == "torch" else why_not


def no_graphs(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "CUDA graphs need a CUDA device"


def unless_installed(package: str, name: str) -> WhyNot:
    """Reason where ``package``, imported as ``name``, is missing."""
    missing = f"{package} is not installed (pip install {package})"
    return lambda device: None if importlib.util.find_spec(name) else missing


def fastkd_providers(function: Callable[..., Tensor], name: str) -> list[Provider]:
    """``function`` in PyTorch, C++ and Triton, and a CUDA graph of Triton's or PyTorch's."""
    by_backend = {
        backend: Provider(
            f"fastkd {backend}", call(function, backend=backend), why_not_by(name, backend)
        )
        for backend in ("torch", "cpp", "triton")
    }

    def bind_graph(inputs: dict[str, Any]) -> Bound:
        triton = by_backend["triton"]
        without = triton.why_not(leaves_of(inputs)[0].device)
        return GraphBound((by_backend["torch"] if without else triton).bind(inputs))

    return [*by_backend.values(), Provider("fastkd, CUDA graph", bind_graph, no_graphs)]


@dataclass(frozen=True)
class Work:
    """Shared description of a loss's cases: `fastkd_providers` of ``function`` and a reference.

    ``cost(**sizes)`` returns the entries moved and the operations, as `Case` counts them;
    ``peers`` are other packages' providers of the same loss.
    """

    loss: str
    title: str
    make: Callable[..., dict[str, Any]]
    reference: Callable[..., Tensor]
    function: Callable[..., Tensor]
    name: str  # of the public function
    cost: Callable[..., tuple[int, int]]
    peers: tuple[Provider, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # of both functions

    def case(
        self, set: str, dtype: torch.dtype = torch.float32, *, compile: bool = True,
        as_called: bool = False, sweep: str = "", headline: bool = False,
        check_sizes: dict[str, int] | None = None, oracle: Callable[..., Tensor] | None = None,
        data: str = "", **sizes: int,
    ) -> Case:  # fmt: skip
        """A case; ``compile`` adds the reference under torch.compile.

        ``as_called``: one provider of fastkd, with the default backend, instead of every backend.
        """
        entries, operations = self.cost(**sizes)
        reference = functools.partial(self.reference, **self.options)
        function = functools.partial(self.function, **self.options)
        own = [Provider("fastkd", call(function))]
        return Case(
            loss=self.loss,
            title=f"{self.title}, {data}" if data else self.title,
            set=set,
            sizes=sizes,
            dtype=dtype,
            make=self.make,
            providers=(
                Provider(REFERENCE, call(reference)),
                *([compiled(reference), compiled_graph(reference)] if compile else []),
                *(own if as_called else fastkd_providers(function, self.name)),
                *self.peers,
            ),
            bytes_moved=entries * dtype.itemsize,
            operations=operations,
            check_sizes=check_sizes or {},
            oracle=oracle,
            sweep=sweep,
            headline=headline,
            data=data,
        )
