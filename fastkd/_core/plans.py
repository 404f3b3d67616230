"""Plans: a loss call whose metadata were seen often, without its Python code; see docs/plans.md.

Calls under `planned` are counted by their metadata, the key, and the eighth of late is recorded as
a program (`fastkd._core.recording`). The next call runs as written and as a program too, and a flag
on the device tells later whether both gave the same bits: from then on the program runs. The first
program that differs, or raises, switches plans off in this process, with one warning.

An autograd function becomes a node of the same name: its forward pass is a part of the call's
program, and its backward pass has one for each kind of upstream gradient, which proves itself.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fastkd._core import extension
from fastkd._core.numerics import multiplies_in_float32
from fastkd._core.operator import RECORDING
from fastkd._core.recording import NAMES, NoPlan, Number, Recording, mapped, private, tensors_in

# A record costs as much as several calls as written: the eighth call is recorded.
NEAR = 6  # sights of a function and its first shape after which keys are computed
SIGHTS = 3  # sights of a key after which a call is recorded
MOST = 4  # plans of a key, for numbers whose comparisons have different outcomes
WINDOW = 4096  # sights after which all counts are halved, and plans without a call are dropped
ENABLED = os.environ.get("FASTKD_PLANS") != "0"

_PLAIN = {type(None), bool, int, str, torch.dtype, torch.device}  # they are in a key themselves
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Read at each call: names of this module are found faster than attributes of attributes.
_capturing = torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False

Public = TypeVar("Public", bound=Callable[..., Any])

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
        elif kind is float:
            key.append(kind)
            numbers.append(x)
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


def _key(
    of: Iterable[Any], values: Iterable[Any]
) -> tuple[tuple[Any, ...] | None, list[Tensor], tuple[float, ...]]:
    """What a call depends on; tensors and floats of its ``values``.

    The key is None if the call isn't covered, or if something looks at or changes the operations of
    this thread. A default device, which operations that name one don't read, is an exception.
    """
    on: Any = private()
    tensors: list[Tensor] = []
    numbers: list[float] = []
    if (
        isinstance(on, str)
        or (on.functions() and any(type(x) is not on.device_mode for x in on.modes()))
        or on.dispatches()
        or on.functorch() is not None
        or on.runtime.launch_enter_hook.calls
        or on.runtime.launch_exit_hook.calls
    ):
        return None, tensors, ()
    key = [torch.is_grad_enabled(), multiplies_in_float32(), torch.get_default_dtype()]
    if on.autocast() and torch.is_autocast_enabled("cuda"):
        key.append(torch.get_autocast_dtype("cuda"))
    key += (on.driver.active.get_current_device(), *of)
    try:
        _describe(values, key, tensors, numbers)
        key.append(_addresses(tensors))
    except (NoPlan, RuntimeError):
        return None, tensors, ()
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
        self.name, self.guards = recording.name, [*recording.guards]
        self.constants = [f"n[{i}] == {x!r}" for i, x in enumerate(recording.numbers)]
        self.holds = self.condition([])
        try:
            self.program = recording.program(results)
        except (NoPlan, KeyError):  # a tensor comes from elsewhere
            pass
        except Exception as error:
            _switch_off(self.name, f"can't be recorded: {type(error).__name__}: {error}")

    def condition(self, more: list[str]) -> Callable[[tuple[float, ...]], bool]:
        """Function that says whether the record's and more conditions on the numbers ``n`` hold."""
        conditions = " and ".join(dict.fromkeys(self.guards + more)) or "True"
        return cast(Any, eval(f"lambda n: {conditions}", dict(NAMES)))

    def ready(self, numbers: tuple[float, ...]) -> bool:
        """Whether the program is proved for these numbers. It doesn't wait for the device."""
        differs = None if self.differs is None or _capturing() else self.differs()
        if differs:
            _switch_off(self.name, "gave other bits than the call as written")
        elif differs is not None:
            self.differs, self.proved = None, self.condition(self.constants)
        return ENABLED and self.proved is not None and self.proved(numbers)

    def prove(self, numbers: tuple[float, ...], tensors: Sequence[Any], right: Any) -> None:
        """Let the device compare what the program computes and saves with what is right."""
        self.constants = [x for x in self.constants if self.condition([x])(numbers)]
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


