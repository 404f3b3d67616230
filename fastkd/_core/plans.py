"""Plans: a loss call whose metadata were seen often, without its Python code; see docs/plans.md.

Calls under `planned` are counted by their metadata, the key, and the eighth of late is recorded as
a program (`fastkd._core.recording`). The next call runs as written and as a program too, and a flag
on the device tells later whether both gave the same bits: from then on the program runs. The first
program that differs, or raises, switches plans off in this process, with one warning.

An autograd function becomes a node of the same name: its forward pass is a part of the call's
program, and its backward pass has one for each kind of upstream gradient, which proves itself.
"""

import functools
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fastkd._core import extension
from fastkd._core.numerics import multiplies_in_float32
from fastkd._core.operator import RECORDING
from fastkd._core.recording import NAMES, NoPlan, Number, Recording, mapped, private, tensors_in

SIGHTS = 8  # of a key, after which a call is recorded: that costs as much as several calls
MOST = 4  # plans of a key, for numbers whose comparisons have different outcomes
WINDOW = 2048  # sights after which counts start again, and plans without a call are dropped
ENABLED = os.environ.get("FASTKD_PLANS") != "0"

_PLAIN = {type(None), bool, int, str, torch.dtype, torch.device}  # they are in a key themselves
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Read at each call: names of this module are found faster than attributes of attributes.
_capturing = torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False

Public = TypeVar("Public", bound=Callable[..., Any])
Key = tuple[tuple[Any, ...], list[Tensor], tuple[float, ...]]  # with the call's tensors and floats

problem: str | None = None  # that switched plans off


def why_off() -> str | None:
    """Why plans are off in this process, or None if they are on."""
    if problem is None and not ENABLED:
        return "FASTKD_PLANS=0"
    found = private()
    return problem or (found if isinstance(found, str) else None)


