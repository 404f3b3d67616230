"""Record of a call: its allocations, operations, launches and autograd functions, as a program.

`Recording` is a context. What runs inside becomes steps, and `Recording.program` makes Python code
of them, with a name t<i> for each tensor, p<i> for its address and c<i> for constants; n[<i>] is a
number that is a parameter (`Number`). A launch calls Triton's own launcher with addresses, each a
tensor's plus a number of bytes: a view that only launches read is never made.
`fastkd._core.plans` decides what is recorded, and proves each program.
"""

import copy
import functools
import itertools
import pkgutil
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastkd._core.operator import RECORDING

Program = Callable[..., Any]

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
    "tracing": "torch._C:_get_tracing_state",
    "deterministic": "torch._C:_get_deterministic_algorithms",
    "autocast": "torch._C:_is_any_autocast_enabled",
    "keeps_graph": "torch._C._autograd:_get_current_graph_task_keep_graph",
    "cpu": "torch._C._dynamo.guards:_empty_strided_cpu",
    "cuda": "torch._C._dynamo.guards:_empty_strided_cuda",
    "driver": "triton.runtime:driver",
    "runtime": "triton:knobs.runtime",
    "enter": "triton:knobs.runtime.launch_enter_hook.calls",
    "exit": "triton:knobs.runtime.launch_exit_hook.calls",
}


class NoPlan(Exception):
    """A record can't repeat what happens in a call."""


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


class _Step(NamedTuple):
    """Lines of a program."""

    lines: list[str]
    used: list[int]  # tensors, by their number
    made: list[int]
    droppable: bool  # if nothing uses what it makes


class Text(str):
    """An argument that a program computes."""


class Number(float):
    """A number of a call that is a parameter of its program, or a number computed from it.

    ``text`` computes it. A comparison adds its outcome to ``guards``, which have to hold at a call.
    """

    text: str
    guards: list[str]

    @classmethod
    def of(cls, x: float, text: str, guards: list[str]) -> "Number":
        number = cls(x)
        number.text, number.guards = text, guards
        return number


_NOT_NOTED = {"__repr__", "__getattribute__"}


def _noted(name: str) -> Callable[..., Any]:
    """Method of `Number` that notes its call."""
    plain = getattr(float, name)

    def method(x: Number, *others: Any) -> Any:
        result = plain(x, *others)
        text = f"float.{name}({', '.join(map(_text, (x, *others)))})"
        if type(result) is float and name != "__float__":
            return Number.of(result, text, x.guards)
        if result is not NotImplemented:  # nothing but a float can be followed
            x.guards.append(f"{text} is {result}" if type(result) is bool else "False")
        return result

    return method


for _name, _plain in vars(float).items():
    if type(_plain) is types.WrapperDescriptorType and _name not in _NOT_NOTED:
        setattr(Number, _name, _noted(_name))


def _text(x: Any) -> str:
    return x.text if type(x) is Number else f"float({str(x)!r})" if type(x) is float else repr(x)


def mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """``x`` with ``change`` of each float in it, in the order of a plan's key."""
    kind = type(x)
    if isinstance(x, float):
        return change(x)
    if kind is list or kind is tuple:
        return kind(mapped(y, change) for y in x)
    if kind is dict:
        return {name: mapped(y, change) for name, y in x.items()}
    if hasattr(kind, "__dataclass_fields__"):
        x = copy.copy(x)
        vars(x).update(mapped(vars(x), change))
    return x


