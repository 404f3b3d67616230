"""Plans: a loss call whose metadata were seen often, without its Python code.

On a GPU no value of a tensor is read, so every check and every choice of a call follows from
metadata. Calls under `planned` are counted by their metadata, the key, and the eighth of late is
recorded as a program (`fastkd._core.recording`). The next call runs as written and as a program
too, and a flag on the device tells later whether both gave the same bits: from then on the program
runs. An autograd function becomes a node of the same name: its forward pass is a part of the call's
program, and its backward pass has one for each kind of upstream gradient, which proves itself.

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
from fastkd._core.recording import NoPlan, Number, Recording, Text, mapped, private, tensors_in

# A record costs as much as several calls as written: the eighth call is recorded.
NEAR = 6  # sights of a function and its first shape after which keys are computed
SIGHTS = 3  # sights of a key after which a call is recorded
VARIED = 16  # sights of a key with any numbers, after which these are parameters
WINDOW = 4096  # sights after which all counts are halved, and plans without a call are dropped
ENABLED = os.environ.get("FASTKD_PLANS") != "0"

_PLAIN = {type(None), bool, int, str, torch.dtype, torch.device}  # they are in a key themselves
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Read at each call: names of this module are found faster than attributes of attributes.
_capturing = torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False
_grad_enabled, _default_dtype = torch.is_grad_enabled, torch.get_default_dtype

Public = TypeVar("Public", bound=Callable[..., Any])


_thread = threading.local()  # ``inside`` a planned function as written; ``saved`` in a proof
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
        if kind in _PLAIN:
            key += (kind, x)
        elif kind is Tensor or kind is nn.Parameter:
            tensors.append(x)
            if x.device != tensors[0].device:  # values may be read on the CPU
                raise NoPlan("tensors of two devices")
            key += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference())
        elif kind is float and x:
            key.append(kind)
            numbers.append(x)
        elif kind is float:
            key.append(str(x))  # 0.0 and -0.0 differ
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
    """Key of a call, or None if it isn't covered; tensors and floats of its ``values``."""
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
    """A program of what was recorded, and whether it is proved.

    ``program`` is None for a call that none can repeat. ``numbers`` are parameters: those of the
    record. Only other ones prove that the program uses them.
    """

    def __init__(self, recording: Any, results: Any) -> None:
        self.name, self.numbers = recording.name, recording.parameters
        self.guards: dict[str, None] = {}
        self.proved, self.called, self.program = False, True, cast(Any, None)
        self.differs: Callable[[], bool | None] | None = None  # what the device found
        try:
            self.guard(*recording.guards)
            if self.holds(self.numbers):
                self.program = recording.program(results)
        except Exception as error:
            recording.fail(error)
        problem = recording.problem
        if problem is not None and not isinstance(problem, NoPlan):
            _switch_off(self.name, f"can't be recorded: {type(problem).__name__}: {problem}")

    def guard(self, *conditions: str) -> None:
        """Add conditions on the numbers ``n`` under which the program may be used."""
        self.guards |= dict.fromkeys(conditions)
        self.holds: Callable[[Any], bool] = eval(f"lambda n: {' and '.join(self.guards) or True}")

    def fits(self, numbers: tuple[float, ...]) -> bool:
        """Whether the program, if it is proved, is that of a call with these numbers."""
        return self.program is not None and self.holds(numbers)

    def ready(self) -> bool:
        """Whether the program is proved. It doesn't wait for the device."""
        if not self.proved and self.differs is not None and ENABLED and not _capturing():
            differs = self.differs()
            self.proved = differs is False
            if differs:
                _switch_off(self.name, "gave other bits than the call as written")
        return self.proved and ENABLED

    def to_prove(self, numbers: tuple[float, ...]) -> bool:
        """Whether the next call proves the program. A capture would hold both calls."""
        possible = ENABLED and self.program is not None and self.differs is None
        return possible and not _capturing() and (not self.numbers or numbers != self.numbers)

    def prove(self, numbers: tuple[float, ...], tensors: Sequence[Any], right: Any) -> None:
        """Let the device compare what the program computes and saves with what is right."""
        same = enumerate(zip(self.numbers, numbers, strict=False))
        self.guard(*(f"n[{i}] == {x!r}" for i, (x, y) in same if x == y))
        saved = _thread.saved = list[Any]()
        try:
            # Of saved-tensor hooks the innermost are called, not a user's.
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
                found = self.program(numbers, *tensors)
            self.differs = _difference((found, saved), right)
        except torch.OutOfMemoryError:  # a proof needs twice the memory
            self.program = None
        except Exception as error:
            _switch_off(self.name, f"raised {type(error).__name__}: {error}")
        finally:
            _thread.saved = None


