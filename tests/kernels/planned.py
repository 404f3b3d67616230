"""Proof of `fastkd._core.plans` without a GPU; ``python -m tests.kernels.planned`` prints JSON.

In a process of its own, without Triton's interpreter. `FakeGPU` is a GPU for tensors of the CPU, on
which a launch computes nothing: it fills the memory that its call allocated with numbers that
depend on the kernel, the grid, the stream, and every parameter, of a pointer on the memory there
(of an input, its first element). So a loss and its gradients have other bits where a launch has
another parameter. A call from a plan must give the bits of the call as written.
"""

import argparse
import contextlib
import ctypes
import functools
import inspect
import itertools
import json
import math
import os
import pkgutil
import re
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import fastkd.public  # every loss
from fastkd._core import dispatch, plans, recording
from fastkd._core.recording import mapped, tensors_in
from tests.support.compare import raises
from tools import calls
from tools.host_time.calls import Stub
from tools.ptx.compiled import ALLOCATING
from tools.ptx.launches import extent, flat
from tools.ptx.memory import bytes_of

HOOK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
# Of a parameter, or of a pointer's element, and how a launch writes a number between 1 and 2.
FORMATS = dict(
    i1="b", u8="B", i8="b", i16="h", i32="i", i64="q", bf16="e", fp16="e", fp32="f", fp64="d"
)
WRITTEN = dict(
    fp32=(np.uint32, 0x3F800000, 23), bf16=(np.uint16, 0x3F80, 7), fp16=(np.uint16, 0x3C00, 10)
)
LARGEST = 1 << 20  # entries of a call's inputs and of a module's matrix
SIGHTS = plans.SIGHTS
# As written, recorded, proved, and a plan from the fourth call on.
plans.SIGHTS = 2
TO_PLAN = 4
clear, COPY = plans.clear_plans, plans._copy
COMPILE = JITFunction._do_compile


def _plans() -> list[plans.Plan]:
    """Plans of forward passes."""
    return [x for key, found in plans._plans.items() for x in found if "_gradients" not in str(key)]


def _hits() -> int:
    return sum(plan.proved is not None for plan in _plans())


class _Local(threading.local):
    memory: list[Any] | None = None  # of this thread's present call


class _Compiled(SimpleNamespace):
    """Stands for a compiled kernel."""

    function = packed_metadata = None
    launch_metadata = staticmethod(lambda *_: None)


