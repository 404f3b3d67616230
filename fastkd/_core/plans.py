"""Plans: a loss call whose metadata were seen often, without its Python code.

On a GPU no value of a tensor is read, so every check and every choice of a call follows from
metadata. Calls under `planned` are counted by their metadata, the key, and the eighth of late is
recorded as a program (`fastkd._core.recording`). The next call runs as written and as a program
too, and a flag on the device tells later whether both gave the same bits: from then on the program
runs. An autograd function becomes a node of the same name, with a program for its forward pass and
for each kind of upstream gradient, which prove themselves alike.

The first program that differs, or raises, switches plans off in this process, with one warning.
docs/plans.md explains all of it. ``FASTKD_PLANS=0`` in the environment switches plans off.
"""

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fastkd._core import extension
from fastkd._core.numerics import multiplies_in_float32
from fastkd._core.recording import (
    NoPlan,
    Number,
    Program,
    Recording,
    Text,
    layouts,
    mapped,
    private,
    tensors_in,
)

# A record costs as much as several calls as written: the eighth call is recorded.
NEAR = 6  # sights of a function and its first shape after which keys are computed
SIGHTS = 3  # sights of a key after which a call is recorded
VARIED = 16  # sights of a key with any numbers, after which these are parameters
WINDOW = 4096  # sights after which all counts are halved, and plans without a call are dropped
MOST_BACKWARD_PLANS = 8  # of one forward pass: kinds of upstream gradients
ENABLED = os.environ.get("FASTKD_PLANS") != "0"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Read at each call: names of this module are found faster than attributes of attributes.
_capturing = torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False
_grad_enabled, _default_dtype = torch.is_grad_enabled, torch.get_default_dtype

Public = TypeVar("Public", bound=Callable[..., Any])


_problem: str | None = None  # that switched plans off


def why_off() -> str | None:
    """Why plans are off in this process, or None if they are on."""
    if _problem is None and not ENABLED:
        return "FASTKD_PLANS=0"
    found = private()
    return _problem or (found if isinstance(found, str) else None)


def failed() -> bool:
    """Whether a plan was at fault in this process."""
    return _problem is not None


def _switch_off(name: str, problem: str) -> None:
    global ENABLED, _problem
    if ENABLED:
        ENABLED, _problem = False, f"the plan of {name} {problem}"
        warnings.warn(
            f"{_problem}, with torch {torch.__version__} and triton {metadata.version('triton')}; "
            "plans are off now, and losses run as written, right but with more host time; please "
            "report it. FASTKD_PLANS=0 in the environment switches plans off from the start",
            stacklevel=3,
        )


def on_gpu(x: Tensor) -> bool:
    """Whether calls with ``x`` are planned."""
    return x.is_cuda and extension.why_not_gpu(x.device) is None


def _describe(
    values: Iterable[Any], key: list[Any], tensors: list[Tensor], numbers: list[float]
) -> None:
    """Extend the key by some arguments, and ``tensors`` and ``numbers`` by those that they hold."""
    for x in values:
        kind = type(x)
        if x is None:
            key.append(None)
        elif kind is Tensor or kind is nn.Parameter:
            tensors.append(x)
            if x.device != tensors[0].device:  # values may be read on the CPU
                raise NoPlan("tensors of two devices")
            key += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference())
        elif kind is float:
            key.append(kind if x else str(x))  # 0.0 and -0.0 differ
            numbers.append(x)
        elif kind is int or kind is bool:
            key += (kind, x)
        elif kind is str or kind is torch.dtype or kind is torch.device:
            key.append(x)
        elif kind is list or kind is tuple:
            key += (kind, len(x))
            _describe(x, key, tensors, numbers)
        elif hasattr(kind, "__dataclass_fields__"):
            key.append(kind)
            _describe(vars(x).values(), key, tensors, numbers)
        elif kind is dict:  # a match's tensors by their device
            key += (kind, *x)
            _describe(x.values(), key, tensors, numbers)
        else:
            raise NoPlan(f"an argument is a {kind.__name__}")


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


def _surroundings() -> tuple[Any, ...] | None:
    """What a call depends on beside its arguments.

    None if something looks at or changes the operations of this thread. A default device, which
    operations that name one don't read, is an exception.
    """
    on: Any = private()
    if (
        isinstance(on, str)
        or (on.functions() and any(type(x) is not on.device_mode for x in on.modes()))
        or on.dispatches()
        or on.functorch() is not None
        or on.tracing() is not None
        or on.runtime.launch_enter_hook.calls
        or on.runtime.launch_exit_hook.calls
    ):
        return None
    return (
        _grad_enabled(),
        multiplies_in_float32(),
        on.deterministic(),
        _default_dtype(),
        on.autocast() and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        on.driver.active.get_current_device(),
    )


