"""Plans: a loss call whose metadata were seen before, without its Python code.

On a GPU no value of a tensor is read, so every check and every choice of a call follows from
metadata. A call under `planned` therefore runs as written the first time that it comes with some
metadata. The second time it is recorded: which tensors were allocated, which kernels were started
with which of their addresses, which operations of PyTorch and which autograd functions ran. From
the third time on the record is repeated, with new tensors and addresses.

    public call ── key ──┬── not covered, or new ── as written
                         ├── seen once ── as written, under `Recording`
                         └── recorded ── `Program.call`: Python code made from the record

A record has four kinds of steps: an allocation, an operation, a launch, an autograd function. A
launch calls Triton's own launcher with addresses, each a tensor's plus a number of bytes: a view
that only launches read is never made. An autograd function becomes a node of the same name, with a
program for its forward pass and one for each kind of upstream gradient. It saves the same tensors,
so that saved-tensor hooks, checkpointing and ``retain_graph`` work as in the call as written.

The key has everything that a call depends on: see `_describe`, `_addresses`, `_surroundings`. Not
covered are calls in a graph, under vmap or a mode of PyTorch, with tensor subclasses, with Triton's
launch hooks, from another current device, over several processes, and those in which something
happens that a record can't repeat: a value is read, or a tensor comes from elsewhere. They run as
written.

``FASTKD_PLANS=0`` in the environment switches plans off, to find out whether one is at fault.
A record holds no tensor, and the least recently used ones beyond `MOST_PLANS` are dropped;
`clear_plans` drops all.
"""

import copy
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastkd._core.operator import RECORDING

MOST_PLANS = 1024
MOST_BACKWARD_PLANS = 8  # of one forward pass: kinds of upstream gradients
DEVICES = ("cuda",)  # types of devices whose calls are planned

# What only makes room, and what only reads metadata; a value that is read can't be repeated.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
METADATA = {
    "__get__", "__len__", "_is_functional_tensor", "can_cast", "data_ptr", "dim", "element_size",
    "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_signed",
    "nelement", "ndimension", "numel", "promote_types", "result_type", "size", "storage_offset",
    "stride", "untyped_storage",
}  # fmt: skip
_BY_TYPE = {int, bool, float, str, type(None), torch.dtype, torch.device}

Public = TypeVar("Public", bound=Callable[..., Any])


class _NoPlan(Exception):
    """A record can't repeat what happens in a call."""


# --- The key -------------------------------------------------------------------------------------


def _describe(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    """Extend the key by some arguments, and ``tensors`` by those that they hold."""
    for x in values:
        kind = type(x)
        if x is None:
            key.append(None)
        elif kind is Tensor or kind is nn.Parameter:
            tensors.append(x)
            key += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference())
        elif kind in _BY_TYPE:
            key += (kind, x or str(x))  # 0.0 and -0.0 differ, and so do 1, 1.0 and True
        elif kind is list or kind is tuple:
            key += (kind, len(x))
            _describe(x, key, tensors)
        elif hasattr(kind, "__dataclass_fields__"):
            key.append(kind)
            _describe(vars(x).values(), key, tensors)
        else:
            raise _NoPlan(f"an argument is a {kind.__name__}")


def _addresses(tensors: Sequence[Tensor]) -> Any:
    """Addresses as far as a call depends on them: mod 16, and which arguments share them."""
    found = [x.data_ptr() for x in tensors]
    if len(found) == 1:
        return found[0] % 16
    offsets = [address % 16 for address in found]
    known = tuple(offsets) if any(offsets) else 0
    if len(set(found)) == len(found):
        return known
    same = [id(x) for x in tensors]
    return known, tuple(map(found.index, found)), tuple(map(same.index, same))


def _layouts(tensors: Iterable[Tensor | None]) -> list[Any]:
    """What tells whether saved tensors are those of the forward pass, or a hook changed them."""
    return [None if x is None else (x.data_ptr(), x.stride(), x.dtype) for x in tensors]