class FakeGPU:
    """Triton's driver of a GPU that writes what its launches depend on."""

    def __init__(self) -> None:
        self.device, self.local = 0, _Local()

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def allocating(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            x = function(*args, **kwargs)
            if x.numel() and type(x) is Tensor and x.is_cpu and not x.is_inference():
                bytes_of(extent(x))[:] = 0
                if self.local.memory is not None:
                    self.local.memory.append((weakref.ref(x), *extent(x)))
            return x

        return call

    def launched(self, name: str, signature: dict[str, Any], before: Any, values: Any) -> None:
        if self.local.memory is None:
            return
        read, written = [name.encode(), repr(before).encode()], []
        for value, kind in zip(flat(values), flat(list(signature.values())), strict=True):
            if kind == "constexpr":
                continue
            if not kind.startswith("*"):
                read.append(struct.pack(FORMATS[kind], value))
                continue
            address = value if isinstance(value, int) else value.data_ptr()
            assert address % 16 == 0 or kind == "*fp32", (name, kind, address % 16)
            size, stop = struct.calcsize(FORMATS[kind[1:]]), self.new_until(address)
            length = stop - address if stop else size if address else 0
            read.append(ctypes.string_at(address, length))
            if stop and kind[1:] in WRITTEN:
                written.append((address, stop - length % size, WRITTEN[kind[1:]]))
        number = zlib.crc32(b"|".join(read))
        for start, stop, (integer, one, bits) in written:
            number = number * 48271 % 2147483647
            values = np.arange((stop - start) // integer().itemsize) * 40503 + number
            bytes_of((start, stop))[:] = (one | values % 2**bits).astype(integer).view(np.uint8)

    def new_until(self, address: int) -> int:
        """End of the memory that the call allocated there, or 0."""
        found = (b for x, a, b in self.local.memory if x() is not None and a <= address < b)
        return next(found, 0)

    def copy(self, x: Tensor | None) -> Tensor | None:
        """`plans._copy`: a copy of the call's own memory is its own, too."""
        y = COPY(x)
        if x is not None and self.local.memory and self.new_until(x.data_ptr()):
            self.local.memory.append((weakref.ref(y), *extent(y)))
        return y

    def compile(self, kernel: JITFunction, key: Any, signature: Any, device: Any, *_: Any) -> Any:
        def run(x: int, y: int, z: int, stream: Any, *rest: Any) -> None:
            values = list(rest[5:])  # after function, metadata and hooks
            self.launched(kernel.__name__, signature, (x, y, z, stream), values)

        kernel.device_caches[device][0][key] = _Compiled(run=run)
        return kernel.device_caches[device][0][key]

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
                (plans, "_copy", self.copy),
                (calls, "DEVICE", torch.device("cpu")),
                *((module, "values_readable", lambda x: False)
                  for name, module in list(sys.modules.items())
                  if name.startswith("fastkd") and hasattr(module, "values_readable")),
                *((place, name, self.allocating(getattr(place, name)))
                  for place, name in ALLOCATING),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(target, name, replacement))
            yield


class StubGPU(FakeGPU, Stub):
    """`FakeGPU` behind Triton's compiler and launcher: a stub of libcuda passes launches on."""

    def __init__(self) -> None:
        FakeGPU.__init__(self)
        Stub.__init__(self)
        self.kernels: dict[int, Any] = {}  # by the function that libcuda knows
        library, self.hook = ctypes.CDLL("libcuda.so.1"), HOOK(self.on_launch)
        address = ctypes.cast(self.hook, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(library, "stub_on_launch").value = address

    def compile(self, kernel: JITFunction, *given: Any) -> Any:
        compiled = COMPILE(kernel, *given)
        compiled._init_handles()
        self.kernels[compiled.function] = compiled
        return compiled

    def on_launch(self, configuration: int, function: int, parameters: Any) -> None:
        kernel = self.kernels[function]
        kinds = [x for x in flat(list(kernel.src.signature.values())) if x != "constexpr"]
        formats = ["P" if kind.startswith("*") else FORMATS[kind] for kind in kinds]
        values = [_read(parameters[i], form)[0] for i, form in enumerate(formats)]
        before = _read(configuration, "7IP")  # CUlaunchConfig: grid, block, shared memory, stream
        self.launched(kernel.name, dict(enumerate(kinds)), before, values)


def _read(address: int, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))


Subject = Callable[..., Any]  # of inputs by name, which returns a loss


def outcome(device: FakeGPU, subject: Subject, inputs: dict[str, Any]) -> list[Any]:
    """What a call gives: bytes and layout of the loss and of the gradients."""
    device.local.memory = []
    try:
        loss = subject(**inputs)
        found, learn = [loss], [x for x in dict.fromkeys(tensors_in(inputs)) if x.requires_grad]
        if learn and loss.requires_grad:
            half = torch.full_like(loss, 0.5)
            found += torch.autograd.grad(loss, learn, half, allow_unused=True)
        return [None if x is None else _described(x) for x in found]
    finally:
        device.local.memory = None


def _described(x: Tensor) -> Any:
    values = x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    return x.shape, x.stride(), x.dtype, x.requires_grad, values


def as_written(device: FakeGPU, subject: Subject, inputs: dict[str, Any]) -> list[Any]:
    with mock.patch.object(plans, "ENABLED", False):
        return outcome(device, subject, inputs)


def equal(device: FakeGPU, subject: Subject, *given: dict[str, Any]) -> bool:
    """Whether calls one after the other give what they give as written."""
    right = {id(x): as_written(device, subject, x) for x in given}
    return all(outcome(device, subject, x) == right[id(x)] for x in given)


def chosen_calls(every: int, first: int) -> Iterator[calls.Call]:
    """The Triton path of the losses' calls in tools/calls, every so many."""
    # Not planned: products that take longer than the host.
    products = "linear_soft_target_loss", "of_tokens"
    for file in sorted(calls.LOSSES.keys() - {"cca", "linalg", "token_log_probs"}):
        for call in itertools.islice(calls.of(file), first % every, None, every):
            if any(isinstance(x, functools.partial) for x in call.inputs.values()):
                continue
            shapes = [made.shape for x in call.inputs.values() for made in calls.each_made(x)]
            shapes += [[x or 0] * 2 for name, x in call.options.items() if name.endswith("_dim")]
            small = sum(map(math.prod, shapes)) <= LARGEST
            takes_backend = "backend" in inspect.signature(call.of).parameters
            if small and takes_backend and call.of.__name__ not in products:
                yield call._replace(options=call.options | {"backend": "triton"})


def _made(call: calls.Call) -> dict[str, Any]:
    inputs = {name: calls.made(x) for name, x in call.inputs.items()}
    for x in tensors_in(inputs):
        with torch.no_grad():
            x.normal_() if x.is_floating_point() else x.random_(0, 2)
    return inputs


def _subject(call: calls.Call) -> Subject:
    """The call, of one module where it is of a class."""
    module = functools.cache(call.module)

    def run(**inputs: Any) -> Tensor:
        with call.multiplying():
            of_class = isinstance(call.of, type)
            result = module()(**inputs) if of_class else call.of(**inputs, **call.options)
        return result[0] if isinstance(result, tuple) else result

    return run


def _moved(x: Tensor) -> Tensor:
    """A dense tensor in memory that isn't aligned."""
    if not x.is_contiguous():
        return x
    moved = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    return moved.detach().requires_grad_(x.requires_grad)


def compare_calls(device: FakeGPU, every: int, first: int = 0) -> tuple[int, list[str]]:
    """Number of calls, and those that have no plan, or other results with one."""
    wrong, count = [], 0
    for call in chosen_calls(every, first):
        clear()
        run, inputs = _subject(call), _made(call)
        try:
            as_written(device, run, inputs)
        except (dispatch.BackendUnavailable, ValueError):
            continue
        first, second, *_ = [*tensors_in(inputs), None, None]
        alike = second is not None and (first.shape, first.dtype) == (second.shape, second.dtype)
        shared = first.detach() if alike else second
        of_one = mapped(inputs, lambda x, a=second, b=shared: b if x is a else x, Tensor)
        count += 1
        other = [inputs, mapped(inputs, _moved, Tensor), of_one][count % 3]
        # New, recorded, proved, repeated (the backward pass proved), repeated at other addresses.
        same = equal(device, run, *[inputs] * TO_PLAN, _made(call), inputs) and _hits()
        with torch.set_grad_enabled(count % 3 != 0):
            if not (same and equal(device, run, *[other] * TO_PLAN, inputs)):
                wrong.append(str(call))
    return count, wrong


@contextlib.contextmanager
def _set(setter: Callable[[Any], Any], inside: Any, after: Any) -> Iterator[None]:
    setter(inside)
    try:
        yield
    finally:
        setter(after)


def _set_autocast(dtype: torch.dtype | None) -> None:  # as a GPU's; torch.autocast requires one
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or torch.float16)