def copies_of(saved: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Saved tensors for the program: the pass as written may change those that it allocated."""
    copies = [(x, None if x is None else x.clone()) for x in saved]
    # A copy of another layout is of an input, which no pass changes.
    return [y if x is None or y is None or x.stride() == y.stride() else x for x, y in copies]


@torch.no_grad()
def _difference(found: Any, right: Any) -> Callable[[], bool | None]:
    """Function that says whether some bits differ, or None while the device computes it."""
    found, right = list(tensors_in(found)), list(tensors_in(right))
    facts = [
        [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors]
        for tensors in (found, right)
    ]
    if facts[0] != facts[1] or not found:
        return lambda: facts[0] != facts[1]
    bits = ([x.detach().view(_INTEGERS[x.itemsize]) for x in tensors] for tensors in (found, right))
    differs = torch.stack([(x != y).any() for x, y in zip(*bits, strict=True)]).any()
    on_host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=differs.is_cuda)
    on_host.copy_(differs, non_blocking=True)
    done = torch.cuda.current_stream().record_event() if differs.is_cuda else None
    return lambda: bool(on_host) if done is None or done.query() else None


class Record(Recording):
    """`Recording` with autograd functions as nodes."""

    def apply(self, function: type[torch.autograd.Function], options: Any, tensors: Any) -> Any:
        """``function.apply``; see `fastkd._core.numerics.apply`. Its forward pass is recorded.

        The program passes what that pass computes and saves to a node.
        """
        if isinstance(options, Tensor):
            self.fail(NoPlan("an autograd function without options"))
        if self.problem is not None:
            return function.apply(options, *tensors)
        apply, node = _node(function), SimpleNamespace(name=self.name, function=function, plans={})

        def forward(ctx: Any) -> Any:
            result = function.forward(ctx, options, *tensors)
            node.saved, node.constant = ctx.to_save or (), ctx.non_differentiable or ()
            own = "node", "numbers"
            node.attributes = {name: x for name, x in vars(ctx).items() if name not in own}
            return result

        result = apply((node, self.parameters, forward, None, ()), *tensors)
        saved, constant = vars(node).pop("saved"), vars(node).pop("constant")
        try:
            if any(tensors_in(node.attributes)):
                raise NoPlan("a context holds a tensor")
            self.saved.append(saved)
            parts = [self.constant(node), "n" if self.parameters else "()"]
            parts += map(self.text, (result, saved, constant))
            given = list(tensors_in((tensors, result, saved)))
            self.call(apply, (Text(f"({', '.join(parts)})"), *tensors), {}, given, result)
        except Exception as error:
            self.fail(error)
        return result


@functools.cache
def _node(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` of a function of this name, whose forward pass was computed before it."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    node: Any = type(function.__name__, (torch.autograd.Function,), methods)
    # Without the part of ``apply`` that is for vmap and the like.
    parent: Any = super(torch.autograd.Function, node)
    return cast(Callable[..., Any], parent.apply)


def _forward(ctx: Any, given: tuple[Any, ...], *tensors: Any) -> Any:
    ctx.node, ctx.numbers, result, saved, constant = given
    if saved is None:  # in a record
        return result(ctx)
    ctx.save_for_backward(*saved)
    if constant:
        ctx.mark_non_differentiable(*constant)
    if getattr(_thread, "saved", None) is not None:
        _thread.saved.append(saved)
    return result


def _backward(ctx: Any, *grads: Any) -> Any:
    node, numbers = ctx.node, ctx.numbers
    if torch.compiler.is_compiling():  # compiled autograd
        for name, x in at(numbers, node.attributes).items():
            setattr(ctx, name, x)
        return node.function.backward(ctx, *grads)
    saved, key, layouts = ctx.saved_tensors, None, []
    if ENABLED and not torch.is_grad_enabled():
        with torch._C.DisableTorchFunction():
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            key, *_ = _key((ctx.needs_input_grad, keep), grads)
            # A user's hooks may return other strides and addresses.
            layouts = [x if x is None else (x.stride(), x.data_ptr() % 16, x.dtype) for x in saved]
    plan, known = node.plans.get(key, (None, layouts))
    if known != layouts:
        key = plan = None
    if plan is not None and (plan.proved or plan.ready()) and plan.holds(numbers):
        return plan.program(numbers, *saved, *grads)

    def written(guards: list[str] | None = None) -> Any:
        context = SimpleNamespace(**at(numbers, node.attributes, guards))
        context.needs_input_grad, context.saved_tensors = ctx.needs_input_grad, saved
        return node.function.backward(context, *grads)

    if plan is not None and plan.to_prove(numbers):
        copies = copies_of(saved)
        result = written()
        plan.prove(numbers, (*copies, *grads), (result, []))
        return result
    if plan is not None or key is None or _capturing():
        return written()
    with Record(node.name, (*saved, *grads), numbers) as recording:
        result = written(recording.guards)
    node.plans[key] = Plan(recording, result), layouts
    return result


def at(numbers: tuple[float, ...], x: Any, guards: list[str] | None = None) -> Any:
    """``x`` with each `Number` computed from ``numbers``; one again if there are ``guards``."""

    def computed(old: float) -> float:
        if type(old) is not Number:
            return old
        value = eval(old.text, {"n": numbers})
        return value if guards is None else Number.of(value, old.text, guards)

    return mapped(x, computed)


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


def planned(
    function: Public, prepare: Callable[[dict[str, Any], Tensor], dict[str, Any]] | None = None
) -> Public:
    """Decorate a loss, or a part of one: with metadata that were seen often it runs from a plan.

    ``prepare(options, first)`` returns the keyword arguments of a call with the ``first`` tensor.
    """

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
                kwargs = kwargs if prepare is None else prepare(kwargs, first)
                near = hash((function, first.shape)) % len(_sights)
                if _sights[near] >= NEAR or _sight(near) >= NEAR:
                    key, tensors, numbers = _key((function, *kwargs), (*args, *kwargs.values()))
                    plan = _plans.get((key, numbers))
                    if plan is None and numbers:
                        varied = _plans.get((key, None))
                        plan = varied if varied is not None and varied.fits(numbers) else None
            if plan is not None:
                plan.called, _sights[near] = True, 255
                if plan.proved or plan.ready():
                    return plan.program(numbers, *tensors)
        if key is None:
            return function(*args, **kwargs)
        vary = to_record = False
        if plan is None:
            of_key = hash(key) % len(_sights)
            to_record = _sight(hash((key, numbers)) % len(_sights)) >= SIGHTS
            if not to_record and numbers and (varied is None or varied.program is not None):
                to_record = vary = _sight(of_key) >= VARIED
            # Inference mode shows no change of a tensor.
            to_record &= not torch.is_inference_mode_enabled() and not _capturing()
        _thread.inside = True  # other planned functions are neither counted nor recorded
        try:
            if not to_record and (plan is None or not plan.to_prove(numbers)):
                return function(*args, **kwargs)
            with Record(function.__name__, tensors, numbers if vary else ()) as recording:
                given, options = recording.with_parameters((args, kwargs))
                result = function(*given, **options)
        finally:
            _thread.inside = False
        if plan is None:
            _plans[key, None if vary else numbers] = Plan(recording, result)
            _sights[of_key] = 0 if vary else _sights[of_key]
        elif recording.problem is None:
            plan.prove(numbers, tensors, (result, recording.saved))
        return result

    return cast(Public, call)
