"""Proof of `fastkd._core.plans` without a GPU; ``python -m tests.kernels.planned`` prints JSON.

In a process of its own, without Triton's interpreter. `FakeGPU` is a GPU for tensors of the CPU,
on which a launch is noted instead of executed: the kernel, the grid, the stream, and each
parameter as bytes. An address is noted as the number of an input or of an allocation of the call,
plus an offset, with a checksum of the memory there. Then the launch writes to the memory that the
call allocated: what the note before says, so that all that follows depends on it. A call from a
plan must leave the same notes, the same loss and the same gradients as the call as written.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import re
import struct
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import fastkd.public  # every loss
from fastkd._core import dispatch, numerics, plans, recording
from tests.fuzz import FUNCTIONS
from tests.support.draw import Draw
from tools import calls
from tools.ptx.compiled import ALLOCATING
from tools.ptx.launches import extent, flat
from tools.ptx.memory import bytes_of

FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
LARGEST = 1 << 20  # entries of a call's inputs and of a module's matrix
SEQUENCES = 1000


NEAR, SIGHTS = plans.NEAR, plans.SIGHTS
plans.NEAR, plans.SIGHTS = 1, 2  # as written, recorded, proved, and a plan from the fourth call on
TO_PLAN = 4
clear = plans.clear_plans


def _plans() -> list[plans.Plan]:
    return list(plans._plans.values())


def _hits() -> int:
    return sum(plan.proved for plan in _plans())


PROVE, COPIES_OF = plans.Plan.prove, plans.copies_of


class FakeGPU:
    """Triton's driver of a GPU that notes its launches."""

    def __init__(self) -> None:
        self.local = threading.local()  # notes and memory of a thread's present call
        self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def start(self, inputs: list[Tensor]) -> None:
        """A new call of this thread."""
        self.local.notes, self.local.memory, self.local.numbers = [], [], {}
        self.local.copies = {}  # number of a memory → that of which it is a copy
        for x in inputs:
            self.note_memory(x)
        self.local.inputs = len(self.local.memory)

    def note_memory(self, x: Tensor) -> None:
        known = self.local.memory
        if known and known[-1][0]() is x:  # PyTorch calls what stands in its place once more
            return
        self.local.memory.append((weakref.ref(x), *extent(x)))

    def allocating(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            x = function(*args, **kwargs)
            if x.numel() and type(x) is Tensor and x.is_cpu and not x.is_inference():
                start, stop = extent(x)
                bytes_of((start, stop))[:] = 255
            if getattr(self.local, "memory", None) is not None:
                self.note_memory(x)
            return x

        return call

    def number(self, memory: int | None) -> Any:
        """Of an input; or of memory by its first use, as a plan leaves out what isn't used."""
        memory = self.local.copies.get(memory, memory)
        if memory is None or memory < self.local.inputs:
            return memory
        return self.local.numbers.setdefault(memory, f"{len(self.local.numbers)}")

    def place(self, address: int) -> tuple[int | None, int]:
        """Which memory an address is in, the newest first, and where."""
        for number in reversed(range(len(self.local.memory))):
            reference, start, stop = self.local.memory[number]
            x = reference()
            if x is not None and start <= address < max(stop, start + 1):
                return number, address - start
        return None, 0

    def launched(self, name: str, signature: dict[str, Any], before: Any, values: Any) -> None:
        if getattr(self.local, "memory", None) is None:
            return
        parameters, written = [], []
        for value, kind in zip(flat(values), flat(list(signature.values())), strict=True):
            if kind == "constexpr":
                continue
            if not kind.startswith("*"):
                parameters.append(struct.pack(FORMATS[kind], value).hex())
                continue
            address = value if isinstance(value, int) else value.data_ptr()
            number, offset = self.place(address)
            assert address == 0 or address % 16 == 0 or kind == "*fp32", (name, kind, address % 16)
            sum_of_bytes = 0
            if number is not None:
                _, start, stop = self.local.memory[number]
                if start < stop:
                    sum_of_bytes = zlib.crc32(bytes_of((start, stop)))
                    if number >= self.local.inputs and kind in ("*fp32", "*bf16", "*fp16"):
                        written.append((start, stop))
            parameters.append((self.number(number), offset, sum_of_bytes))
        note = name, *before[:4], tuple(parameters)
        self.local.notes.append(note)
        value = 0x30 + zlib.crc32(repr(note).encode()) % 16  # of every byte: a small number
        for part in written:
            bytes_of(part)[:] = value

    @contextlib.contextmanager
    def apart(self, notes: int, numbers: dict[int, str]) -> Iterator[None]:
        """Context in which launches are noted as if only the first ``notes`` had been."""
        kept = self.local.notes, self.local.numbers
        self.local.notes, self.local.numbers = kept[0][:notes], numbers
        try:
            yield
        finally:
            self.local.notes, self.local.numbers = kept

    def prove(self, plan: plans.Plan, written: Any, repeated: Any) -> Any:
        """`plans.Plan.prove`, in which the program's launches don't count."""
        if getattr(self.local, "memory", None) is None:
            return PROVE(plan, written, repeated)
        notes, numbers = len(self.local.notes), {**self.local.numbers}

        def of_program() -> Any:
            with self.apart(notes, numbers):
                return repeated()

        return PROVE(plan, written, of_program)

    def copies_of(self, saved: Iterable[Tensor | None]) -> list[Tensor | None]:
        """`plans.copies_of`, with notes as of the memory that was copied."""
        copies = COPIES_OF(saved)
        for x, copy_of_x in zip(saved, copies, strict=True):
            if x is copy_of_x or x is None or getattr(self.local, "memory", None) is None:
                continue
            memory, _ = self.place(x.data_ptr())
            if memory is not None:
                self.note_memory(copy_of_x)
                self.local.copies[len(self.local.memory) - 1] = memory
        return copies

    def compile(
        self, kernel: JITFunction, key: Any, signature: Any, device: Any, *rest: Any
    ) -> Any:
        compiled = _Compiled(kernel, signature, self)
        kernel.device_caches[device][0][key] = compiled
        return compiled

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, fastkd takes CPU tensors for those of this GPU."""
        with contextlib.ExitStack() as stack:
            for target, name, replacement in (
                (triton.runtime.driver, "_active", self),
                (JITFunction, "_do_compile", lambda *args: self.compile(*args)),
                (dispatch, "triton_devices", lambda: ("cuda", "cpu")),
                (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
                (plans, "on_gpu", lambda x: True),
                (plans.Plan, "prove", lambda *given: self.prove(*given)),
                (plans, "copies_of", self.copies_of),
                (calls, "DEVICE", torch.device("cpu")),
                *((module, "values_readable", lambda x: False) for module in _readers()),
                *((place, name, self.allocating(getattr(place, name)))
                  for place, name in ALLOCATING),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(target, name, replacement))
            yield


class _Compiled:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, kernel: JITFunction, signature: Any, device: FakeGPU) -> None:
        self.name, self.signature, self.device = kernel.__name__, signature, device

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: Any, *rest: Any) -> None:
        values = list(rest[5:])  # after function, metadata and hooks
        self.device.launched(self.name, self.signature, (x, y, z, stream), values)


def _readers() -> list[Any]:
    modules = [x for name, x in sys.modules.items() if name.startswith("fastkd")]
    return [x for x in modules if hasattr(x, "values_readable")]


class Subject:
    """A call that can be made again with other inputs: ``make`` returns inputs, ``of`` a loss."""

    def __init__(self, make: Callable[[], Any], of: Callable[..., Any], no_grad: bool = False):
        self.make, self.of, self.no_grad = make, of, no_grad

    def results(self, inputs: dict[str, Any]) -> list[Tensor | None]:
        """The loss and its gradients."""
        with torch.set_grad_enabled(not self.no_grad):
            loss = self.of(**inputs)
        learn = [x for x in dict.fromkeys(tensors_in(inputs)) if x.requires_grad]
        if not (learn and loss.requires_grad):
            return [loss]
        upstream = torch.full_like(loss, 0.5)
        return [loss, *torch.autograd.grad(loss, learn, upstream, allow_unused=True)]


def tensors_in(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return tensors_in(list(x.values()))
    if hasattr(x, "__dataclass_fields__"):
        return tensors_in(vars(x))
    return [y for item in x for y in tensors_in(item)] if isinstance(x, (list, tuple)) else []


def outcome(device: FakeGPU, subject: Subject, inputs: dict[str, Any]) -> Any:
    """What a call leaves: notes, loss and gradients, each as bytes and by its memory."""
    device.start(tensors_in(inputs))
    results = subject.results(inputs)
    described = [None if x is None else _described(device, x) for x in results]
    notes = device.local.notes
    device.local.memory = None
    return notes, described


def _described(device: FakeGPU, x: Tensor) -> Any:
    values = x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    memory, offset = device.place(x.data_ptr())
    return (
        device.number(memory),
        offset,
        x.shape,
        x.stride(),
        x.dtype,
        x.requires_grad,
        zlib.crc32(values),
    )


def as_written(device: FakeGPU, subject: Subject, inputs: dict[str, Any]) -> Any:
    with mock.patch.object(plans, "ENABLED", False):
        return outcome(device, subject, inputs)


# --- Every call of tools/calls -------------------------------------------------------------------


def small(call: calls.Call) -> bool:
    listed = (x if isinstance(x, list) else [x] for x in call.inputs.values())
    shapes = [x.shape for xs in listed for x in xs if isinstance(x, calls.Made)]
    matrices = call.options.get("in_dim", 0) ** 2  # of an OrthogonalProjection
    return sum(torch.Size(shape).numel() for shape in shapes) + matrices <= LARGEST


def subjects(every: int) -> Iterator[tuple[str, Subject]]:
    """The Triton path of the losses' calls, every so many."""
    for file in calls.FILES:
        if file in ("cca", "linalg", "token_log_probs"):
            continue
        for number, call in enumerate(calls.of(file)):
            names = call.of.__init__ if isinstance(call.of, type) else call.of
            code = getattr(names, "__wrapped__", names).__code__
            if number % every or not small(call) or "backend" not in code.co_varnames:
                continue
            if call.of.__name__ in ("linear_soft_target_loss", "of_tokens"):
                continue  # not planned: their products take longer than the host
            yield str(call), _subject(call._replace(options=call.options | {"backend": "triton"}))


def _subject(call: calls.Call) -> Subject:
    def make() -> dict[str, Any]:
        inputs = {name: calls.made(x) for name, x in call.inputs.items()}
        for x in tensors_in(inputs):
            if not x.is_floating_point():
                x.random_(0, 2)
        return inputs

    module: list[Any] = []

    def run(**inputs: Any) -> Tensor:
        with call.multiplying():
            if not isinstance(call.of, type):
                result = call.of(**inputs, **call.options)
            else:
                module[:] = module or [call.module()]
                result = module[0](**inputs)
        return result[0] if isinstance(result, tuple) else result

    return Subject(make, run)


def compare_calls(device: FakeGPU, every: int) -> dict[str, Any]:
    """Calls whose parameters, loss or gradients differ with a plan, at two sets of addresses."""
    wrong, refused, count = [], [], 0
    for name, subject in subjects(every):
        clear()
        inputs = subject.make()
        try:
            as_written(device, subject, inputs)
        except (dispatch.BackendUnavailable, ValueError):
            continue
        count += 1
        # New, recorded, proved, repeated (the backward pass proved), repeated at other addresses.
        others = subject.make()
        for given in (*[inputs] * TO_PLAN, others, inputs):
            if as_written(device, subject, given) != outcome(device, subject, given):
                wrong.append(name)
                break
        if not _hits():
            refused.append(name)
    return {"calls": count, "wrong": wrong[:10], "refused": refused}


# --- The key -------------------------------------------------------------------------------------


def changed_calls() -> dict[str, Callable[[], Any]]:
    """A call, and the same call with one element of its key changed at a time."""
    x, y = torch.randn(4, 6, 16).requires_grad_(), torch.randn(4, 6, 16)
    mask = torch.ones(4, 6, dtype=torch.bool)
    loss = functools.partial(fastkd.hidden_state_loss, backend="triton")
    wide = torch.randn(4, 6, 32)[..., :16]
    moved = torch.empty(4 * 6 * 16 + 1)[1:].view(4, 6, 16)
    with torch.inference_mode():
        inferred = torch.randn(4, 6, 16)

    def within(context: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            with context():
                return loss(x, y, mask)

        return call

    @contextlib.contextmanager
    def autocast(dtype: torch.dtype) -> Iterator[None]:  # as a GPU's; torch.autocast requires one
        before = torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        yield
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)

    @contextlib.contextmanager
    def restored(set_to: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
        set_to(value)
        try:
            yield
        finally:
            set_to(before)

    def deterministic() -> Any:
        return restored(torch.use_deterministic_algorithms, False, True)

    precision, default = torch.set_float32_matmul_precision, torch.set_default_dtype
    return {
        "base": lambda: loss(x, y, mask),
        "function": lambda: fastkd.cos_nce_loss(x, y, mask=mask, backend="triton"),
        "option": lambda: loss(x, y, mask, kind="cosine"),
        "option given": lambda: loss(x, y, mask, kind="mse"),
        "number": lambda: loss(x, y, mask, beta=1.0),
        "its type": lambda: loss(x, y, mask, beta=1),
        "its sign": lambda: loss(x, y, mask, beta=-0.0),
        "zero": lambda: loss(x, y, mask, beta=0.0),
        "an argument": lambda: loss(x, y),
        "shape": lambda: loss(x.view(6, 4, 16), y.view(6, 4, 16), mask.view(6, 4)),
        "stride": lambda: loss(x, wide, mask),
        "dtype": lambda: loss(x.bfloat16(), y.bfloat16(), mask),
        "dtype of the mask": lambda: loss(x, y, mask.int()),
        "requires_grad": lambda: loss(x.detach(), y, mask),
        "an inference tensor": lambda: loss(x, inferred, mask),
        "address": lambda: loss(x, moved, mask),
        "one storage": lambda: loss(x, x.detach(), mask),
        "one tensor": lambda: loss(y, y, mask),
        "grad mode": within(torch.no_grad),
        "precision": within(lambda: restored(precision, "high", "highest")),
        "deterministic": within(deterministic),
        "default dtype": within(lambda: restored(default, torch.float64, torch.float32)),
        "autocast": within(lambda: autocast(torch.bfloat16)),
        "its dtype": within(lambda: autocast(torch.float16)),
    }


def hits(device: FakeGPU) -> list[str]:
    """Changed calls that hit the plan of another one; each hits its own."""
    clear()
    made, wrong = changed_calls(), []
    for name, call in made.items():
        before = _hits()
        for _ in range(TO_PLAN):
            call()
        if _hits() == before:
            wrong.append(name)
    before = len(_plans())
    device.device = 1
    made["base"](), made["base"]()
    device.device = 0
    return wrong + ["current device"] * (len(_plans()) == before)


# --- Random sequences ----------------------------------------------------------------------------

KINDS = (
    "fcd", "relation", "cos_nce", "cos_nce_module", "hidden_states", "layer_norm", "knn",
    "soft_targets", "top_k", "matched_tokens", "attention", "cos_nce_layers",
)  # fmt: skip


SIDES = "student", "teacher"


class Sequence:
    """Two random calls that alternate, in memory that is freed and used again."""

    def __init__(self, seed: int, among: tuple[str, ...] = KINDS) -> None:
        self.random = random.Random(seed)
        names = self.random.sample(among, 2)
        self.cases = [
            (name, FUNCTIONS[name](Draw(2 * seed + i, "triton"))) for i, name in enumerate(names)
        ]
        self.kept: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def made(self, x: Tensor, learns: bool) -> Tensor:
        """The tensor with its strides, in new memory that may not be aligned."""
        shift = self.random.choice([0, 0, 1])
        flat = x.new_empty(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 2)
        new = flat.as_strided(x.shape, x.stride(), shift) if x.numel() else x.clone()
        return new.copy_(x).detach().requires_grad_(learns)

    def call(self) -> tuple[Subject, dict[str, Any], str]:
        name, case = self.random.choice(self.cases)
        learns = self.random.random() < 0.8
        if self.kept[name] and self.random.random() < 0.3:
            inputs = self.random.choice(self.kept[name])
        else:
            inputs = {n: self.made(x, learns) for n, x in case.learning.items()}
            inputs |= {n: self.made(x, False) for n, x in case.given.items()}
            x, y = (inputs.get(side, self.made(torch.ones(1), False)) for side in SIDES)
            if (x.shape, x.dtype) == (y.shape, y.dtype) and self.random.random() < 0.2:
                inputs |= {SIDES[1]: x.detach()} if SIDES[1] in inputs else {}
            self.kept[name] = [*self.kept[name][-1:], inputs]
        no_grad = self.random.random() < 0.15
        precision = "high" if self.random.random() < 0.2 else "highest"

        def run(**given: Any) -> Tensor:
            torch.set_float32_matmul_precision(precision)
            return case.call(**given, **case.options)

        return Subject(dict, run, no_grad), inputs, name


def differs(device: FakeGPU, seed: int, among: tuple[str, ...] = KINDS) -> str | None:
    """What a sequence does otherwise with plans, if anything."""
    sequence = Sequence(seed, among)
    for number in range(10):
        subject, inputs, name = sequence.call()
        for _ in range(sequence.random.choice([1, 5])):
            try:
                right = as_written(device, subject, inputs)
            except ValueError:  # such as documents, whose ids a GPU doesn't read
                break
            if right != outcome(device, subject, inputs):
                return f"sequence {seed}, call {number}: {name}"
        del subject, inputs
    return None


def sequences(device: FakeGPU, numbers: range) -> list[str]:
    clear()
    found = [differs(device, seed) for seed in numbers]
    return [x for x in found if x]


def threads(device: FakeGPU, numbers: range) -> list[str]:
    """The same in four threads, which share plans. Plans stay on: their switch is global."""
    clear()
    expected = {}
    for seed in numbers:
        expected[seed] = _all_outcomes(device, seed)
    clear()
    wrong: list[str] = []

    def work(own: range) -> None:
        torch.use_deterministic_algorithms(True)
        for seed in own:
            if _all_outcomes(device, seed) != expected[seed]:
                wrong.append(f"sequence {seed} in a thread")

    started = [threading.Thread(target=work, args=(numbers,)) for _ in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return wrong


def _all_outcomes(device: FakeGPU, seed: int) -> Any:
    subject, inputs, _ = _one_of(seed)
    return [outcome(device, subject, inputs)[0] for _ in range(5)]


def _one_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    B = 4 + seed % 3
    student = torch.randn(B, 5, 16, generator=generator).requires_grad_()
    teacher = torch.randn(B, 5, 16, generator=generator)
    mask = torch.rand(B, 5, generator=generator) < 0.7 if seed % 2 else None
    inputs = {"student": student, "teacher": teacher, "mask": mask}
    of = (fastkd.relation_loss, fastkd.hidden_state_loss, fastkd.cos_nce_loss)[seed % 3]
    return Subject(dict, functools.partial(of, backend="triton")), inputs, of.__name__


# --- Behaviour -----------------------------------------------------------------------------------


def behaviours(device: FakeGPU) -> list[str]:
    """What a planned call does otherwise than the call as written, besides computing."""
    found = []
    for name, check in CHECKS.items():
        clear()
        try:
            assert check() is not False
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def _pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, 16).requires_grad_(), torch.randn(4, 6, 16)


def _loss(x: Tensor, y: Tensor, n: int = 1) -> Tensor:
    for _ in range(n):
        loss = fastkd.relation_loss(x, y, backend="triton")
    return loss


@check
def derivatives() -> None:
    """A second backward pass of a kept graph, a third that is refused, and second derivatives."""
    x, y = _pair()
    loss = _loss(x, y, 4)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0].clone()
    again = torch.autograd.grad(loss, x)[0]
    assert _hits() and torch.equal(first.isnan(), again.isnan())
    for of, words, options in (
        (loss, "second time", {}),
        (_loss(x, y, 4), "first derivatives only", {"create_graph": True}),
    ):
        try:
            torch.autograd.grad(of, x, **options)
        except RuntimeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error of {words}")


@check
def saved_tensor_hooks() -> None:
    x, y = _pair()
    counts, moved = [], []

    def packed(saved: Tensor) -> Tensor:
        counts[-1] += 1
        return saved

    for _ in range(4):
        counts.append(0)
        hooks = packed, lambda saved: moved.append(saved) or saved.clone()
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            loss = _loss(x, y)
        torch.autograd.grad(loss, x)
    assert _hits() and len(set(counts)) == 1 and counts[0] > 0 and len(moved) == sum(counts), counts


@check
def recomputed_and_compiled_backward_passes() -> None:
    from torch._dynamo.compiled_autograd import _enable
    from torch.utils.checkpoint import checkpoint

    x, y = _pair()
    for _ in range(4):
        checkpoint(lambda x: _loss(x * 1.0, y), x, use_reentrant=False).backward()
    assert _hits()
    clear()
    for _ in range(4):
        with _enable(torch.compile(backend="eager")):
            _loss(x, y).backward()
    assert _hits()


@check
def names_in_profiles_and_graphs() -> None:
    x, y = _pair()
    with torch.autograd.detect_anomaly(check_nan=False):
        names = {type(_loss(x, y).grad_fn).__name__ for _ in range(4)}
        torch.autograd.grad(_loss(x, y), x)
    assert names == {"_TritonRelationsBackward"}, names
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        _loss(x, y)
    assert _hits() and "_TritonRelations" in [event.name for event in profile.events()]


@check
def gradients_of_a_part() -> None:
    x, y = torch.randn(20, 16).requires_grad_(), torch.randn(20, 16).requires_grad_()
    for wanted in ([x, y], [x], [y], [x, y]) * 3:
        loss = fastkd.layer_norm_mse(x, y, backend="triton")
        assert all(g.shape == x.shape for g in torch.autograd.grad(loss, wanted))
    assert _hits()


@check
def modes_hooks_and_the_switch() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton import knobs

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Other(Tensor):
        pass

    x, y = _pair()
    _loss(x, y, TO_PLAN)
    (plan,) = _plans()
    plan.program = used = mock.Mock(wraps=plan.program)
    hook = mock.Mock()
    with Mode():
        _loss(x, y)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        _loss(x, y)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    with mock.patch.object(plans, "ENABLED", False):
        _loss(x, y)
    _loss(x.detach().as_subclass(Other), y)
    assert len(_plans()) == 1 and not used.called
    with torch.device("cpu"):
        _loss(x, y)
    assert used.called


@check
def values_and_random_numbers_are_not_repeated() -> None:
    functions = [
        lambda x, mask: x.sum() * mask.nonzero().shape[0],
        lambda x, mask: x.sum() * len(x[mask]),
        lambda x, mask: x.sum() * len(torch.unique(mask.long() * torch.arange(8))),
        lambda x, mask: x.sum() * torch.rand(()),
    ]
    x, y = torch.ones(8, 6, 16), torch.ones(8, 6, 16)
    for function in functions:
        clear()
        call = plans.planned(lambda x, y, mask: (function(x, mask), _loss(x, y)))  # noqa: B023
        for n in (3, 3, 3, 5, 7):
            mask, seed = torch.arange(8) < n, torch.get_rng_state()
            found = call(x, y, mask)[0]
            torch.set_rng_state(seed)
            assert torch.equal(found, function(x, mask)), n
        assert sum(plan.program is None for plan in _plans()) == 1


@check
def a_record_keeps_its_kernels() -> None:
    """Triton 3.8 unloads a kernel that is collected, and a launch takes its function's address."""
    _loss(*_pair(), TO_PLAN)
    found = (x for x in gc.get_objects() if type(x) is dict and "torch" in x)
    assert any(type(y) is _Compiled for x in found for y in x.values())


@contextlib.contextmanager
def _switched_off(words: str) -> Iterator[None]:
    """Context in which plans are switched off, with one warning; afterwards they are on again."""
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            yield
        assert [words in str(x.message) for x in given] == [True], [str(x.message) for x in given]
        assert words in (plans.why_off() or "") and not plans.ENABLED
    finally:
        plans.ENABLED, plans._problem = True, None


def _planted(pattern: str, change: Callable[[re.Match[str]], str]) -> Any:
    """Patch of the first line of a program that has the pattern."""
    program = plans.Recording.program

    def faulty(recording: Any, *given: Any) -> Any:
        changed = 0
        for step in recording.steps:
            for i, line in enumerate(step.lines):
                if not changed:
                    step.lines[i], changed = re.subn(pattern, change, line, count=1)
        return program(recording, *given)

    return mock.patch.object(plans.Recording, "program", faulty)


FAULTS = {
    "a wrong stride": (r"\((\d+), (\d+), 1\), c", lambda m: f"({m[1]}, 1, {m[2]}), c"),
    "an alias": (r"(stream, .*)\bp[2-9]\b", lambda m: f"{m[1]}p1"),
    "a constant that isn't one": (r"(p\d+, )(\d+)\b", lambda m: f"{m[1]}{int(m[2]) + 1}"),
    "a name that is gone": (r"get_current_stream", lambda m: "get_stream"),
}


@check
def a_wrong_program_is_never_used() -> None:
    device = vars(recording.private())["driver"].active
    x, y = torch.randn(4, 6, 16).requires_grad_(), torch.randn(4, 6, 16)
    subject = Subject(dict, functools.partial(fastkd.cos_nce_loss, backend="triton"))
    inputs = {"student": x, "teacher": y}
    right = as_written(device, subject, inputs)
    for name, (pattern, change) in FAULTS.items():
        clear()
        words = "raised AttributeError" if "gone" in name else "gave other bits"
        with _planted(pattern, change), _switched_off(words):
            for _ in range(TO_PLAN + 2):
                assert outcome(device, subject, inputs) == right, name


@check
def an_error_of_recording_switches_plans_off() -> None:
    gone = mock.patch.object(plans.Recording, "place", side_effect=AttributeError("gone"))
    with gone, _switched_off("can't be recorded: AttributeError"):
        _loss(*_pair(), TO_PLAN)


@check
def private_names() -> None:
    for path in recording.PRIVATE.values():
        module, names = path.split(":")
        *owners, name = names.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        recording.private.cache_clear()
        gone = mock.patch.object(owner, name)
        gone.start()
        delattr(owner, name)
        try:
            reason, covered = plans.why_off(), plans._surroundings()
        finally:
            gone.stop()
            recording.private.cache_clear()
        assert reason == f"{module}.{names} is missing" and covered is None, (path, reason)
    assert plans.why_off() is None


@check
def a_capture_uses_proved_plans_only() -> None:
    x, y = _pair()
    captures = mock.patch.object(plans, "_capturing", lambda: True)
    for calls_before in range(1, TO_PLAN):
        clear()
        _loss(x, y, calls_before)
        known = [plan.differs for plan in _plans()]
        with captures:
            _loss(x, y, 3)
        assert known == [plan.differs for plan in _plans()] and not _hits()
    _loss(x, y, TO_PLAN)
    (plan,) = _plans()
    plan.program = used = mock.Mock(wraps=plan.program)
    with captures:
        _loss(x, y)
    assert used.called


@check
def ragged_batches_flush_no_count_and_record_nothing() -> None:
    with mock.patch.multiple(plans, NEAR=NEAR, SIGHTS=SIGHTS, WINDOW=200):
        x, y = torch.randn(150, 1, 16), torch.randn(150, 1, 16)
        for _ in range(4):
            _loss(*_pair(), 1)
            for rows in range(1, 150):
                _loss(x[:rows], y[:rows])
        assert not _plans()
        _loss(*_pair(), 12)
        assert _hits() == 1
        for rows in range(450):  # as many sights drop a plan without a call
            _loss(x[: rows % 149 + 1], y[: rows % 149 + 1])
        _loss(x, y, 200)
        assert len(_plans()) <= 1


@check
def a_denominator_that_changes_and_a_match_have_one_plan() -> None:
    z, w = torch.randn(5, 9).requires_grad_(), torch.randn(5, 9)
    match = fastkd.VocabularyMatch(torch.arange(4), torch.arange(4).flip(0), 9, 9)
    for vocabulary in (None, match):
        clear()
        for n in range(1, 8):
            options = {"denominator": n / 2, "vocabulary": vocabulary, "backend": "triton"}
            found = fastkd.soft_target_loss(z, w, **options)
            torch.autograd.grad(found, z)
        assert len(_plans()) == _hits() == 1, vocabulary


@check
def fork() -> None:
    x, y = _pair()
    _loss(x, y, TO_PLAN)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            empty = not plans._plans
            _loss(x.detach(), y, 4)
            code = 0 if empty and _hits() else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0 and _hits()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of so many calls, one")
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    given = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    numerics_modules = _readers()
    assert numerics in numerics_modules
    device = FakeGPU()
    with device.running():
        report = {
            "hits": hits(device),
            "calls": compare_calls(device, given.every),
            "sequences": sequences(device, range(given.sequences)),
            "threads": threads(device, range(12)),
            "off": plans.why_off(),
            "behaviours": behaviours(device),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
