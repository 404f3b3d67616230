"""Record of a call: its allocations, operations, launches and autograd functions, as a program.

`Recording` is a context. What runs inside becomes lines of Python, with a name t<i> for each
tensor, p<i> for its address, s<i> for what a backward pass needs and c<i> for constants; n[<i>] is
a number that is a parameter (`Number`). A launch calls Triton's own launcher with addresses, each a
tensor's plus a number of bytes: a view that only launches read is never made.
`fastkd._core.plans` decides what is recorded, and proves each program.
"""

import contextlib
import copy
import functools
import itertools
import math
import pkgutil
import re
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

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
    "mode": "torch._C:_get_function_stack_at",
    "device_mode": "torch.utils._device:DeviceContext",
    "dispatches": "torch._C:_len_torch_dispatch_stack",
    "functorch": "torch._C._functorch:peek_interpreter_stack",
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

    ``text`` computes it. What is computed and isn't a float, such as the outcome of a comparison,
    has to be the same at a call: ``guards`` say so.
    """

    text: str
    guards: list[str]

    def __new__(cls, x: float, text: str, guards: list[str]) -> "Number":
        number = super().__new__(cls, x)
        number.text, number.guards = text, guards
        return number


def _noted(name: str, plain: Any) -> Callable[..., Any]:
    """Method of `Number` that notes its call."""

    def method(x: Any, *others: Any) -> Any:
        result = plain(x, *others)
        if result is NotImplemented:  # others compute it
            return result
        text = f"{x.text}.{name}({', '.join(getattr(y, 'text', repr(y)) for y in others)})"
        if type(result) is float and name != "__float__":
            return Number(result, text, x.guards)
        x.guards.append(f"{text} == {result!r}")
        return result

    return method


for _name, _plain in vars(float).items():
    is_method = isinstance(_plain, (types.WrapperDescriptorType, types.MethodDescriptorType))
    if is_method and _name not in ("__repr__", "__getattribute__"):
        setattr(Number, _name, _noted(_name, _plain))


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
    elif hasattr(type(x), "__dataclass_fields__"):
        yield from tensors_in(vars(x))


def _numbers(line: str) -> set[str]:
    """Numbers of the tensors that a line names, or whose addresses it does."""
    return {*re.findall(r"\b[tp](\d+)", line)}


class Recording(TorchFunctionMode):
    """Context in which operations, launches and autograd functions become a program's lines."""

    def __init__(
        self, name: str, inputs: Sequence[Tensor], numbers: tuple[float, ...], node: Any
    ) -> None:
        super().__init__()
        self.name, self.numbers, self.node = name, numbers, node
        self.guards, self.saved = list[str](), list[Any]()  # `saved` is for backward passes
        # Of the tensors that are alive: number, number of the base, bytes from its address.
        # A tensor that comes from elsewhere is missing there.
        self.places: Any = WeakTensorKeyDictionary()
        self.count = itertools.count()
        self.lines = list[tuple[str, bool]]()  # and whether one that isn't used can be left out
        self.problem: Exception | None = None
        self.driver = vars(private())["driver"]
        self.device = self.driver.active.get_current_device()
        self.constants = NAMES | {"driver": self.driver}
        self.modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        for x in inputs:
            self.add(x)
        self.inputs = len(inputs)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Context of notes. If they fail, there is no program; the call itself goes on."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or error

    def add(self, x: Tensor, given: Sequence[Tensor] = ()) -> None:
        """Name a new tensor, which may be a view of one of ``given``."""
        number = base = next(self.count)
        offset, memory = 0, x.untyped_storage().data_ptr()
        for other in given:
            if memory and memory == other.untyped_storage().data_ptr():
                _, base, offset = self.places[other]
                offset += x.data_ptr() - other.data_ptr()
        self.places[x] = number, base, offset

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
        return repr(x) if x is None or type(x) in (int, bool) else self.constant(x)

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
            if func is torch.autograd.grad:  # of a graph that isn't recorded
                self.problem = NoPlan("derivatives inside of a call")
            changed = versions != [x._version for x in written]
            # Else it reads metadata, or is x.contiguous() that is x.
            if changed or any(x not in self.places for x in tensors_in(result)):
                if getattr(func, "__name__", "") in ALLOCATIONS:
                    # As compiled graphs allocate: on the current device, in half the time.
                    func, given = vars(private())[result.device.type], []
                    args, kwargs = (tuple(result.shape), result.stride(), result.dtype), {}
                self.call(func, args, kwargs, given, result, droppable=not changed)
        return result

    def call(
        self, func: Any, args: Any, kwargs: Any, given: Any, result: Any, droppable: bool = False
    ) -> None:
        """Note a call."""
        with self.noting():
            texts = [self.text(x) for x in args]
            texts += [f"{name}={self.text(x)}" for name, x in kwargs.items()]
            for x in tensors_in(result):
                if x not in self.places:
                    self.add(x, given)
            several = isinstance(result, (tuple, list))
            found = result if several else [result]
            names = [self.text(x) if isinstance(x, Tensor) else "_" for x in found]
            line = f"{', '.join(names)}{',' * several} = {self.constant(func)}({', '.join(texts)})"
            grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
            if grad != self.modes[0] and any(x.requires_grad for x in given):
                line = f"with {self.constant(torch.set_grad_enabled)}({grad}): {line}"
            if autocast != self.modes[1]:
                line = f"with {self.constant(torch.autocast)}('cuda', enabled={autocast}): {line}"
            self.lines.append((line, droppable))

    def apply(self, function: type[torch.autograd.Function], options: Any, tensors: Any) -> Any:
        """``function.apply``; see `fastkd._core.numerics.apply`. Its forward pass is recorded.

        A node, here and in the program, gets what that pass computes and saves.
        """
        learns = [isinstance(x, Tensor) and x.requires_grad for x in tensors]
        if isinstance(options, Tensor):
            self.problem = NoPlan("an autograd function without options")
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
        vars(gradients)["__name__"], apply = self.name, self.node(function)
        found = apply((gradients, self.numbers, result, saved, constant), *tensors)
        with self.noting():
            if any(tensors_in(attributes)):
                raise NoPlan("a context holds a tensor")
            place = f"s{len(self.saved)}"
            self.lines.append((f"{place} = {self.text(saved)}", False))
            self.saved.append(saved)
            parts = [self.constant(gradients), "n", self.text(result), place, self.text(constant)]
            given = Text(f"({', '.join(parts)})")
            self.call(apply, (given, *tensors), {}, list(tensors_in((tensors, result))), found)
        return found

    def launch(self, kernel: Any, grid: Any, args: Any, options: Any) -> None:
        """Launch a kernel, and note it; see `fastkd._core.operator.launch_kernel`."""
        options = mapped(options, float)  # none may depend on a parameter
        compiled = kernel[grid](*mapped(args, float.__pos__), **options)
        with self.noting():
            if compiled is None or self.driver.active.get_current_device() != self.device:
                raise NoPlan("a launch on another device, or of a kernel that isn't compiled")
            names = {name: x for name, x in options.items() if name in kernel.signature.parameters}
            bound = kernel.signature.bind(*args, **names)
            bound.apply_defaults()
            given = mapped([*bound.arguments.values()], self.address, Tensor)
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
            self.lines.append((f"{self.constant(run)}({', '.join(texts)})", False))
            self.constant(compiled)  # some versions of Triton unload a kernel that is collected

    def address(self, x: Tensor) -> Text:
        """An expression for the address of ``x``."""
        _, base, offset = self.places[x]
        line = f"p{base} = t{base}.data_ptr()", False
        if line not in self.lines:
            self.lines.append(line)
        return Text(f"p{base} + {offset}" if offset else f"p{base}")

    def program(self, results: Any) -> Callable[..., Any]:
        """Function of numbers and tensors that repeats the call.

        It returns the results, and what is saved for backward passes.
        """
        if self.problem is not None:
            raise self.problem
        if all(" = " in line for line, _ in self.lines):
            raise NoPlan("a call without kernels")
        saved = ", ".join(f"s{i}" for i in range(len(self.saved)))
        code = [f"return {self.text(results)}, [{saved}]"]
        inputs = [f"t{i}" for i in range(self.inputs)]
        kept = _numbers(" ".join([*inputs, *code]))
        for line, droppable in reversed(self.lines):
            if not droppable or _numbers(line.split(" = ")[0]) & kept:
                # What no later line uses is freed, as in the call as written.
                code[:0] = [line, *(f"t{i} = None" for i in sorted(_numbers(line) - kept))]
                kept |= _numbers(line)
        code.insert(0, f"stream = driver.active.get_current_stream({self.device})")
        exec("\n    ".join([f"def call({', '.join(['n', *inputs])}):", *code]), self.constants)
        return cast(Callable[..., Any], self.constants["call"])


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