def behaviours(device: FakeGPU, chosen: str = "check_") -> list[str]:
    """What planned calls do otherwise than calls as written."""
    found = []
    for name, function in list(globals().items()):
        if name.startswith(chosen):
            clear()
            try:
                function(device)
            except (Exception, pytest.fail.Exception) as error:
                found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def _pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, 16).requires_grad_(), torch.randn(4, 6, 16)


def _loss(x: Tensor, y: Tensor, n: int = 1) -> Tensor:
    for _ in range(n):
        loss = fastkd.relation_loss(x, y, backend="triton")
    return loss


def check_backward_passes(device: FakeGPU) -> None:
    x, y = _pair()
    loss = _loss(x, y, TO_PLAN)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0].clone()
    assert _hits() and torch.equal(first, torch.autograd.grad(loss, x)[0])
    again = functools.partial(torch.autograd.grad, inputs=x)
    raises("second time", again, loss, error=RuntimeError)
    raises("first derivatives only", again, _loss(x, y), create_graph=True, error=RuntimeError)
    batch = torch.autograd.grad(_loss(x, y), x, torch.ones(3), is_grads_batched=True)[0]
    assert torch.equal(batch, first.expand(3, -1, -1, -1))
    device.local.memory, half = [], torch.tensor(0.5)  # kernels write, in place unless it is kept
    for times in (*[1] * (TO_PLAN + 2), 4):
        loss = fastkd.cos_nce_loss(x, y, backend="triton")
        grad = functools.partial(torch.autograd.grad, loss, x, half, retain_graph=times > 1)
        found = [grad()[0].clone() for _ in range(times)]
    assert all(torch.equal(x, found[0]) for x in found)
    device.local.memory = None
    x, y = torch.randn(20, 16).requires_grad_(), torch.randn(20, 16).requires_grad_()
    for wanted in ([x, y], [x], [y], [x, y]) * 3:
        loss = fastkd.layer_norm_mse(x, y, backend="triton")
        assert all(g.shape == x.shape for g in torch.autograd.grad(loss, wanted))