def _copy(x: Tensor | None) -> Tensor | None:
    """A copy for the program: a backward pass may change what its forward pass allocated."""
    y = None if x is None else x.clone()
    return y if x is None or y is None or y.stride() == x.stride() else x  # else of an input


def _backward(ctx: Any, *grads: Any) -> Any:
    function, numbers = ctx.gradients, ctx.numbers
    if torch.compiler.is_compiling():
        return function(ctx, numbers, None, grads)
    saved, key = ctx.saved_tensors, None
    if ENABLED and not torch.is_grad_enabled():
        with torch._C.DisableTorchFunction():
            # A user's hooks may return other strides and addresses.
            layouts = [x if x is None else (x.stride(), x.data_ptr() % 16, x.dtype) for x in saved]
            keeps = torch._C._autograd._get_current_graph_task_keep_graph()
            key, *_ = _key((function, ctx.needs_input_grad, keeps, *layouts), grads)
    return _call(function, (ctx, numbers, saved, grads), {}, key, (*saved, *grads), numbers)


_plans: dict[tuple[Any, ...], list[Plan]] = {}
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
        for key, plans in list(_plans.items()):
            if not any(plan.called for plan in plans):
                _plans.pop(key, None)
            for plan in plans:
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


def planned(function: Public) -> Public:
    """Decorate a loss, or a part of one: with metadata that were seen often it runs from a plan."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorded = getattr(RECORDING, "active", None) is not None
        if not ENABLED or recorded or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        key = None
        # A default device is a mode of torch functions, under which each attribute costs much.
        with torch._C.DisableTorchFunction():
            first = args[0] if args else None
            if type(first) is not Tensor:
                first = next(tensors_in(args or kwargs), None)
            if first is not None and on_gpu(first) and not kwargs.get("gather"):
                near = hash((function, first.shape)) % len(_sights)
                if _sights[near] >= NEAR or _sight(near) >= NEAR:
                    if type(kwargs.get("denominator")) is int:  # another one at each step
                        kwargs["denominator"] = float(kwargs["denominator"])
                    key, tensors, numbers = _key((function, *kwargs), (*args, *kwargs.values()))
        if key is None:
            return function(*args, **kwargs)
        return _call(function, args, kwargs, key, tensors, numbers, near)

    return cast(Public, call)


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: tuple[Any, ...] | None,
    tensors: Sequence[Any],
    numbers: tuple[float, ...],
    near: int | None = None,
) -> Any:
    """The call of a planned function, or of a backward pass, which is near no other call."""
    plans = _plans.get(key, []) if key else []
    for plan in plans:
        if (plan.proved and plan.proved(numbers)) or (plan.holds(numbers) and plan.ready(numbers)):
            plan.called = True
            if near is not None:
                _sights[near] = 255
            with torch._C.DisableTorchFunction():
                return plan.program(numbers, *tensors)[0]
    known = next((x for x in plans if x.holds(numbers)), None)
    due = key is not None and ENABLED and not _capturing()
    if due and known is not None:
        due = known.program is not None and known.differs is None  # to be proved
    elif due:
        due = len(plans) < MOST and (near is None or _sight(hash(key) % len(_sights)) >= SIGHTS)
        due &= not torch.is_inference_mode_enabled()  # it shows no change of a tensor
    if not due:
        return function(*args, **kwargs)
    recording = Recording(function.__name__, tensors, numbers, _backward)
    texts = (f"n[{i}]" for i in range(len(numbers)))
    args, kwargs = mapped((args, kwargs), lambda x: Number(x, next(texts), recording.guards))
    if near is None and known is not None:
        tensors = [_copy(x) for x in tensors]
    RECORDING.active = recording
    try:
        with recording:
            result = function(*args, **kwargs)
    finally:
        RECORDING.active = None
    if known is None:
        _plans.setdefault(cast(Any, key), plans).append(Plan(recording, result))
    elif recording.problem is None:
        known.prove(numbers, tensors, (result, recording.saved))
    return result