def _surroundings() -> tuple[Any, ...]:
    """What a call depends on beside its arguments."""
    return (
        torch.is_grad_enabled(),
        _precision(),
        torch._C._get_deterministic_algorithms(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        _driver().get_current_device(),
    )


def _precision() -> Any:
    """Precision of float32 matrix products, under both of PyTorch's interfaces."""
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:  # once ``torch.backends.fp32_precision`` was set
        return torch.backends.cuda.matmul.fp32_precision


@functools.cache
def _triton() -> Any:
    """Triton's drivers and its launch hooks, or None without Triton."""
    try:
        from triton import knobs
        from triton.runtime import driver
    except ImportError:
        return None
    return driver, knobs.runtime


def _driver() -> Any:
    return _triton()[0].active


def _is_plain() -> bool:
    """Whether Triton is there, and nothing looks at or changes the operations of this thread."""
    triton = _triton()
    return triton is not None and not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or getattr(triton[1].launch_enter_hook, "calls", triton[1].launch_enter_hook)
        or getattr(triton[1].launch_exit_hook, "calls", triton[1].launch_exit_hook)
    )


# --- Recording -----------------------------------------------------------------------------------


class _Slot(int):
    """Number of a tensor in a program, where a step or a result has that tensor."""


class _Step(NamedTuple):
    """One or more lines of a program, from the names of the program's constants."""

    write: Callable[["Program"], str]
    used: Sequence[int]  # slots
    made: Sequence[int]
    droppable: bool  # if nothing uses what it makes


