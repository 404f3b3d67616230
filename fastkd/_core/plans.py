"""Plans: a loss call whose metadata were seen before, without its Python code.

On a GPU no value of a tensor is read, so every check and every choice of a call follows from
metadata. A call under `planned` therefore runs as written the first time that it comes with some
metadata. The second time it is recorded: which tensors were allocated, which kernels were started
with which of their addresses, which operations of PyTorch and which autograd functions ran. From
the third time on the record is repeated, with new tensors and addresses.

    public call ── key ──┬── not covered, or new ── as written
                         ├── seen once ── as written, under `Recording`
                         └── recorded ── a program: Python code made from the record

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
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo import guards
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastkd._core.numerics import multiplies_in_float32
from fastkd._core.operator import RECORDING

MOST_PLANS = 1024
MOST_BACKWARD_PLANS = 8  # of one forward pass: kinds of upstream gradients
ENABLED = os.environ.get("FASTKD_PLANS") != "0"

# What only makes room, and what only reads metadata; a value that is read can't be repeated.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
METADATA = {
    "__get__", "__len__", "_is_functional_tensor", "can_cast", "data_ptr", "dim", "element_size",
    "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_signed",
    "nelement", "ndimension", "numel", "promote_types", "result_type", "size", "storage_offset",
    "stride", "untyped_storage",
}  # fmt: skip
# Of operators whose result, or its shape, depends on values.
BY_VALUE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_BY_TYPE = {int, bool, float, str, type(None), torch.dtype, torch.device}

# Read at each call: names of this module are found faster than attributes of attributes.
_functions, _dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_functorch, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_deterministic, _default_dtype = torch._C._get_deterministic_algorithms, torch.get_default_dtype
_grad_enabled, _autocast = torch.is_grad_enabled, torch._C._is_any_autocast_enabled

Public = TypeVar("Public", bound=Callable[..., Any])
Program = Callable[..., Any]


class _NoPlan(Exception):
    """A record can't repeat what happens in a call."""


def on_gpu(x: Tensor) -> bool:
    """Whether calls with ``x`` are planned."""
    return x.is_cuda


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
    found, bits = [], 0
    for x in tensors:
        address = x.data_ptr()
        found.append(address)
        bits |= address
    known: Any = tuple([x % 16 for x in found]) if bits % 16 else 0
    if len(found) < 2 or len(set(found)) == len(found):
        return known
    same = [*map(id, tensors)]
    return known, tuple(map(found.index, found)), tuple(map(same.index, same))


@functools.cache
def _triton() -> Any:
    """Triton's drivers and its launch hooks, or None without Triton."""
    try:
        from triton import knobs
        from triton.runtime import driver
    except ImportError:
        return None
    return driver, knobs.runtime


def _surroundings() -> tuple[Any, ...] | None:
    """What a call depends on beside its arguments.

    None without Triton, or if something looks at or changes the operations of this thread.
    """
    triton = _triton()
    if triton is None or (
        _functions()
        or _dispatches()
        or _functorch() is not None
        or _tracing() is not None
        or getattr(triton[1].launch_enter_hook, "calls", True)
        or getattr(triton[1].launch_exit_hook, "calls", True)
    ):
        return None
    return (
        _grad_enabled(),
        multiplies_in_float32(),
        _deterministic(),
        _default_dtype(),
        _autocast() and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        triton[0].active.get_current_device(),
    )


def _key(of: Iterable[Any], values: Iterable[Any]) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """Key of a call of ``of``, or None if the call isn't covered, and the tensors in ``values``."""
    tensors: list[Tensor] = []
    surroundings = _surroundings()
    if surroundings is None:
        return None, tensors
    key = [*surroundings, *of]
    try:
        _describe(values, key, tensors)
        key.append(_addresses(tensors))
    except (_NoPlan, RuntimeError):
        return None, tensors
    return tuple(key), tensors


def _layouts(tensors: Iterable[Tensor | None]) -> list[Any]:
    """What tells whether saved tensors are those of the forward pass, or a hook changed them."""
    found: list[Any] = []
    for x in tensors:
        if x is not None:
            found += (x.data_ptr(), x.stride(), x.dtype)
    return found


# --- Recording -----------------------------------------------------------------------------------


class _Step(NamedTuple):
    """Lines of a program."""

    lines: list[str]
    used: list[int]  # tensors, by their number
    made: list[int]
    droppable: bool  # if nothing uses what it makes


class _Text(str):
    """An argument that a program computes."""


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _tensors(item)