def _key(
    of: Iterable[Any], values: Iterable[Any]
) -> tuple[tuple[Any, ...] | None, list[Tensor], tuple[float, ...]]:
    """Key of a call of ``of``, or None if the call isn't covered; tensors and floats in ``values``.

    The floats aren't in the key.
    """
    tensors: list[Tensor] = []
    numbers: list[float] = []
    surroundings = _surroundings()
    if surroundings is None:
        return None, tensors, ()
    key = [*surroundings, *of]
    try:
        _describe(values, key, tensors, numbers)
        key.append(_addresses(tensors))
    except (NoPlan, RuntimeError):
        return None, tensors, ()
    return tuple(key), tensors, tuple(numbers)


class Plan:
    """A program, and whether it is proved; None for a call that a program can't repeat.

    ``numbers`` are parameters: those of the record. Only another one proves that it is used right.
    """

    def __init__(self, recording: Any, program: Program | None) -> None:
        self.name, self.program = recording.name, cast(Any, program)
        self.numbers, self.guards = recording.parameters, recording.guards
        self.proved, self.called = False, True
        self.differs: Callable[[], bool | None] | None = None  # what the device found
        self.guard()
        if not self.holds(self.numbers):
            self.program = None

    def guard(self, *conditions: str) -> None:
        """Add conditions on the numbers ``n`` under which the program may be used."""
        self.guards += conditions
        conditions = (*dict.fromkeys(self.guards),)
        self.holds: Callable[[Any], bool] = eval(f"lambda n: {' and '.join(conditions) or True}")

    def to_prove(self, numbers: tuple[float, ...]) -> bool:
        """Whether the next call proves the program. A capture would hold both calls."""
        ready = self.program is not None and self.differs is None and not _capturing()
        return ready and (not self.numbers or numbers != self.numbers)

    def ready(self) -> bool:
        """Whether the program is proved. It doesn't wait for the device."""
        if not self.proved and self.differs is not None and ENABLED and not _capturing():
            differs = self.differs()
            self.proved = differs is False
            if differs:
                _switch_off(self.name, "gave other bits than the call as written")
        return self.proved and ENABLED

    def prove(
        self, numbers: tuple[float, ...], written: Callable[[], Any], repeated: Callable[[], Any]
    ) -> Any:
        """The call as written; in the first such call also the program, compared with it."""
        if not self.to_prove(numbers) or not ENABLED:
            return written()
        same = enumerate(zip(self.numbers, numbers, strict=False))
        self.guard(*(f"n[{i}] == {x!r}" for i, (x, y) in same if x == y))
        result = written()
        try:
            self.differs = _difference(result, again(repeated))
        except torch.OutOfMemoryError:  # a proof needs twice the memory
            self.program = None
        except Exception as error:
            _switch_off(self.name, f"raised {type(error).__name__}: {error}")
        return result


def again(repeated: Callable[[], Any]) -> Any:
    """What a program returns. Of saved-tensor hooks the innermost are called, not a user's."""
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        return repeated()