def tensors_in(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(item)


class Recording(TorchFunctionMode):
    """Context in which operations, launches and autograd functions become a program's steps."""

    def __init__(
        self, name: str, inputs: Sequence[Tensor | None], numbers: tuple[float, ...] = ()
    ) -> None:
        super().__init__()
        self.name, self.private = name, vars(private())
        self.parameters, self.guards = numbers, list[str]()
        self.numbers: dict[int, int] = {}  # by id, of tensors that are alive
        self.held: list[weakref.ref[Tensor] | None] = []  # by number
        self.base: dict[int, tuple[int, int]] = {}  # of a view: whose memory, and where in it
        self.read: set[int] = set()  # whose address a line has
        self.steps: list[_Step] = []
        self.constants: dict[str, Any] = {}
        self.saved: list[Any] = []  # for backward passes
        self.starts_kernels = False
        self.problem: Exception | None = None  # no `NoPlan` if this file is at fault
        self.surroundings = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        self.driver = self.private["driver"]
        self.device = self.driver.active.get_current_device()
        for x in inputs:
            self.add(x)
        self.inputs = len(self.held)

    def __enter__(self) -> "Recording":
        self.outer, RECORDING.active = getattr(RECORDING, "active", None), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        RECORDING.active = self.outer
        super().__exit__(*error)

    def fail(self, error: Exception) -> None:
        """Note why there is no program. The call itself goes on."""
        self.problem = self.problem or error

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
            raise NoPlan("a tensor comes from elsewhere")
        return self.numbers[id(x)]

    def with_parameters(self, x: Any) -> Any:
        """``x`` with its floats as parameters, if there are any."""
        places = itertools.count()

        def parameter(x: float) -> float:  # zeros are in the key
            return Number.of(x, f"n[{next(places)}]", self.guards) if x else x

        return mapped(x, parameter) if self.parameters else x

    def text(self, x: Any, of_tensor: Callable[[Tensor], str] | None = None) -> str:
        """An expression for ``x``."""
        if isinstance(x, Tensor):
            return of_tensor(x) if of_tensor else f"t{self.number(x)}"
        if type(x) is Text:
            return x
        if type(x) is Number:
            return x.text
        if isinstance(x, (tuple, list)):
            items = "".join(f"{self.text(item, of_tensor)}, " for item in x)
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
        with torch._C.DisableTorchFunction():
            given = list(tensors_in((args, kwargs)))
            written = [x for x in given if not x.is_inference()]
            versions = [x._version for x in written]
            result = func(*args, **kwargs)
            try:
                changed = versions != [x._version for x in written]
                self.operation(func, args, kwargs, given, result, changed)
            except Exception as error:
                self.fail(error)
        return result

    def operation(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any, changed: bool
    ) -> None:
        """Add an operation's step."""
        name, found = getattr(func, "__name__", ""), list(tensors_in(result))
        new = [x for x in found if id(x) not in self.numbers]
        if not changed and not new:  # metadata, or x.contiguous() that is x
            for x in given if found else ():
                self.number(x)
        elif name in ALLOCATIONS and new and new[0] is result:
            # As compiled graphs allocate: on the current device, in half the time.
            number, dtype = self.add(result), self.constant(result.dtype)
            empty = self.constant(self.private[result.device.type])
            line = f"t{number} = {empty}({tuple(result.shape)}, {result.stride()}, {dtype})"
            self.steps.append(_Step([line], [], [number], True))
        else:
            self.call(self.in_these_surroundings(func, given), args, kwargs, given, result)
            views = [x for x in new if not changed and self.view(x, given)]
            droppable = len(views) == len(new) and not changed
            self.steps[-1] = self.steps[-1]._replace(droppable=droppable)

    def call(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
        """Add the step of a call."""
        texts = [self.text(x) for x in args]
        texts += [f"{name}={self.text(x)}" for name, x in kwargs.items()]
        line = f"{self.constant(func)}({', '.join(texts)})"
        made = [self.add(x) for x in tensors_in(result) if id(x) not in self.numbers]
        if isinstance(result, Tensor):
            line = f"{self.text(result)} = {line}"
        elif isinstance(result, (tuple, list)):
            names = [self.text(x) if isinstance(x, Tensor) else "_" for x in result]
            line = f"{', '.join(names)}, = {line}"
        self.steps.append(_Step([line], list(map(self.number, given)), made, False))

    def view(self, x: Tensor, given: list[Tensor]) -> bool:
        """Whether ``x`` shares the memory of one of ``given``; notes where."""
        storage = x.untyped_storage().data_ptr()
        for other in given:
            if storage and storage == other.untyped_storage().data_ptr():
                number, offset = self.place(other)
                self.base[self.number(x)] = number, offset + x.data_ptr() - other.data_ptr()
                return True
        return False

    def place(self, x: Tensor) -> tuple[int, int]:
        """Number of the tensor whose address ``x`` has, plus a number of bytes."""
        return self.base.get(self.number(x), (self.number(x), 0))

    def in_these_surroundings(self, func: Any, given: Sequence[Tensor]) -> Callable[..., Any]:
        """``func`` of ``given``, with autocast and grad mode as they are here."""
        here = grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        same = here[1:] == self.surroundings[1:] and not any(x.requires_grad for x in given)
        if same or here == self.surroundings:
            return cast(Callable[..., Any], func)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(grad), torch.autocast("cuda", enabled=autocast):
                return func(*args, **kwargs)

        return call

    def launch(self, kernel: Any, grid: Any, args: Any, options: Any) -> None:
        """Launch a kernel, and add a step; see `fastkd._core.operator.launch_kernel`."""
        options = mapped(options, float)  # none may depend on a parameter
        compiled = kernel[grid](*mapped(args, float.__pos__), **options)
        self.starts_kernels = True
        try:
            if compiled is None or self.driver.active.get_current_device() != self.device:
                raise NoPlan("a launch on another device, or of a kernel that isn't compiled")
            names = {name: x for name, x in options.items() if name in kernel.signature.parameters}
            bound = kernel.signature.bind(*args, **names)
            bound.apply_defaults()
            lines: list[str] = []
            used: list[int] = []
            address = functools.partial(self.address, lines, used)
            given = [Text(self.text(x, address)) for x in bound.arguments.values()]
            if not self.read:
                lines.insert(0, f"driver = {self.constant(self.driver)}.active")
                lines.insert(1, f"stream = driver.get_current_stream({self.device})")
            self.read.update(used)
            self.constant(compiled)  # some versions of Triton unload a kernel that is collected
            run, around = _launcher(compiled, (*grid, 1, 1)[:3], given)
            texts = [self.constant(x) if type(x) is list else self.text(x) for x in around]
            lines.append(f"{self.constant(run)}({', '.join(texts)})")
            self.steps.append(_Step(lines, used, [], False))
        except Exception as error:
            self.fail(error)

    def address(self, lines: list[str], used: list[int], x: Tensor) -> str:
        """An expression for the address of ``x``; adds a line that reads it, and whose it is."""
        number, offset = self.place(x)
        if number not in used and number not in self.read:
            lines.append(f"p{number} = t{number}.data_ptr()")
        used.append(number)
        return f"p{number} + {offset}" if offset else f"p{number}"

    def program(self, results: Any) -> Program | None:
        """Python code that repeats the call, if it can, from numbers and tensors."""
        if self.problem is not None or not self.starts_kernels:
            return None
        lines = [f"return {self.text(results)}"]
        kept = set(map(self.number, tensors_in(results)))
        for step in reversed(self.steps):
            if step.droppable and kept.isdisjoint(step.made):
                continue
            # What no later step uses is freed, as in the call as written.
            freed = sorted(i for i in {*step.used, *step.made} - kept if i >= self.inputs)
            lines[:0] = [*step.lines, *(f"t{i} = None" for i in freed)]
            kept.update(step.used)
        names = ", ".join(["n", *(f"t{i}" for i in range(self.inputs))])
        exec("\n    ".join([f"def call({names}):", *lines]), self.constants)
        return cast(Program, self.constants["call"])


def _launcher(compiled: Any, grid: tuple[int, ...], arguments: list[Text]) -> Any:
    """Triton's launcher in C, and its arguments around those of the kernel.

    The launcher's class passes its arguments on to a function in C. They differ between versions of
    Triton, so a call with a substitute for that function records them.
    """
    run, got = compiled.run, []
    around = [*grid, Text("stream"), compiled.function, compiled.packed_metadata]
    around += [None, None, None, *arguments]  # no hooks
    if not callable(getattr(run, "launch", None)) or any(
        getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")
    ):
        return run, around
    probe = copy.copy(run)
    probe.launch = lambda *given: got.append(given)
    probe(*around)
    return run.launch, got[0]
