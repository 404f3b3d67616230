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
import pkgutil
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fastkd._core.operator import RECORDING

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
        text = f"{x.text}.{name}({', '.join(map(_text, others))})"
        if type(result) is float and name != "__float__":
            return Number(result, text, x.guards)
        if type(result) is bool:
            x.guards.append(f"{text} is {result}")
        elif result is not NotImplemented:  # nothing but a float can be followed
            x.guards.append(f"{x.text} == {_text(float.__pos__(x))}")
        return result

    return method


for _name, _plain in vars(float).items():
    is_method = isinstance(_plain, (types.WrapperDescriptorType, types.MethodDescriptorType))
    if is_method and _name not in ("__repr__", "__getattribute__"):
        setattr(Number, _name, _noted(_name))


def _text(x: Any) -> str:
    """Python code for an operand. The literal of inf or nan would be a name."""
    if type(x) is Number:
        return x.text
    return f"float({str(x)!r})" if type(x) is float and x - x != 0 else repr(x)


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


class _Step(NamedTuple):
    lines: list[str]
    used: list[int]  # tensors, by their number
    made: list[int]
    droppable: bool = False  # if nothing uses what it makes


class Recording(TorchFunctionMode):
    """Context in which operations, launches and autograd functions become a program's steps."""

    def __init__(self, name: str, inputs: Sequence[Any], numbers: tuple[float, ...]) -> None:
        super().__init__()
        self.name, self.numbers, self.guards = name, numbers, list[str]()
        self.count = itertools.count()
        # Of the tensors that are alive: number, number of the base, bytes from its address.
        self.places: Any = WeakTensorKeyDictionary()
        self.read: set[int] = set()  # whose address a line has
        self.steps: list[_Step] = []
        self.saved: list[Any] = []  # for backward passes
        self.problem: Exception | None = None
        self.driver = vars(private())["driver"]
        self.device = self.driver.active.get_current_device()
        self.constants: dict[str, Any] = {"driver": self.driver}
        self.modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        self.inputs = [self.add(x) for x in inputs]

    def __enter__(self) -> "Recording":
        self.outer, RECORDING.active = getattr(RECORDING, "active", None), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        RECORDING.active = self.outer
        super().__exit__(*error)

    def fail(self, error: Exception) -> None:
        """Note why there is no program. The call itself goes on."""
        self.problem = self.problem or error

    def with_parameters(self, x: Any) -> Any:
        """``x`` with its floats as parameters."""
        places = itertools.count()
        return mapped(x, lambda x: Number(x, f"n[{next(places)}]", self.guards))

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
                    _, base, offset = self.place(other)
                    offset += x.data_ptr() - other.data_ptr()
            self.places[x] = number, base, offset
        return number

    def place(self, x: Tensor) -> tuple[int, int, int]:
        if x not in self.places:
            raise NoPlan("a tensor comes from elsewhere")
        return cast(tuple[int, int, int], self.places[x])

    def numbers_of(self, x: Any) -> list[int]:
        return [self.place(tensor)[0] for tensor in tensors_in(x)]

    def text(self, x: Any) -> str:
        """An expression for ``x``."""
        if isinstance(x, Tensor):
            return f"t{self.place(x)[0]}"
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
                        args = tuple(result.shape), result.stride(), result.dtype
                        kwargs = {}
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
        self.steps.append(_Step([line], self.numbers_of(given), made, droppable))

    def save(self, tensors: Sequence[Tensor | None]) -> str:
        """Name of what a program saves for a backward pass."""
        name, line = f"s{len(self.saved)}", f" = {self.text(tuple(tensors))}"
        self.steps.append(_Step([name + line], self.numbers_of(tensors), []))
        self.saved.append(tensors)
        return name

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
            step = _Step([], [], [])
            given = mapped([*bound.arguments.values()], lambda x: self.address(step, x), Tensor)
            self.constant(compiled)  # some versions of Triton unload a kernel that is collected
            texts = [Text(self.text(x)) for x in given]
            run, around = _launcher(compiled, (*grid, 1, 1)[:3], texts)
            texts = [Text(self.constant(x) if type(x) is list else self.text(x)) for x in around]
            step.lines.append(f"{self.constant(run)}({', '.join(texts)})")
            self.steps.append(step)
        except Exception as error:
            self.fail(error)

    def address(self, step: _Step, x: Tensor) -> Text:
        """An expression for the address of ``x``, which ``step`` reads if no step before did."""
        _, base, offset = self.place(x)
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


def _launcher(compiled: Any, grid: tuple[int, ...], arguments: list[Text]) -> Any:
    """Triton's launcher, and its arguments around those of the kernel.

    The launcher's class passes its arguments on to a function in C. They differ between versions of
    Triton, so a call with a substitute for that function records them.
    """
    run, got = compiled.run, []
    around = [*grid, Text("stream"), compiled.function, compiled.packed_metadata]
    around += [None, None, None, *arguments]  # no hooks
    scratch = (getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
    if not callable(getattr(run, "launch", None)) or any(scratch):
        return run, around
    probe = copy.copy(run)
    probe.launch = lambda *given: got.extend(given)
    probe(*around)
    return run.launch, got
