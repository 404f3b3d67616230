"""Record of a call: its allocations, operations, launches and autograd functions, as a program.

`Recording` is a context. What runs inside becomes steps, and `Recording.program` makes Python code
of them, with a name t<i> for each tensor, p<i> for its address, s<i> for what a backward pass needs
and c<i> for constants; n[<i>] is a number that is a parameter (`Number`). A launch calls Triton's
own launcher with addresses, each a tensor's plus a number of bytes: a view that only launches read
is never made. `fastkd._core.plans` decides what is recorded, and proves each program.
"""

import copy
import functools
import itertools
import math
import pkgutil
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

# What only makes room.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

# What isn't promised to stay as it is, by the name that plans have for it. Without one of these,
# plans are off.
PRIVATE = {
    "functions": "torch._C:_len_torch_function_stack",
    "dispatches": "torch._C:_len_torch_dispatch_stack",
    "modes": "torch.overrides:_get_current_function_mode_stack",
    "device_mode": "torch.utils._device:DeviceContext",
    "functorch": "torch._C._functorch:peek_interpreter_stack",
    "autocast": "torch._C:_is_any_autocast_enabled",
    "cpu": "torch._C._dynamo.guards:_empty_strided_cpu",
    "cuda": "torch._C._dynamo.guards:_empty_strided_cuda",
    "driver": "triton.runtime:driver",
    "runtime": "triton:knobs.runtime",
    "enter": "triton:knobs.runtime.launch_enter_hook.calls",
    "exit": "triton:knobs.runtime.launch_exit_hook.calls",
}


@functools.cache
def private() -> SimpleNamespace | str:
    """What `PRIVATE` names, or the first that is missing."""
    found = SimpleNamespace()
    for name, path in PRIVATE.items():
        try:
            setattr(found, name, pkgutil.resolve_name(path))
        except (ImportError, AttributeError):
            return f"{path.replace(':', '.')} is missing"
    return found


class NoPlan(Exception):
    """A record can't repeat what happens in a call."""


class Text(str):
    """An argument that a program computes."""


# Of texts: the literals of these numbers are names.
NAMES = {"inf": math.inf, "nan": math.nan}


class Number(float):
    """A number of a call that is a parameter of its program, or a number computed from it.

    ``text`` computes it. A comparison adds its outcome to ``guards``, which have to hold at a call.
    """

    text: str
    guards: list[str]

    def __new__(cls, x: float, text: str, guards: list[str]) -> "Number":
        number = super().__new__(cls, x)
        number.text, number.guards = text, guards
        return number


def _noted(name: str) -> Callable[..., Any]:
    """Method of `Number` that notes its call."""
    plain = getattr(float, name)

    def method(x: Number, *others: Any) -> Any:
        result = plain(x, *others)
        texts = [y.text if type(y) is Number else repr(y) for y in others]
        text = f"{x.text}.{name}({', '.join(texts)})"
        if type(result) is float and name != "__float__":
            return Number(result, text, x.guards)
        if type(result) is bool:
            x.guards.append(f"{text} is {result}")
        elif result is not NotImplemented:  # nothing but a float can be followed
            x.guards.append(f"{x.text} == {float.__pos__(x)!r}")
        return result

    return method


for _name, _plain in vars(float).items():
    is_method = isinstance(_plain, (types.WrapperDescriptorType, types.MethodDescriptorType))
    if is_method and _name not in ("__repr__", "__getattribute__"):
        setattr(Number, _name, _noted(_name))


def mapped(x: Any, change: Callable[[Any], Any], of: type = float) -> Any:
    """``x`` with ``change`` of each float, or other type, in it, in the order of a plan's key."""
    kind = type(x)
    if isinstance(x, of):
        return change(x)
    if kind is list or kind is tuple:
        return kind(mapped(y, change, of) for y in x)
    if kind is dict:
        return {name: mapped(y, change, of) for name, y in x.items()}
    if hasattr(kind, "__dataclass_fields__"):
        x = copy.copy(x)
        vars(x).update(mapped(vars(x), change, of))
    return x