def _switch_off(name: str, reason: str) -> None:
    global ENABLED, problem
    if ENABLED:
        ENABLED, problem = False, f"the plan of {name} {reason}"
        warnings.warn(
            f"{problem}, with torch {torch.__version__} and triton {metadata.version('triton')}; "
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
            key.append(x.data_ptr() % 16)
        elif kind is float:
            key.append(kind)
            numbers.append(x)
        elif kind is list or kind is tuple:
            key += (kind, len(x))
            _describe(x, key, tensors, numbers)
        else:
            fields = vars(x) if hasattr(kind, "__dataclass_fields__") else x
            if not isinstance(fields, dict):  # as a match has, of tensors by their device
                raise NoPlan(f"an argument is a {kind.__name__}")
            key += (kind, *fields)
            _describe(fields.values(), key, tensors, numbers)


def _key(of: Iterable[Any], values: Iterable[Any]) -> Key | None:
    """What a call with these values depends on.

    None if the call isn't covered, or if something looks at or changes the operations of this
    thread. A default device, which operations that name one don't read, is an exception.
    """
    on: Any = private()
    if (
        isinstance(on, str)
        or (
            on.functions()
            and any(type(on.mode(i)) is not on.device_mode for i in range(on.functions()))
        )
        or on.dispatches()
        or on.functorch() is not None
        or on.runtime.launch_enter_hook.calls
        or on.runtime.launch_exit_hook.calls
    ):
        return None
    tensors: list[Tensor] = []
    numbers: list[float] = []
    key = [torch.is_grad_enabled(), multiplies_in_float32(), torch.get_default_dtype()]
    if torch.is_autocast_enabled("cuda"):
        key.append(torch.get_autocast_dtype("cuda"))
    key += (on.driver.active.get_current_device(), *of)
    try:
        _describe(values, key, tensors, numbers)
    except (NoPlan, RuntimeError):
        return None
    if len({x.data_ptr() for x in tensors}) < len(tensors):  # in one place, or one tensor
        addresses, ids = [x.data_ptr() for x in tensors], [*map(id, tensors)]
        key += (tuple(map(x.index, x)) for x in (addresses, ids))
    return tuple(key), tensors, tuple(numbers)


class Plan:
    """A program of what was recorded, for numbers of which `holds` is true, and its proof.

    ``program`` is None for a call that none can repeat. Numbers are parameters of it. One that was
    the same in the record and all proofs isn't known to be used, and is a constant.
    """

    program, called = cast(Any, None), True
    differs: Callable[[], bool | None] | None = None  # what the device found in a proof
    proved: Callable[[tuple[float, ...]], bool] | None = None  # for which numbers

    def __init__(self, recording: Recording, results: Any) -> None:
        self.name, self.constants = recording.name, {*enumerate(recording.numbers)}
        conditions = " and ".join(dict.fromkeys(recording.guards)) or "True"
        self.holds = cast(Any, eval(f"lambda n: {conditions}", dict(NAMES)))
        try:
            self.program = recording.program(results)
        except (NoPlan, KeyError):  # a tensor comes from elsewhere
            pass
        except Exception as error:
            _switch_off(self.name, f"can't be recorded: {type(error).__name__}: {error}")

    def ready(self, numbers: tuple[float, ...]) -> bool:
        """Whether the program is proved for these numbers. It doesn't wait for the device."""
        if self.differs is not None and not _capturing():
            differs = self.differs()
            if differs:
                _switch_off(self.name, "gave other bits than the call as written")
            elif differs is not None:
                self.differs, known = None, self.constants
                self.proved = self.holds
                if known:
                    self.proved = lambda n: self.holds(n) and known.issubset(enumerate(n))
        return self.proved is not None and ENABLED and self.proved(numbers)

    def prove(self, numbers: tuple[float, ...], tensors: list[Tensor], right: Any) -> None:
        """Let the device compare what the program computes and saves with what is right."""
        self.constants = self.constants.intersection(enumerate(numbers))
        try:
            # Of saved-tensor hooks the innermost are called, not a user's.
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
                self.differs = _difference(self.program(numbers, *tensors), right)
        except torch.OutOfMemoryError:  # a proof needs twice the memory
            self.program = None
        except Exception as error:
            _switch_off(self.name, f"raised {type(error).__name__}: {error}")


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


@functools.cache
def _node(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` of a function of this name, whose forward pass was computed before it."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    node: Any = type(function.__name__, (torch.autograd.Function,), methods)
    # Without the part of ``apply`` that is for vmap and the like.
    parent: Any = super(torch.autograd.Function, node)
    return cast(Callable[..., Any], parent.apply)


def _forward(ctx: Any, given: tuple[Any, ...], *tensors: Any) -> Any:
    ctx.gradients, ctx.numbers, result, saved, constant = given
    ctx.save_for_backward(*saved)
    if constant:
        ctx.mark_non_differentiable(*constant)
    return result


def _backward(ctx: Any, *grads: Any) -> Any:
    function, saved, found = ctx.gradients, ctx.saved_tensors, None
    args = ctx, ctx.numbers, saved, grads
    if torch.compiler.is_compiling():
        return function(*args)
    if ENABLED and not torch.is_grad_enabled():
        with torch._C.DisableTorchFunction():
            keeps = torch._C._autograd._get_current_graph_task_keep_graph()
            # A user's hooks may return others than were saved.
            tensors = [x for x in saved if x is not None]
            layouts = [(x.stride(), x.data_ptr() % 16, x.dtype) for x in tensors]
            of = function, ctx.needs_input_grad, keeps, *layouts
            found = _key(of, (*ctx.numbers, *grads))
            found = found and (found[0], tensors + found[1], found[2])
    return _call(function, args, {}, found, backward=True)


def _copy(x: Tensor) -> Tensor:
    """A copy for the program: a backward pass may change what its forward pass allocated."""
    y = x.clone()
    return y if y.stride() == x.stride() else x  # else of an input


_plans: dict[tuple[Any, ...], list[Plan]] = {}
_sights: Counter[int] = Counter()  # of keys, by their hash
_seen = itertools.count(1)


def _sight(key: tuple[Any, ...]) -> int:
    """Sights of a key of late, with this one: at times all counts start again."""
    if next(_seen) % WINDOW == 0:
        _sights.clear()
        for known, plans in list(_plans.items()):
            if not any(plan.called for plan in plans):
                _plans.pop(known, None)
            for plan in plans:
                plan.called = False
    _sights[hash(key)] += 1
    return _sights[hash(key)]


def clear_plans() -> None:
    """Drop all plans: the next calls run as written.

    >>> import fastkd
    >>> fastkd.clear_plans()
    """
    _plans.clear()
    _sights.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear_plans)


def planned(function: Public) -> Public:
    """Decorate a loss, or a part of one: with metadata that were seen often it runs from a plan."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorded = getattr(RECORDING, "active", None) is not None
        if not ENABLED or recorded or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        found = None
        # A default device is a mode of torch functions, under which each attribute costs much.
        with torch._C.DisableTorchFunction():
            first = args[0] if args else None
            if type(first) is not Tensor:
                first = next(tensors_in(args or kwargs), None)
            if first is not None and on_gpu(first) and not kwargs.get("gather"):
                if type(kwargs.get("denominator")) is int:  # another one at each step
                    kwargs["denominator"] = float(kwargs["denominator"])
                found = _key((function, *kwargs), (*args, *kwargs.values()))
        if found is None:
            return function(*args, **kwargs)
        return _call(function, args, kwargs, found)

    return cast(Public, call)


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Key | None,
    backward: bool = False,
) -> Any:
    """The call of a planned function, or of a backward pass, which is recorded at first sight."""
    if found is None:
        return function(*args, **kwargs)
    key, tensors, numbers = found
    plans = _plans.get(key, [])
    for plan in plans:
        if (plan.proved and plan.proved(numbers)) or plan.ready(numbers):
            plan.called = True
            with torch._C.DisableTorchFunction():
                return plan.program(numbers, *tensors)[0]
    known = next((x for x in plans if x.holds(numbers)), None)
    if known is not None:
        due = known.program is not None and known.differs is None  # to be proved
    else:
        due = len(plans) < MOST and (backward or _sight(key) >= SIGHTS)
        due &= not torch.is_inference_mode_enabled()  # it shows no change of a tensor
    if not due or not ENABLED or _capturing():
        return function(*args, **kwargs)
    recording = Recording(function.__name__, tensors, numbers, _node)
    texts = (f"n[{i}]" for i in range(len(numbers)))
    args, kwargs = mapped((args, kwargs), lambda x: Number(x, next(texts), recording.guards))
    if backward and known is not None:
        tensors = [_copy(x) for x in tensors]
    RECORDING.active = recording
    try:
        with recording:
            result = function(*args, **kwargs)
    finally:
        RECORDING.active = None
    if known is None:
        _plans.setdefault(key, plans).append(Plan(recording, result))
    elif recording.problem is None:
        known.prove(numbers, tensors, (result, recording.saved))
    return result