def check_threads_share_plans(device: FakeGPU) -> None:
    of = (fastkd.relation_loss, fastkd.hidden_state_loss, fastkd.cos_nce_loss)

    def outcomes(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        new = functools.partial(torch.randn, 4 + seed % 3, 5, 16, generator=generator)
        inputs = {"student": new().requires_grad_(), "teacher": new()}
        subject = functools.partial(of[seed % 3], backend="triton")
        return [outcome(device, subject, inputs) for _ in range(5)]

    right = [*map(outcomes, range(12))]
    clear()
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: [*map(outcomes, range(12))], range(4))
    assert all(of_thread == right for of_thread in found)


def check_each_element_of_the_key_decides(device: FakeGPU) -> None:
    """A call, and the same call with one element of its key changed at a time."""
    (x, y), mask = _pair(), torch.ones(4, 6, dtype=torch.bool)
    with torch.inference_mode():
        inferred = torch.randn(4, 6, 16)
    usual, as_it_is = (x, y, mask), contextlib.nullcontext()
    for name, given, options, context in (
        ("base", usual, {}, as_it_is),
        ("option", usual, {"kind": "cosine"}, as_it_is),
        ("option given", usual, {"kind": "mse"}, as_it_is),
        ("number", usual, {"beta": 1.0}, as_it_is),
        ("its type", usual, {"beta": 1}, as_it_is),
        ("an argument", (x, y), {}, as_it_is),
        ("function", (x, y), {}, as_it_is),
        ("shape", (x.view(6, 4, 16), y.view(6, 4, 16), mask.view(6, 4)), {}, as_it_is),
        ("stride", (x, torch.randn(4, 6, 32)[..., :16], mask), {}, as_it_is),
        ("dtype", (x.bfloat16(), y.bfloat16(), mask), {}, as_it_is),
        ("dtype of the mask", (x, y, mask.int()), {}, as_it_is),
        ("requires_grad", (x.detach(), y, mask), {}, as_it_is),
        ("an inference tensor", (x, inferred, mask), {}, as_it_is),
        ("address", (x, _moved(y), mask), {}, as_it_is),
        ("one storage", (x, x.detach(), mask), {}, as_it_is),
        ("one tensor", (y, y, mask), {}, as_it_is),
        ("grad mode", usual, {}, torch.no_grad()),
        ("precision", usual, {}, _set(torch.set_float32_matmul_precision, "high", "highest")),
        ("default dtype", usual, {}, _set(torch.set_default_dtype, torch.float64, torch.float32)),
        ("autocast", usual, {}, _set(_set_autocast, torch.bfloat16, None)),
        ("its dtype", usual, {}, _set(_set_autocast, torch.float16, None)),
        ("current device", usual, {}, _set(functools.partial(setattr, device, "device"), 1, 0)),
    ):
        loss = fastkd.relation_loss if name == "function" else fastkd.hidden_state_loss
        before = len(_plans())
        with context:
            for _ in range(TO_PLAN):
                loss(*given, backend="triton", **options)
        assert len(_plans()) == before + 1, name