def copies_of(saved: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Saved tensors for the program: the pass as written may change those that it allocated."""
    copies = [(x, None if x is None else x.clone()) for x in saved]
    # A copy of another layout is of an input, which no pass changes.
    return [x if x is None or y is None or x.stride() != y.stride() else y for x, y in copies]


@torch.no_grad()
def _difference(found: Any, right: Any) -> Callable[[], bool | None]:
    """Function that says whether some bits differ, or None while the device computes it."""
    found, right = list(tensors_in(found)), list(tensors_in(right))
    if len(found) != len(right):
        return lambda: True
    pairs = [*zip(found, right, strict=True)]
    facts = [[(x.shape, x.stride(), x.dtype, x.requires_grad) for x in pair] for pair in pairs]
    if any(one != other for one, other in facts):
        return lambda: True
    flags = [
        (x.view(_INTEGERS[x.itemsize]) != y.view(_INTEGERS[x.itemsize])).any()
        for x, y in ((x.detach(), y.detach()) for x, y in pairs)
    ]
    differs = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool)
    if not differs.is_cuda:
        return lambda: bool(differs)
    on_host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    on_host.copy_(differs, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return lambda: bool(on_host) if done.query() else None


class Record(Recording):
    """`Recording` with autograd functions as nodes."""

    def apply(self, function: type[torch.autograd.Function], options: Any, tensors: Any) -> Any:
        """``function.apply``, as a step; see `fastkd._core.numerics.apply`."""
        if isinstance(options, Tensor):
            self.problem = "an autograd function without options"
        if self.problem:
            return function.apply(options, *tensors)
        node = _Node(self.name, function, options)
        result = node.apply((node, self.parameters), *tensors)
        self.problem, self.plannable = node.problem, self.plannable or node.plannable
        try:
            given = f"({self.constant(node)}, {'n' if self.parameters else ()})"
            self.call(node.apply, (Text(given), *tensors), {}, list(tensors_in(tensors)), result)
        except Exception as error:
            self.fail(error)
        return result


def _plan_of(recording: Any, *results: Any) -> Plan:
    """A plan of what was recorded; see `Recording.program`."""
    program = None
    try:
        program = recording.program(*results)
    except Exception as error:
        recording.fail(error)
    if recording.error is not None:
        kind = type(recording.error).__name__
        _switch_off(recording.name, f"can't be recorded: {kind}: {recording.error}")
    return Plan(recording, program)


class _Node:
    """An autograd function of a record: its forward pass, and backward passes, as programs."""

    def __init__(self, name: str, function: type[torch.autograd.Function], options: Any) -> None:
        self.name, self.function, self.options = name, function, options
        self.forward: Plan | None = None
        self.backward: dict[Any, Plan] = {}
        self.attributes: dict[str, Any] = {}  # of the context, besides tensors
        self.plannable = False
        self.problem: str | None = None
        # Without the part of ``apply`` that is for vmap and the like.
        parent: Any = super(torch.autograd.Function, _node_class(function))
        self.apply = parent.apply

    def written(self, ctx: Any, tensors: Any, options: Any) -> tuple[Any, Any]:
        """The forward pass as written: its result, and what it saves."""
        result = self.function.forward(ctx, options, *tensors)
        ctx.layouts = layouts(ctx.to_save or ())
        return result, ctx.to_save

    def record(self, ctx: Any, tensors: Any) -> Any:
        """The forward pass as written, recorded."""
        with Record(self.name, tensors, ctx.numbers) as recording:
            result, _ = self.written(ctx, tensors, self.options)
            own = "node", "layouts", "numbers"
            kept = {name: x for name, x in vars(ctx).items() if name not in own}
            if any(tensors_in(kept)):
                recording.problem = "a context holds a tensor"
            self.forward = _plan_of(recording, result, ctx)
        self.attributes, self.problem = kept, recording.problem
        self.plannable = recording.plannable
        return result

    def repeated(self, numbers: Any, tensors: Any) -> tuple[Any, Any]:
        """The forward pass by its program."""
        assert self.forward is not None
        saved: list[Any] = []
        context = SimpleNamespace(
            save_for_backward=lambda *given: saved.extend(given),
            mark_non_differentiable=lambda *given: None,
        )
        return self.forward.program(context, numbers, *tensors), tuple(saved)

    def written_backward(
        self, ctx: Any, saved: Any, grads: Any, guards: list[str] | None = None
    ) -> Any:
        """The backward pass as written; with ``guards`` its numbers are parameters."""
        context = SimpleNamespace(**at(ctx.numbers, self.attributes, guards))
        context.needs_input_grad, context.saved_tensors = ctx.needs_input_grad, saved
        return self.function.backward(context, *grads)


@functools.cache
def _node_class(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Autograd function that repeats records of ``function``, under its name."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    node: Any = type(function.__name__, (torch.autograd.Function,), methods)
    return cast(type[torch.autograd.Function], node)


def at(numbers: tuple[float, ...], x: Any, guards: list[str] | None = None) -> Any:
    """``x`` with each `Number` computed from ``numbers``; one again if there are ``guards``."""

    def computed(old: float) -> float:
        if type(old) is not Number:
            return old
        value = eval(old.text, {"n": numbers})
        return value if guards is None else Number.of(value, old.text, guards)

    return mapped(x, computed)


def _forward(ctx: Any, given: tuple[_Node, tuple[float, ...]], *tensors: Any) -> Any:
    ctx.node, ctx.numbers = node, numbers = given
    plan = node.forward
    if plan is None:
        return node.record(ctx, tensors)
    if plan.proved or plan.ready():
        return plan.program(ctx, numbers, *tensors)
    options = at(numbers, node.options)
    return plan.prove(
        numbers,
        lambda: node.written(ctx, tensors, options),
        lambda: node.repeated(numbers, tensors),
    )[0]


def _backward(ctx: Any, *grads: Any) -> Any:
    node: _Node = ctx.node
    if torch.compiler.is_compiling():  # compiled autograd
        for name, x in at(ctx.numbers, node.attributes).items():
            setattr(ctx, name, x)
        return node.function.backward(ctx, *grads)
    saved, key = ctx.saved_tensors, None
    if ENABLED and not node.problem and not torch.is_grad_enabled():
        with torch._C.DisableTorchFunction():
            about = ctx.needs_input_grad, torch._C._autograd._get_current_graph_task_keep_graph()
            same = layouts(saved) == ctx.layouts
            key, *_ = _key(about, grads if same else (*saved, *grads))
    plan, numbers = node.backward.get(key), ctx.numbers
    if plan is not None and plan.ready() and plan.holds(numbers):
        return plan.program(numbers, *saved, *grads)
    if plan is not None or key is None or _capturing():
        copies = copies_of(saved) if plan is not None and plan.to_prove(numbers) else None
        if plan is None or copies is None:
            return node.written_backward(ctx, saved, grads)
        return plan.prove(
            numbers,
            lambda: node.written_backward(ctx, saved, grads),
            lambda: plan.program(numbers, *copies, *grads),
        )
    with Record(node.name, (*saved, *grads), numbers) as recording:
        result = node.written_backward(ctx, saved, grads, recording.guards)
    if len(node.backward) >= MOST_BACKWARD_PLANS:
        node.backward.clear()
    node.backward[key] = _plan_of(recording, result)
    return result


_plans: dict[tuple[Any, ...], Plan] = {}
_sights = bytearray(1 << 16)  # by hash: rows of ever new lengths displace nothing
_HALF = bytes(i >> 1 for i in range(256))
_seen = 0


def _sight(place: int) -> int:
    """Sights at a place of `_sights`, with this one. Of late: all counts are halved at times."""
    global _seen
    _sights[place] = min(_sights[place] + 1, 255)
    _seen += 1
    if _seen % WINDOW == 0:
        _sights[:] = _sights.translate(_HALF)
        for other, plan in list(_plans.items()):
            if not plan.called:
                _plans.pop(other, None)
            plan.called = False
    return _sights[place]


def clear_plans() -> None:
    """Drop all plans: the next calls run as written.

    >>> import fastkd
    >>> fastkd.clear_plans()
    """
    _plans.clear()
    _sights[:] = bytes(len(_sights))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear_plans)


_thread = threading.local()  # ``inside``: whether a planned function runs as written


def planned(function: Public) -> Public:
    """Decorate a loss, or a part of one: with metadata that were seen often it runs from a plan."""

    def written(*args: Any, **kwargs: Any) -> Any:
        """The call, in which other planned functions are neither counted nor recorded."""
        _thread.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.inside = False

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not ENABLED or getattr(_thread, "inside", False):
            return function(*args, **kwargs)
        # A default device is a mode of torch functions, under which each attribute costs much.
        with torch._C.DisableTorchFunction():
            first = args[0] if args else None
            if type(first) is not Tensor:
                first = next(tensors_in(args or kwargs), None)
            near, key, plan, varied = 0, None, None, None
            numbers: tuple[float, ...] = ()
            if first is not None and on_gpu(first) and not kwargs.get("gather"):
                near = hash((function, first.shape)) % len(_sights)
                if _sights[near] >= NEAR or _sight(near) >= NEAR:
                    key, tensors, numbers = _key((function, *kwargs), (*args, *kwargs.values()))
                    plan = _plans.get((key, numbers))
                    if plan is None and numbers:
                        varied = _plans.get((key, None))
                        plan = varied if varied is not None and varied.holds(numbers) else None
            if plan is not None:
                plan.called, _sights[near] = True, 255
                if plan.proved or plan.ready():
                    return plan.program(numbers, *tensors)
        if key is None:
            return function(*args, **kwargs)
        if plan is not None:
            return plan.prove(
                numbers,
                lambda: written(*args, **kwargs),
                lambda: plan.program(numbers, *tensors),
            )
        of_key = hash(key) % len(_sights)
        seldom = _sight(hash((key, numbers)) % len(_sights)) < SIGHTS
        known = varied is not None and varied.program is None
        vary = seldom and bool(numbers) and not known and _sight(of_key) >= VARIED
        # Inference mode shows no change of a tensor.
        if (seldom and not vary) or torch.is_inference_mode_enabled() or _capturing():
            return written(*args, **kwargs)
        with Record(function.__name__, tensors, numbers if vary else ()) as recording:
            given, options = recording.with_parameters((args, kwargs))
            result = written(*given, **options)
        _plans[key, None if vary else numbers] = _plan_of(recording, result)
        _sights[of_key] = 0 if vary else _sights[of_key]
        return result

    return cast(Public, call)