class _Operators(TorchDispatchMode):
    """Context that notes operators which a record can't repeat, also inside of an operation."""

    def __init__(self, recording: "Recording") -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if BY_VALUE.intersection(func.tags) and not (
            # x[i] is tagged for its boolean masks.
            func is torch.ops.aten.index.Tensor
            and all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1])
        ):
            self.recording.problem = f"{func} depends on values"
        return func(*args, **(kwargs or {}))


class Recording(TorchFunctionMode):
    """Context in which operations, launches and autograd functions become a program's steps.

    The program has a name t<i> for each tensor, p<i> for its address, and c<i> for constants.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {}  # by id, of tensors that are alive
        self.held: list[weakref.ref[Tensor] | None] = []  # by number
        self.base: dict[int, tuple[int, int]] = {}  # of a view: whose memory, and where in it
        self.read: set[int] = set()  # whose address a line has
        self.steps: list[_Step] = []
        self.constants: dict[str, Any] = {"torch": torch}
        self.plannable = False  # starts kernels
        self.problem: str | None = None
        self.surroundings = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        self.driver = _triton()[0]
        self.device = self.driver.active.get_current_device()
        for x in inputs:
            self.add(x)
        self.inputs = len(self.held)

    def __enter__(self) -> "Recording":
        self.outer, RECORDING.of = getattr(RECORDING, "of", None), self
        self.operators = _Operators(self)
        self.operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        RECORDING.of = self.outer
        super().__exit__(*error)
        self.operators.__exit__(*error)

    def add(self, x: Tensor | None) -> int:
        """Number of a new tensor; an input may be there twice, or be None."""
        number, numbers, key = len(self.held), self.numbers, id(x)
        if x is None or key in numbers:
            self.held.append(None)
        else:
            numbers[key] = number
            self.held.append(weakref.ref(x, lambda _: numbers.pop(key, None)))
        return number

    def number(self, x: Tensor) -> int:
        if id(x) not in self.numbers:
            raise _NoPlan("a tensor comes from elsewhere")
        return self.numbers[id(x)]

    def text(self, x: Any) -> str:
        """An expression for ``x``."""
        if isinstance(x, Tensor):
            return f"t{self.number(x)}"
        if type(x) is _Text:
            return x
        if isinstance(x, (tuple, list)):
            items = "".join(f"{self.text(item)}, " for item in x)
            return f"({items})" if isinstance(x, tuple) else f"[{items}]"
        if type(x) is dict:
            return f"{{{', '.join(f'{name!r}: {self.text(item)}' for name, item in x.items())}}}"
        return repr(x) if x is None or type(x) in (int, bool, str) else self.constant(x)

    def constant(self, x: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # an outer recording has the autograd function
            given = list(_tensors((args, kwargs)))
            written = [x for x in given if not x.is_inference()]
            versions = [x._version for x in written]
            result = func(*args, **kwargs)
            changed = versions != [x._version for x in written]
            try:
                self.operation(func, args, kwargs, given, result, changed)
            except _NoPlan as problem:
                self.problem = self.problem or str(problem)
        return result

    def operation(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any, changed: bool
    ) -> None:
        """Add an operation's step."""
        name, found = getattr(func, "__name__", ""), list(_tensors(result))
        new = [x for x in found if id(x) not in self.numbers]
        if not changed and not found and name not in METADATA:
            raise _NoPlan(f"{name} reads a value")
        if not changed and not new:  # x.contiguous() is x
            for x in given:
                self.number(x)
        elif name in ALLOCATIONS and new and new[0] is result:
            # As compiled graphs allocate: on the current device, in half the time.
            empty = self.constant(getattr(guards, f"_empty_strided_{result.device.type}"))
            number, dtype = self.add(result), self.constant(result.dtype)
            line = f"t{number} = {empty}({tuple(result.shape)}, {result.stride()}, {dtype})"
            self.steps.append(_Step([line], [], [number], True))
        else:
            call = self.in_these_surroundings(func)
            self.call(call, args, kwargs, given, result)
            views = [x for x in new if not changed and self.view(x, given)]
            self.steps[-1] = self.steps[-1]._replace(
                droppable=len(views) == len(new) and not changed
            )

    def call(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
        """Add the step of a call."""
        texts = [self.text(x) for x in args]
        texts += [f"{name}={self.text(x)}" for name, x in kwargs.items()]
        line = f"{self.constant(func)}({', '.join(texts)})"
        made = [self.add(x) for x in _tensors(result) if id(x) not in self.numbers]
        if isinstance(result, Tensor):
            line = f"{self.text(result)} = {line}"
        elif isinstance(result, (tuple, list)):
            names = [self.text(x) if isinstance(x, Tensor) else "_" for x in result]
            line = f"{', '.join(names)}, = {line}"
        self.steps.append(_Step([line], list(map(self.number, given)), made, False))

    def view(self, x: Tensor, given: list[Tensor]) -> bool:
        """Whether ``x`` shares the memory of one of ``given``; notes where."""
        storage = x.untyped_storage().data_ptr()
        for of in given:
            if storage and storage == of.untyped_storage().data_ptr():
                number, offset = self.place(of)
                self.base[self.number(x)] = number, offset + x.data_ptr() - of.data_ptr()
                return True
        return False

    def place(self, x: Tensor) -> tuple[int, int]:
        """Number of the tensor whose address ``x`` has, plus a number of bytes."""
        return self.base.get(self.number(x), (self.number(x), 0))

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
        self.plannable = True
        names = {name: x for name, x in options.items() if name in kernel.signature.parameters}
        bound = kernel.signature.bind(*args, **names)
        bound.apply_defaults()
        try:
            if compiled is None or self.driver.active.get_current_device() != self.device:
                raise _NoPlan("a launch on another device, or of a kernel that isn't compiled")
            lines: list[str] = []
            used: list[int] = []
            given = [self.argument(x, lines, used) for x in bound.arguments.values()]
        except _NoPlan as problem:
            self.problem = str(problem)
            return
        if not self.read:
            lines.insert(0, f"driver = {self.constant(self.driver)}.active")
            lines.insert(1, f"stream = driver.get_current_stream({self.device})")
        self.read.update(used)
        self.constant(compiled)  # some versions of Triton unload a kernel that is collected
        run, around = _launcher(compiled, (*grid, 1, 1)[:3], given)
        texts = [self.constant(x) if type(x) is list else self.text(x) for x in around]
        lines.append(f"{self.constant(run)}({', '.join(texts)})")
        self.steps.append(_Step(lines, used, [], False))

    def argument(self, x: Any, lines: list[str], used: list[int]) -> Any:
        """Text of a launch's argument; adds lines that read addresses, and whose these are."""
        if isinstance(x, (tuple, list)):
            return _Text(f"({''.join(f'{self.argument(y, lines, used)}, ' for y in x)})")
        if not isinstance(x, Tensor):
            return _Text(self.text(x))
        number, offset = self.place(x)
        if number not in used and number not in self.read:
            lines.append(f"p{number} = t{number}.data_ptr()")
        used.append(number)
        return _Text(f"p{number} + {offset}" if offset else f"p{number}")

    def apply(self, function: type[torch.autograd.Function], options: Any, tensors: Any) -> Any:
        """``function.apply``, as a step; see `fastkd._core.numerics.apply`."""
        if isinstance(options, Tensor):
            self.problem = "an autograd function without options"
        if self.problem:
            return function.apply(options, *tensors)
        node = _Node(function, options)
        result = node.apply(*tensors)
        self.problem, self.plannable = node.problem, self.plannable or node.plannable
        try:
            self.call(node.apply, tensors, {}, list(_tensors(tensors)), result)
        except _NoPlan as problem:
            self.problem = str(problem)
        return result

    def program(self, results: Any, context: Any = None) -> Program | None:
        """Python code that repeats the call, if it can: it takes a node's context, and tensors."""
        if self.problem or (not self.plannable and context is None):
            return None
        saved = getattr(context, "to_save", None) or ()
        constant = getattr(context, "non_differentiable", None) or ()
        lines = []
        try:
            if context is not None:
                layouts: list[Any] = []
                for number, x in ((self.number(x), x) for x in saved if x is not None):
                    address = f"p{number}" if number in self.read else f"t{number}.data_ptr()"
                    layouts += _Text(address), x.stride(), x.dtype
                lines = [f"ctx.save_for_backward({', '.join(map(self.text, saved))})"]
                lines += [f"ctx.layouts = {self.text(layouts)}"]
            if constant:
                lines.append(f"ctx.mark_non_differentiable(*{self.text(constant)})")
            lines.append(f"return {self.text(results)}")
            kept = {self.number(x) for x in _tensors((results, saved))}
        except _NoPlan as problem:
            self.problem = str(problem)
            return None
        for step in reversed(self.steps):
            if step.droppable and kept.isdisjoint(step.made):
                continue
            # What no later step uses is freed, as in the call as written.
            freed = sorted(i for i in {*step.used, *step.made} - kept if i >= self.inputs)
            lines[:0] = [*step.lines, *(f"t{i} = None" for i in freed)]
            kept.update(step.used)
        names = ["ctx"] * (context is not None) + [f"t{i}" for i in range(self.inputs)]
        exec("\n    ".join([f"def call({', '.join(names)}):", *lines]), self.constants)
        return cast(Program, self.constants["call"])


def _launcher(compiled: Any, grid: tuple[int, ...], arguments: list[_Text]) -> Any:
    """Triton's launcher, and what it is called with.

    Its class passes everything on to a function in C. What that gets is found by a call with
    another function in its place: it differs between versions of Triton.
    """
    run, got = compiled.run, []
    around = [*grid, _Text("stream"), compiled.function, compiled.packed_metadata]
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
        self.forward: Program = self.record
        self.attributes: dict[str, Any] = {}  # of the context, besides tensors
        self.backward: dict[Any, Any] = {}  # programs; False: as written
        self.plannable = False
        self.problem: str | None = None
        # Without the part of ``apply`` that is for vmap and the like.
        parent: Any = super(torch.autograd.Function, _node_class(function))
        self.apply = functools.partial(parent.apply, self)

    def record(self, ctx: Any, *tensors: Any) -> Any:
        """The forward pass as written, recorded."""
        with Recording(tensors) as recording:
            result = self.function.forward(ctx, self.options, *tensors)
            attributes = {name: x for name, x in vars(ctx).items() if name != "node"}
            ctx.layouts = _layouts(ctx.to_save or ())
            if any(_tensors(attributes)):
                recording.problem = "a context holds a tensor"
            program = recording.program(result, ctx)
        self.attributes, self.problem = attributes, recording.problem
        self.plannable, self.forward = recording.plannable, program or self.record
        return result

    def written(self, ctx: Any, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
        """The backward pass as written."""
        context = SimpleNamespace(**self.attributes)
        context.needs_input_grad, context.saved_tensors = ctx.needs_input_grad, saved
        return self.function.backward(context, *grads)


@functools.cache
def _node_class(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Autograd function that repeats records of ``function``, under its name."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    node: Any = type(function.__name__, (torch.autograd.Function,), methods)
    node._backward_cls.apply = _backward  # without PyTorch's checks of ``backward`` and ``vjp``
    return cast(type[torch.autograd.Function], node)


def _forward(ctx: Any, node: _Node, *tensors: Any) -> Any:
    ctx.node = node
    return node.forward(ctx, *tensors)


def _backward(ctx: Any, *grads: Any) -> Any:
    node = ctx.node
    if torch.compiler.is_compiling():  # compiled autograd
        for name, x in node.attributes.items():
            setattr(ctx, name, x)
        return node.function.backward(ctx, *grads)
    saved = ctx.saved_tensors
    key = None
    if not node.problem and not torch.is_grad_enabled():
        of = ctx.needs_input_grad, torch._C._autograd._get_current_graph_task_keep_graph()
        same = _layouts(saved) == ctx.layouts
        key, _ = _key(of, grads if same else (*saved, *grads))
    program: Any = False if key is None else node.backward.get(key)
    if program:
        return program(*saved, *grads)
    if program is not None:
        return node.written(ctx, saved, grads)
    with Recording((*saved, *grads)) as recording:
        result = node.written(ctx, saved, grads)
    if len(node.backward) >= MOST_BACKWARD_PLANS:
        node.backward.clear()
    node.backward[key] = recording.program(result) or False
    return result


# --- Calls ---------------------------------------------------------------------------------------


class _Plan:
    """What is known of calls with one key."""

    seen = refused = False
    program: Program | None = None


@functools.lru_cache(MOST_PLANS)
def _plan(key: tuple[Any, ...]) -> _Plan:
    return _Plan()


def clear_plans() -> None:
    """Drop all plans: the next calls run as written.

    >>> import fastkd
    >>> fastkd.clear_plans()
    """
    _plan.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear_plans)


def planned(function: Public) -> Public:
    """Decorate a loss, or a part of one: with metadata that were seen twice it runs from a plan."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not ENABLED:
            return function(*args, **kwargs)
        first = args[0] if args else None
        if type(first) is not Tensor:
            first = next(_tensors(args or kwargs), None)
        if first is None or not on_gpu(first) or kwargs.get("gather"):
            return function(*args, **kwargs)
        key, tensors = _key((function, *kwargs), (*args, *kwargs.values()))
        if key is None:
            return function(*args, **kwargs)
        plan = _plan(key)
        if plan.program is not None:
            return plan.program(*tensors)
        # Inference mode shows no change of a tensor.
        if plan.refused or not plan.seen or torch.is_inference_mode_enabled():
            plan.seen = True
            return function(*args, **kwargs)
        with Recording(tensors) as recording:
            result = function(*args, **kwargs)
        plan.program = recording.program(result)
        plan.refused = plan.program is None
        return result

    return cast(Public, call)
