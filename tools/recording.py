"""What a benchmark case starts on a GPU: each launch and each operation, in order, without one."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from bench.case import Case

from . import dry_cuda
from .compile_report import Form
from .machine_code import InMemory, Launch

PREFERRED = ("fastkd triton", "fastkd torch", "fastkd")
# Operations that start no kernel, beside views.
NO_KERNEL = {
    "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "promote_types",
}  # fmt: skip
ARITHMETIC = {torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}


class Recorder(dry_cuda.Device):
    """The GPU that is not there, which keeps what is started on it."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability = capability
        self.started: list[Any] = []
        self.unread: list[str] = []
        self.launch: tuple[Any, ...] = ()

    def record(self, case: Case) -> tuple[list[Any], str | None]:
        """Launches and operations of one forward and backward, and what went wrong."""
        made = FakeTensorMode()
        with made:
            inputs = case.make(device=torch.device("cpu"), dtype=case.dtype, **case.sizes)
        self.started, self.unread = [], []
        with self.running(), torch.device("cuda"):
            inputs = tree_map_only(torch.Tensor, on_device, inputs)
            device = torch.device("cuda")
            usable = {p.name: p for p in case.providers if p.why_not(device) is None}
            provider = next(usable[name] for name in PREFERRED if name in usable)
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_: module):
                bound = provider.bind(inputs)
            with self._noted(), _Operations(self):
                problem = dry_cuda.problem(bound.forward)
        return self.started, problem or "; ".join(dict.fromkeys(self.unread)) or None

    def compile(self, kernel, _key, signature, _device, constexprs, options, *rest) -> None:
        form = Form.asked_for(kernel, self.capability, signature, constexprs, rest[0], options)
        _, values, grid = self.launch
        given = dict(zip(kernel.arg_names, values, strict=False))
        arguments = [x for name, kind in form.types for x in _arguments(given.get(name), kind)]
        self.started.append(Launch(form, grid, arguments))

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        def noted(kernel: Any, arguments: Any, grid: Any) -> None:
            self.launch = kernel, tuple(arguments), tuple(int(size) for size in grid)

        with mock.patch.object(dry_cuda, "check_launch", noted):
            yield


def _arguments(value: Any, kind: Any) -> list[Any]:
    """Those that the compiled function has: nothing of what is fixed."""
    if kind == "constexpr":
        return []
    if isinstance(kind, tuple):
        return [x for part, k in zip(value, kind, strict=True) for x in _arguments(part, k)]
    if isinstance(value, torch.Tensor):
        return [InMemory(value.numel() * value.element_size())]
    return [value]


def on_device(x: torch.Tensor) -> torch.Tensor:
    """The same without data on the GPU."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return made.requires_grad_(x.requires_grad)


# Operations that torch's own counter lacks: of A (*, n, n), and B (*, n, k) where AX = B is solved.
FACTORS = {
    "linalg_cholesky_ex": lambda a, **_: a.numel() * a.shape[-1] // 3,
    "linalg_solve_triangular": lambda a, b, **_: a.shape[-1] * b.numel(),
}


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace == "prim" or func._opname in NO_KERNEL:
            return result
        tensors = [x for x in tree_leaves((args, kwargs, result))
                   if isinstance(x, torch.Tensor)]  # fmt: skip
        moved = sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values())
        name = func._opname.removesuffix("_")  # in place or not
        count = flop_registry.get(getattr(torch.ops.aten, name, None), FACTORS.get(name))
        operations = count(*args, **(kwargs or {}), out_val=result) if count else 0
        dtype = tensors[0].dtype if tensors else torch.float32
        fast = torch.get_float32_matmul_precision() != "highest"
        arithmetic = ARITHMETIC.get(dtype, "tf32" if fast else "f32")
        self.recorder.started.append((func._opname, moved, operations, arithmetic))
        if func.namespace != "aten":
            self.recorder.unread.append(f"without {func}, whose code is not read")
        return result