def tensors_in(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(item)


class Step(NamedTuple):
    lines: list[str]
    used: list[int]  # tensors, by their number
    made: list[int]
    droppable: bool = False  # if nothing uses what it makes


class Recording(TorchFunctionMode):
    """Context in which operations, launches and autograd functions become a program's steps."""

    def __init__(
        self, name: str, inputs: Sequence[Any], numbers: tuple[float, ...], backward: Any
    ) -> None:
        super().__init__()
        self.backward = backward  # of nodes
        self.name, self.numbers, self.guards = name, numbers, list[str]()
        self.count = itertools.count()
        # Of the tensors that are alive: number, number of the base, bytes from its address.
        # A tensor that comes from elsewhere is missing there.
        self.places: Any = WeakTensorKeyDictionary()
        self.read: set[int] = set()  # whose address a line has
        self.steps: list[Step] = []
        self.saved: list[Any] = []  # for backward passes
        self.problem: Exception | None = None
        self.driver = vars(private())["driver"]
        self.device = self.driver.active.get_current_device()
        self.constants = NAMES | {"driver": self.driver}
        self.modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        self.inputs = [self.add(x) for x in inputs]

    def fail(self, error: Exception) -> None:
        """Note why there is no program. The call itself goes on."""
        self.problem = self.problem or error

    def add(self, x: Tensor | None, given: Sequence[Tensor] = ()) -> int:
        """Number of a new tensor, which may be a view of one of ``given``.

        An input may be None, or be there twice.
        """
        number = next(self.count)
        base, offset = number, 0
        if x is not None and x not in self.places:
            memory = x.untyped_storage().data_ptr()
            for other in given:
                if memory and memory == other.untyped_storage().data_ptr():
                    _, base, offset = self.places[other]
                    offset += x.data_ptr() - other.data_ptr()
            self.places[x] = number, base, offset
        return number

    def numbers_of(self, x: Any) -> list[int]:
        return [self.places[tensor][0] for tensor in tensors_in(x)]

    def text(self, x: Any) -> str:
        """An expression for ``x``."""
        if isinstance(x, Tensor):
            return f"t{self.places[x][0]}"
        if isinstance(x, (tuple, list)):
            items = "".join(f"{self.text(item)}, " for item in x)
            return f"({items})" if isinstance(x, tuple) else f"[{items}]"
        if type(x) is Number:
            return x.text
        if type(x) is Text:
            return x
        return repr(x) if x is None or type(x) in (int, bool, str) else self.constant(x)

    def constant(self, x: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = list(tensors_in((args, kwargs)))
            written = [x for x in given if not x.is_inference()]
            versions = [x._version for x in written]
            result = func(*args, **kwargs)
            try:
                changed = versions != [x._version for x in written]
                # Else it reads metadata, or is x.contiguous() that is x.
                if changed or any(x not in self.places for x in tensors_in(result)):
                    if getattr(func, "__name__", "") in ALLOCATIONS:
                        # As compiled graphs allocate: on the current device, in half the time.
                        func, given = vars(private())[result.device.type], []
                        args, kwargs = (tuple(result.shape), result.stride(), result.dtype), {}
                    else:
                        func = self.in_these_modes(func, given)
                    self.call(func, args, kwargs, given, result, not changed)
            except Exception as error:
                self.fail(error)
        return result

    def in_these_modes(self, func: Any, given: Sequence[Tensor]) -> Callable[..., Any]:
        """``func`` of ``given``, with autocast and grad mode as they are here."""
        grad, autocast = here = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        same = autocast == self.modes[1] and not any(x.requires_grad for x in given)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(grad), torch.autocast("cuda", enabled=autocast):
                return func(*args, **kwargs)

        return cast(Callable[..., Any], func) if same or here == self.modes else call

    def call(
        self, func: Any, args: Any, kwargs: Any, given: Any, result: Any, droppable: bool = False
    ) -> None:
        """Add the step of a call."""
        texts = [self.text(x) for x in args]
        texts += [f"{name}={self.text(x)}" for name, x in kwargs.items()]
        made = [self.add(x, given) for x in tensors_in(result) if x not in self.places]
        several = isinstance(result, (tuple, list))
        found = result if several else [result]
        names = [self.text(x) if isinstance(x, Tensor) else "_" for x in found]
        line = f"{', '.join(names)}{',' * several} = {self.constant(func)}({', '.join(texts)})"
        self.steps.append(Step([line], self.numbers_of(given), made, droppable))

    def apply(self, function: type[torch.autograd.Function], options: Any, tensors: Any) -> Any:
        """``function.apply``; see `fastkd._core.numerics.apply`. Its forward pass is recorded.

        A node, here and in the program, gets what that pass computes and saves.
        """
        learns = [isinstance(x, Tensor) and x.requires_grad for x in tensors]
        if isinstance(options, Tensor):
            self.fail(NoPlan("an autograd function without options"))
        if self.problem is not None or not (torch.is_grad_enabled() and any(learns)):
            return function.apply(options, *tensors)
        saved, constant = list[Any](), list[Any]()
        context = SimpleNamespace(needs_input_grad=(False, *learns))
        context.save_for_backward = lambda *tensors: saved.extend(tensors)
        context.mark_non_differentiable = lambda *tensors: constant.extend(tensors)
        own = {*vars(context)}
        with torch.no_grad():
            result = function.forward(context, options, *tensors)
        attributes = {name: x for name, x in vars(context).items() if name not in own}
        gradients = functools.partial(_gradients, function, attributes)
        vars(gradients)["__name__"], apply = self.name, _node(function, self.backward)
        found = apply((gradients, self.numbers, result, saved, constant), *tensors)
        try:
            if any(tensors_in(attributes)):
                raise NoPlan("a context holds a tensor")
            place = f"s{len(self.saved)}"
            self.steps.append(Step([f"{place} = {self.text(saved)}"], self.numbers_of(saved), []))
            self.saved.append(saved)
            parts = [self.constant(gradients), "n", self.text(result), place, self.text(constant)]
            given = Text(f"({', '.join(parts)})")
            self.call(apply, (given, *tensors), {}, list(tensors_in((tensors, result))), found)
        except Exception as error:
            self.fail(error)
        return found

    def launch(self, kernel: Any, grid: Any, args: Any, options: Any) -> None:
        """Launch a kernel, and add a step; see `fastkd._core.operator.launch_kernel`."""
        options = mapped(options, float)  # none may depend on a parameter
        compiled = kernel[grid](*mapped(args, float.__pos__), **options)
        try:
            if compiled is None or self.driver.active.get_current_device() != self.device:
                raise NoPlan("a launch on another device, or of a kernel that isn't compiled")
            names = {name: x for name, x in options.items() if name in kernel.signature.parameters}
            bound = kernel.signature.bind(*args, **names)
            bound.apply_defaults()
            step = Step([], [], [])
            given = mapped([*bound.arguments.values()], lambda x: self.address(step, x), Tensor)
            run, hooks = compiled.run, [None, None, None]
            around = [*[*grid, 1, 1][:3], Text("stream"), compiled.function]
            around += [compiled.packed_metadata, *hooks, *(Text(self.text(x)) for x in given)]
            scratch = (getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
            if callable(getattr(run, "launch", None)) and not any(scratch):
                # Triton's launcher passes arguments on to a function in C, in an order that depends
                # on the version: a call with a substitute for that function shows it.
                (probe, got), run = (copy.copy(run), list[Any]()), run.launch
                probe.launch = lambda *given: got.extend(given)
                probe(*around)
                around = got
            texts = [self.constant(x) if type(x) is list else self.text(x) for x in around]
            step.lines.append(f"{self.constant(run)}({', '.join(texts)})")
            self.steps.append(step)
            self.constant(compiled)  # some versions of Triton unload a kernel that is collected
        except Exception as error:
            self.fail(error)

    def address(self, step: Step, x: Tensor) -> Text:
        """An expression for the address of ``x``, which ``step`` reads if no step before did."""
        _, base, offset = self.places[x]
        if base not in self.read:
            step.lines.append(f"p{base} = t{base}.data_ptr()")
        self.read.add(base)
        step.used.append(base)
        return Text(f"p{base} + {offset}" if offset else f"p{base}")

    def program(self, results: Any) -> Callable[..., Any]:
        """Function of numbers and tensors that repeats the call.

        It returns the results, and what is saved for backward passes.
        """
        if self.problem is not None:
            raise self.problem
        if not self.read:
            raise NoPlan("a call without kernels")
        saved = ", ".join(f"s{i}" for i in range(len(self.saved)))
        lines = [f"return {self.text(results)}, [{saved}]"]
        kept = {*self.numbers_of(results)}
        for step in reversed(self.steps):
            if step.droppable and kept.isdisjoint(step.made):
                continue
            # What no later step uses is freed, as in the call as written.
            freed = sorted({*step.used, *step.made} - kept - {*self.inputs})
            lines[:0] = [*step.lines, *(f"t{i} = None" for i in freed)]
            kept.update(step.used)
        names = ", ".join(["n", *(f"t{i}" for i in self.inputs)])
        stream = f"stream = driver.active.get_current_stream({self.device})"
        exec("\n    ".join([f"def call({names}):", stream, *lines]), self.constants)
        return cast(Callable[..., Any], self.constants["call"])


@functools.cache
def _node(function: type[torch.autograd.Function], backward: Any) -> Callable[..., Any]:
    """``apply`` of a function of this name, whose forward pass was computed before it."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(backward)}
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


def _gradients(
    function: Any, attributes: Any, ctx: Any, numbers: tuple[float, ...], saved: Any, grads: Any
) -> Any:
    """Backward pass, as written, of a function whose context got these attributes."""
    if not torch.compiler.is_compiling():  # compiled autograd knows no other context
        ctx = SimpleNamespace(needs_input_grad=ctx.needs_input_grad, saved_tensors=saved)
    at = NAMES | {"n": numbers}
    attributes = mapped(attributes, lambda x: eval(x.text, at) if type(x) is Number else x)
    for name, x in attributes.items():
        setattr(ctx, name, x)
    return function.backward(ctx, *grads)