class Program:
    """Python code that repeats a call: ``call`` takes its tensors, after a node's context.

    ``source`` is the code's text, with a name t<i> for each tensor, p<i> for its address, and
    c<i> for constants.
    """

    def __init__(self, recording: "Recording", results: Any, context: Any = None) -> None:
        self.constants: dict[str, Any] = {"torch": torch}
        self.pointers: set[int] = set()
        results = recording.slots_of(results)
        saved = recording.slots_of(getattr(context, "to_save", None) or ())
        constant = recording.slots_of(getattr(context, "non_differentiable", None) or ())
        kept = set(_slots_in([results, saved]))
        steps = []
        for step in reversed(recording.steps):
            if not (step.droppable and kept.isdisjoint(step.made)):
                # What no later step uses is freed, as in the call as written.
                unused = {*step.used, *step.made} - kept
                freed = [i for i in sorted(unused) if i >= recording.inputs]
                steps.append((step, freed))
                kept.update(step.used)
        names = [f"t{i}" for i in range(recording.inputs)]
        lines = [f"def call({', '.join(names if context is None else ['ctx', *names])}):"]
        if recording.starts_kernels:
            driver = self.constant(_triton()[0])
            lines.append(f"stream = {driver}.active.get_current_stream({recording.device})")
        for step, freed in reversed(steps):
            lines += step.write(self).split("\n")
            lines += [" = ".join([*(f"t{i}" for i in freed), "None"])] if freed else []
        if context is not None:
            lines.append(f"saved = {self.text(saved)}")
            lines.append("ctx.save_for_backward(*saved)")
            lines.append(f"ctx.layouts = {self.constant(_layouts)}(saved)")
        if constant:
            lines.append(f"ctx.mark_non_differentiable(*{self.text(constant)})")
        self.source = "\n    ".join([*lines, f"return {self.text(results)}\n"])
        exec(self.source, self.constants)
        self.call: Callable[..., Any] = self.constants["call"]

    def constant(self, x: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name

    def text(self, x: Any) -> str:
        """An expression for ``x``, with its slots' tensors."""
        kind = type(x)
        if kind is _Slot:
            return f"t{int(x)}"
        if kind is tuple or kind is list:
            items = "".join(f"{self.text(item)}, " for item in x)
            return f"({items})" if kind is tuple else f"[{items}]"
        if kind is dict:
            return f"{{{', '.join(f'{name!r}: {self.text(item)}' for name, item in x.items())}}}"
        if kind is _Argument:
            return x.text
        if x is None or kind is int or kind is bool or kind is str:
            return repr(x)
        return self.constant(x)

    def address(self, place: tuple[int, int]) -> str:
        slot, offset = place
        return f"p{slot} + {offset}" if offset else f"p{slot}"

    def addresses(self, places: Iterable[tuple[int, int]]) -> str:
        """Lines that read the addresses which no line before has read."""
        slots = dict.fromkeys(slot for slot, _ in places if slot not in self.pointers)
        self.pointers.update(slots)
        return "".join(f"p{slot} = t{slot}.data_ptr()\n" for slot in slots)


def _slots_in(x: Any) -> list[int]:
    if type(x) in (tuple, list):
        return [i for item in x for i in _slots_in(item)]
    if type(x) is dict:
        return _slots_in(list(x.values()))
    return [int(x)] if type(x) is _Slot else []


class Recording(TorchFunctionMode):
    """Context in which operations, launches and autograd functions become a program's steps."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.held: list[weakref.ref[Tensor] | None] = []  # by slot
        self.slots: dict[int, _Slot] = {}  # by id, of tensors that are alive
        self.base: dict[int, tuple[int, int]] = {}  # of a view: whose memory, and where in it
        self.steps: list[_Step] = []
        self.starts_kernels = False  # itself, not by an autograd function
        self.plannable = False  # starts kernels
        self.paused = False
        self.problem: str | None = None
        self.surroundings = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        self.device = _driver().get_current_device()
        for x in inputs:
            self.add(x)
        self.inputs = len(self.held)

    def __enter__(self) -> "Recording":
        self.outer, RECORDING.of = getattr(RECORDING, "of", None), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        RECORDING.of = self.outer
        super().__exit__(*error)

    def add(self, x: Any) -> _Slot:
        slot, key = _Slot(len(self.held)), id(x)
        if x is None or key in self.slots:
            self.held.append(None)
            return self.slots.get(key, slot)
        slots = self.slots
        slots[key] = slot
        self.held.append(weakref.ref(x, lambda _: slots.pop(key, None)))
        return slot

    def slots_of(self, x: Any) -> Any:
        """``x`` with slots in place of its tensors."""
        if isinstance(x, Tensor):
            if id(x) not in self.slots:
                raise _NoPlan("a tensor comes from elsewhere")
            return self.slots[id(x)]
        if isinstance(x, (tuple, list)):
            kind = list if isinstance(x, list) else tuple
            return kind(map(self.slots_of, x))
        return {name: self.slots_of(item) for name, item in x.items()} if type(x) is dict else x

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused or self.problem:
            return func(*args, **kwargs)
        try:
            given = self.slots_of((args, kwargs))
        except _NoPlan as problem:
            self.problem = str(problem)
            return func(*args, **kwargs)
        tensors = [cast(Any, self.held[i])() for i in _slots_in(given)]
        written = [x for x in tensors if not x.is_inference()]
        versions = [x._version for x in written]
        result = func(*args, **kwargs)
        changed = versions != [x._version for x in written]
        self.operation(func, given, tensors, result, changed)
        return result

    def operation(
        self, func: Any, given: Any, tensors: list[Tensor], result: Any, changed: bool
    ) -> None:
        """Add an operation's step."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        new = [x for x in results if isinstance(x, Tensor) and id(x) not in self.slots]
        name = getattr(func, "__name__", "")
        if not changed and not any(isinstance(x, Tensor) for x in results):
            if name not in METADATA:
                self.problem = f"{name} reads a value"
            return
        if not new and not changed:  # x.contiguous() is x
            return
        used = _slots_in(given)
        out = [self.add(x) for x in new]
        if name in ALLOCATIONS and len(new) == 1 and type(result) is Tensor:
            self.steps.append(_Step(_allocation(result, out[0]), [], out, True))
            return
        views = [x for x in new if not changed and self.view(x, tensors)]
        call = self.in_these_surroundings(func)
        write = _operation(call, given[0], given[1], self.slots_of(result))
        self.steps.append(_Step(write, used, out, len(views) == len(new) and not changed))

    def view(self, x: Tensor, tensors: list[Tensor]) -> bool:
        """Whether ``x`` shares the memory of one of ``tensors``; notes where."""
        storage = x.untyped_storage().data_ptr()
        for of in tensors:
            if storage and storage == of.untyped_storage().data_ptr():
                slot, offset = self.place(of)
                self.base[self.slots[id(x)]] = slot, offset + x.data_ptr() - of.data_ptr()
                return True
        return False

    def place(self, x: Tensor) -> tuple[int, int]:
        """The slot whose address ``x`` has, plus a number of bytes."""
        slot = self.slots_of(x)
        return self.base.get(slot, (int(slot), 0))

    def in_these_surroundings(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """``func``, with autocast and grad mode as they are here."""
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        if (grad, autocast) == self.surroundings:
            return func

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(grad), torch.autocast("cuda", enabled=autocast):
                return func(*args, **kwargs)

        return call

    def launch(self, kernel: Any, compiled: Any, grid: Any, args: Any, options: Any) -> None:
        """Add a launch's step; see `fastkd._core.operator.launch_kernel`."""
        self.starts_kernels = self.plannable = True
        if compiled is None or _driver().get_current_device() != self.device:
            self.problem = "a launch on another device, or of a kernel that isn't compiled"
            return
        names = {name: x for name, x in options.items() if name in kernel.signature.parameters}
        bound = kernel.signature.bind(*args, **names)
        bound.apply_defaults()
        try:
            given = [self.places(x) for x in bound.arguments.values()]
        except _NoPlan as problem:
            self.problem = str(problem)
            return
        used = [slot for x in given if type(x) is _Places for slot, _ in x.of]
        self.steps.append(_Step(_launch(compiled, (*grid, 1, 1)[:3], given), used, [], False))

    def places(self, x: Any) -> Any:
        """An argument of a launch, with places in place of its tensors."""
        if isinstance(x, Tensor):
            return _Places([self.place(x)], False)
        if isinstance(x, (tuple, list)):
            return _Places([self.place(y) for y in x], True)
        return x

    def apply(self, function: type[torch.autograd.Function], options: Any, tensors: Any) -> Any:
        """``function.apply``, as a step; see `fastkd._core.numerics.apply`."""
        if isinstance(options, Tensor):
            self.problem = "an autograd function without options"
        if self.problem:
            return function.apply(options, *tensors)
        node, self.paused = _Node(function, options), True
        try:
            result = node.apply(*tensors)
        finally:
            self.paused = False
        self.problem = self.problem or node.problem
        self.plannable = self.plannable or node.plannable
        try:
            given = self.slots_of(tensors)
        except _NoPlan as problem:
            self.problem = str(problem)
            return result
        results = result if type(result) is tuple else (result,)
        out = [self.add(x) for x in results if isinstance(x, Tensor)]
        write = _operation(node.apply, given, {}, self.slots_of(result))
        self.steps.append(_Step(write, _slots_in(given), out, False))
        return result


class _Places(NamedTuple):
    """Tensors of a launch's argument, as slots and bytes from there."""

    of: list[tuple[int, int]]
    several: bool  # a tuple


def _allocation(x: Tensor, slot: int) -> Callable[[Program], str]:
    size, stride, dtype, device = tuple(x.shape), x.stride(), x.dtype, x.device

    def write(program: Program) -> str:
        kind = f"dtype={program.constant(dtype)}, device={program.constant(device)}"
        return f"t{slot} = torch.empty_strided({size}, {stride}, {kind})"

    return write


def _operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Callable[[Program], str]:
    """Step of an operation or an autograd function; ``result`` has slots of what it returns."""

    def write(program: Program) -> str:
        given = [program.text(x) for x in args]
        given += [f"{name}={program.text(x)}" for name, x in kwargs.items()]
        call = f"{program.constant(func)}({', '.join(given)})"
        if type(result) is _Slot:
            return f"t{result} = {call}"
        if not _slots_in(result):
            return call
        lines = [f"t{x} = made[{i}]" for i, x in enumerate(result) if type(x) is _Slot]
        return "\n".join([f"made = {call}", *lines])

    return write


def _launch(compiled: Any, grid: tuple[int, ...], given: list[Any]) -> Callable[[Program], str]:
    """Step that calls Triton's launcher; only addresses and the stream change."""

    def write(program: Program) -> str:
        lines = program.addresses(place for x in given if type(x) is _Places for place in x.of)
        texts = {}
        for i, x in enumerate(given):
            if type(x) is _Places:
                found = [program.address(place) for place in x.of]
                texts[i] = f"({', '.join(found)},)" if x.several else found[0]
            else:
                texts[i] = program.text(x)
        arguments = [_Argument(text) for text in texts.values()]
        launch, around = _launcher(compiled, grid, arguments)
        return f"{lines}{program.constant(launch)}({', '.join(map(program.text, around))})"

    return write


class _Argument:
    """An argument of a launch that a program computes, as text."""

    def __init__(self, text: str) -> None:
        self.text = text


def _launcher(compiled: Any, grid: tuple[int, ...], arguments: list[_Argument]) -> Any:
    """Triton's launcher, and what it is called with.

    Its class passes everything on to a function in C. What that gets is found by a call with
    another function in its place: it differs between versions of Triton.
    """
    run, got = compiled.run, []
    around = [*grid, _Argument("stream"), compiled.function, compiled.packed_metadata]
    around += [None, None, None, *arguments]  # no hooks
    if not callable(getattr(run, "launch", None)) or any(
        getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")
    ):
        return run, around
    probe = copy.copy(run)
    probe.launch = lambda *given: got.append(given)
    probe(*around)
    return run.launch, got[0]


# --- Autograd functions --------------------------------------------------------------------------


class _Node:
    """An autograd function of a record: its forward pass, and backward passes, as programs."""

    def __init__(self, function: type[torch.autograd.Function], options: Any) -> None:
        self.function, self.options = function, options
        self.forward: Callable[..., Any] = self.record
        self.attributes: dict[str, Any] = {}  # of the context, besides tensors
        self.backward: dict[Any, Program | None] = {}
        self.plannable, self.problem = False, ""
        # Without the part of ``apply`` that is for vmap and the like.
        parent: Any = super(torch.autograd.Function, _node_class(function))
        self.apply = functools.partial(parent.apply, self)

    def record(self, ctx: Any, *tensors: Any) -> Any:
        """The forward pass as written, recorded."""
        with Recording(tensors) as recording:
            result = self.function.forward(ctx, self.options, *tensors)
        ctx.layouts = _layouts(ctx.to_save or ())
        self.attributes = {
            name: x for name, x in vars(ctx).items() if name not in ("node", "layouts")
        }
        self.plannable = recording.plannable
        try:
            if recording.problem:
                raise _NoPlan(recording.problem)
            if _slots_in(recording.slots_of(list(self.attributes.values()))):
                raise _NoPlan("a context holds a tensor")
            self.forward = Program(recording, result, ctx).call
        except _NoPlan as problem:
            self.problem = str(problem)
        return result

    def written(self, ctx: Any, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
        """The backward pass as written."""
        return self.function.backward(_Context(ctx, self, saved), *grads)


class _Context:
    """Stands for a node's context in the backward pass as written."""

    def __init__(self, ctx: Any, node: _Node, saved: tuple[Any, ...]) -> None:
        vars(self).update(node.attributes)
        self.needs_input_grad, self.saved_tensors = ctx.needs_input_grad, saved


@functools.cache
def _node_class(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Autograd function that repeats records of ``function``, under its name."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    return type(function.__name__, (torch.autograd.Function,), methods)


def _forward(ctx: Any, node: _Node, *tensors: Any) -> Any:
    ctx.node = node
    return node.forward(ctx, *tensors)


def _backward(ctx: Any, *grads: Any) -> Any:
    node, saved = ctx.node, ctx.saved_tensors
    if node.problem or torch.is_grad_enabled() or not _is_plain():
        return node.written(ctx, saved, grads)
    key: list[Any] = [ctx.needs_input_grad, torch._C._autograd._get_current_graph_task_keep_graph()]
    found: list[Tensor] = []
    try:
        if _layouts(saved) != ctx.layouts:
            _describe(saved, key, found)
        _describe(grads, key, found)
    except (_NoPlan, RuntimeError):
        return node.written(ctx, saved, grads)
    key += (_addresses(found), *_surroundings())
    known = tuple(key)
    program = node.backward.get(known)
    if program is not None:
        return program.call(*saved, *grads)
    if known in node.backward:
        return node.written(ctx, saved, grads)
    with Recording((*saved, *grads)) as recording:
        result = node.written(ctx, saved, grads)
    if len(node.backward) >= MOST_BACKWARD_PLANS:
        node.backward.clear()
    node.backward[known] = _program(recording, result)
    return result


# --- Calls ---------------------------------------------------------------------------------------


class _Plan:
    """What is known of calls with one key."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.refused = False
        self.used = next(_clock)


_clock = itertools.count()
_plans: dict[Any, _Plan] = {}
_lock = threading.Lock()
ENABLED = os.environ.get("FASTKD_PLANS") != "0"


def clear_plans() -> None:
    """Drop all plans: the next calls run as written.

    >>> import fastkd
    >>> fastkd.clear_plans()
    """
    with _lock:
        _plans.clear()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _plans.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _new_plan(key: Any) -> None:
    with _lock:
        if len(_plans) >= MOST_PLANS:
            by_use = sorted(_plans, key=lambda known: _plans[known].used)
            for known in by_use[: MOST_PLANS // 4]:
                del _plans[known]
        _plans.setdefault(key, _Plan())


def _program(recording: Recording, result: Any) -> Program | None:
    """The program of a recorded call, or None if it can't be repeated or starts no kernel."""
    if recording.problem or not recording.plannable:
        return None
    try:
        return Program(recording, result)
    except _NoPlan:
        return None


def planned(function: Public) -> Public:
    """Decorate a loss: calls with metadata that were seen twice run from a plan."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not ENABLED:
            return function(*args, **kwargs)
        given = args or [x for x in kwargs.values() if isinstance(x, Tensor)]
        first = given[0] if given else None
        while type(first) is list or type(first) is tuple:
            first = first[0] if first else None
        if not isinstance(first, Tensor) or first.device.type not in DEVICES:
            return function(*args, **kwargs)
        if kwargs.get("gather") or getattr(RECORDING, "of", None) is not None or not _is_plain():
            return function(*args, **kwargs)
        key: list[Any] = [name]
        tensors: list[Tensor] = []
        try:
            _describe(args, key, tensors)
            key.append(tuple(kwargs))
            _describe(kwargs.values(), key, tensors)
            key += (_addresses(tensors), *_surroundings())
        except (_NoPlan, RuntimeError):
            return function(*args, **kwargs)
        known = tuple(key)
        plan = _plans.get(known)
        if plan is None or plan.refused:
            if plan is None:
                _new_plan(known)
            return function(*args, **kwargs)
        plan.used = next(_clock)
        if plan.program is not None:
            return plan.program.call(*tensors)
        if torch.is_inference_mode_enabled():  # which shows no change of a tensor
            return function(*args, **kwargs)
        with Recording(tensors) as recording:
            result = function(*args, **kwargs)
        plan.program = _program(recording, result)
        plan.refused = plan.program is None
        return result

    return cast(Public, call)