def check_saved_tensor_hooks(device: FakeGPU) -> None:
    (x, y), seen, hooks = _pair(), [], torch.autograd.graph.saved_tensors_hooks
    for _ in range(TO_PLAN):
        pack, unpack = mock.Mock(wraps=torch.clone), mock.Mock(wraps=torch.clone)
        with hooks(pack, unpack):
            loss = _loss(x, y)
        torch.autograd.grad(loss, x)
        seen.append((pack.call_count, unpack.call_count))
    assert _hits() and len({*seen}) == 1 and seen[0][0] == seen[0][1] > 0
    logits = {"student_logits": torch.randn(5, 40).half().requires_grad_()}
    teacher = torch.randn(5, 40).half()
    soft = functools.partial(fastkd.soft_target_loss, teacher_logits=teacher, backend="triton")

    def with_other_strides(**given: Tensor) -> Any:
        wider = functools.partial(torch.nn.functional.pad, pad=(0, 8))
        with hooks(wider, lambda x: x[..., :40]):
            return soft(**given)

    assert equal(device, soft, *[logits] * (TO_PLAN + 2))
    assert equal(device, with_other_strides, logits)


def check_checkpoints_and_compiled_autograd(_: FakeGPU) -> None:
    from torch._dynamo.compiled_autograd import _enable
    from torch.utils.checkpoint import checkpoint

    x, y = _pair()
    for _ in range(TO_PLAN):
        checkpoint(lambda x: _loss(x * 1.0, y), x, use_reentrant=False).backward()
    assert _hits()
    for _ in range(TO_PLAN):
        with _enable(torch.compile(backend="eager")):
            _loss(x, y).backward()


def _uses_plan(*inputs: Tensor) -> bool:
    (plan,) = _plans()
    with mock.patch.object(plan, "program", mock.Mock(wraps=plan.program)) as program:
        _loss(*inputs)
    return program.called and len(_plans()) == 1


def check_modes_hooks_and_the_switch(_: FakeGPU) -> None:
    x, y = _pair()
    hooks, hook = triton.knobs.runtime.launch_enter_hook, mock.Mock()
    _loss(x, y, TO_PLAN)
    for context in (
        FlopCounterMode(display=False),
        _set(lambda change: change(hook), hooks.add, hooks.remove),
        mock.patch.object(plans, "ENABLED", False),
    ):
        with context:
            assert not _uses_plan(x, y), context
    assert not _uses_plan(x.detach().as_subclass(type("Other", (Tensor,), {})), y)
    with torch.device("cpu"):
        assert _uses_plan(x, y)
    assert plans._key((), (x, torch.empty(3, device="meta"))) is None  # of two devices
    # Triton 3.8 unloads a kernel that is collected, and a launch takes its function's address.
    assert any(type(x) is _Compiled for x in _plans()[0].program.__globals__.values())
    for _ in range(TO_PLAN):  # without kernels
        fastkd.relation_loss(x, y, distance="kl", backend="torch")
    assert len(_plans()) == 2 and _hits() == 1 and plans.why_off() is None


@contextlib.contextmanager
def _switched_off(words: str) -> Iterator[None]:
    """Context in which plans are switched off, with one warning; afterwards they are on again."""
    try:
        with pytest.warns(UserWarning, match=words) as given:
            yield
        assert len(given) == 1 and words in (plans.why_off() or "") and not plans.ENABLED
    finally:
        plans.ENABLED, plans.problem = True, None
        clear()


def _planted(pattern: str, change: Callable[[re.Match[str]], str]) -> Any:
    """Patch of the first line of each program that has the pattern."""

    def faulty(code: str, constants: dict[str, Any]) -> None:
        exec(re.sub(pattern, change, code, count=1), constants)

    return mock.patch.object(recording, "exec", faulty, create=True)


FAULTS = {
    "a wrong stride": (r"\((\d+), (\d+), 1, \), c", lambda m: f"({m[1]}, 1, {m[2]}), c"),
    "an alias": (r"(stream, .*)\bp[2-9]\b", lambda m: f"{m[1]}p1"),
    "a constant that isn't one": (r"(p\d+, )(\d+)\b", lambda m: f"{m[1]}{int(m[2]) + 1}"),
    "another saved tensor": (r"(s0 = \[)t\d+", lambda m: f"{m[1]}t0"),
    "a name that is gone": (r"get_current_stream", lambda m: "get_stream"),
}


def check_a_wrong_program_is_never_used(device: FakeGPU) -> None:
    subject = functools.partial(fastkd.cos_nce_loss, backend="triton")
    inputs = dict(zip(("student", "teacher"), _pair(), strict=True))
    assert equal(device, subject, *[inputs] * TO_PLAN) and _hits()
    clear()
    for name, (pattern, change) in FAULTS.items():
        words = "raised AttributeError" if "gone" in name else "gave other bits"
        with _planted(pattern, change), _switched_off(words):
            assert equal(device, subject, *[inputs] * (TO_PLAN + 2)), name
    gone = mock.patch.object(plans.Recording, "text", side_effect=AttributeError("gone"))
    with gone, _switched_off("can't be recorded: AttributeError"):
        _loss(*_pair(), TO_PLAN)


def check_private_names(_: FakeGPU) -> None:
    for path in recording.PRIVATE.values():
        owner, _, name = path.replace(":", ".").rpartition(".")
        recording.private.cache_clear()
        with mock.patch.object(pkgutil.resolve_name(owner), name):
            delattr(pkgutil.resolve_name(owner), name)
            reason, covered = plans.why_off(), plans._key((), ())
        recording.private.cache_clear()
        assert reason == f"{owner}.{name} is missing" and covered is None, (path, reason)
    assert plans.why_off() is None


def check_a_capture_uses_proved_plans_only(_: FakeGPU) -> None:
    x, y = _pair()
    for calls_before in range(1, TO_PLAN + 1):
        clear()
        _loss(x, y, calls_before)
        known = [(plan, plan.differs) for plan in _plans()]
        with mock.patch.object(plans, "_capturing", lambda: True):
            _loss(x, y, 3)
            assert known == [(plan, plan.differs) for plan in _plans()]
            assert _uses_plan(x, y) if calls_before == TO_PLAN else not _hits()
    clear()
    with mock.patch.object(plans, "_difference", return_value=lambda: None) as proof:  # no verdict
        _loss(x, y, 2 * TO_PLAN)
    assert proof.call_count == 1 and not _hits()


def check_ragged_batches_flush_no_count_and_record_nothing(_: FakeGPU) -> None:
    with mock.patch.multiple(plans, SIGHTS=SIGHTS, WINDOW=200, _seen=itertools.count(1)):
        x, y = torch.randn(150, 1, 16), torch.randn(150, 1, 16)
        for _ in range(4):
            _loss(*_pair())
            for rows in range(1, 150):
                _loss(x[:rows], y[:rows])
        assert not _plans()
        _loss(*_pair(), 12)
        assert _hits() == 1
        for rows in range(450):  # as many sights drop a plan without a call
            _loss(x[: rows % 149 + 1], y[: rows % 149 + 1])
        _loss(x, y, 200)
        assert len(_plans()) <= 1


def check_a_number_that_changes_is_a_parameter(device: FakeGPU) -> None:
    z, w, states = torch.randn(5, 40), torch.randn(5, 40), _pair()
    top_k = fastkd.TopK(torch.arange(20).view(5, 4), torch.full((5, 4), -2.0))
    match = fastkd.VocabularyMatch(torch.arange(4), torch.arange(4).flip(0), 40, 40)
    soft, mixed = fastkd.soft_target_loss, functools.partial(fastkd.Divergence, "mixed")

    def fcd(student: Tensor, teacher: Tensor, **options: Any) -> Any:
        return fastkd.FCDLoss(**options)(student, teacher)

    cases: dict[str, tuple[Any, Any, Callable[[float], dict[str, Any]]]] = {
        "temperature": (soft, (z, w), lambda t: {"temperature": t}),
        "across 10, where the kernel changes": (soft, (z, w), lambda t: {"temperature": 2.2 * t}),
        "used backward": (soft, (z.half(), w.half()), lambda t: {"temperature": t}),
        "of a TopK": (soft, (z, top_k), lambda t: {"temperature": t, "scale_by_t2": False}),
        "coefficient": (soft, (z, w), lambda t: {"divergence": mixed(mix=t / 9)}),
        "denominator": (soft, (z, w), lambda t: {"denominator": int(9 * t)}),
        "of a match": (soft, (z, w), lambda t: {"denominator": t, "vocabulary": match}),
        "weight": (fcd, states, lambda t: {"alpha": 0.0, "beta": t}),
        "beta": (fastkd.hidden_state_loss, states, lambda t: {"kind": "smooth_l1", "beta": t}),
    }

    def anneal(loss: Any, given: Any, options: Any, constant: int = 0) -> None:
        clear()
        names = ("student_logits", "teacher_logits") if loss is soft else ("student", "teacher")
        inputs = dict(zip(names, (given[0].detach().requires_grad_(), given[1]), strict=True))
        for step in range(12):
            of_step = options(5.0 - max(step - constant, 0) / 7)
            subject = functools.partial(loss, **of_step, backend="triton")
            assert equal(device, subject, inputs), step

    for name, case in cases.items():
        anneal(*case)
        assert len(_plans()) == _hits() == 1 + ("across" in name), name
    for constant in (0, 6):  # a proof with the number of the record doesn't see that it is unused
        with _planted(r"n\[0\]", lambda m: "5.0"), _switched_off("gave other bits"):
            anneal(*cases["temperature"], constant)


def check_fork(_: FakeGPU) -> None:
    x, y = _pair()
    _loss(x, y, TO_PLAN)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            known = plans._plans.copy()
            _loss(x.detach(), y, TO_PLAN)
            os._exit(0 if not known and _hits() else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0 and _hits()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of so many calls, one")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--device", help="compare calls there, and do nothing else")
    parser.add_argument("--stub", action="store_true", help="plant faults there, nothing else")
    given = parser.parse_args()
    if given.device:
        calls.DEVICE = torch.device(given.device)
        _, wrong = compare_calls(FakeGPU(), given.every, given.first)
        raise SystemExit("\n".join(wrong) or plans.why_off())
    device: Any = StubGPU() if given.stub else FakeGPU()
    with device.running():
        found = (0, []) if given.stub else compare_calls(device, given.every, given.first)
        wrong = found[1] + behaviours(device, "check_a_wrong" if given.stub else "check_")
    count = len(device.kernels) if given.stub else found[0]
    print(json.dumps({"count": count, "wrong": wrong, "off": plans.why_off()}))


if __name__ == "__main__":
    main()
