"""``python -m tests.ptx.forms [loss ...] [--capability 90]``: each compiled form, executed.

Of the public calls in `tools.calls` the smallest that together start every form of the Triton
kernels run on random inputs, as on a GPU: Python reads no values. Value and gradients must be those
of PyTorch in float64, up to `TOLERANCE` of the dtype and ten times the error that PyTorch has in
it, or that rounding the inputs once would make; `tools.ptx` raises for hazards. It prints what is
wrong, then a line for each kernel: forms executed, of all that `tools.calls` start. ``--list``
prints each form. The exit status is 1 if one is wrong or was not executed.
"""

import argparse
import collections
import contextlib
import inspect
import math
import sys
import time
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
from torch import Tensor

import fastkd
from fastkd.kernels import cayley
from tests.support.compare import TOLERANCE
from tools import calls
from tools.calls import Call, Made, given, learns, numbers
from tools.compile_report import Form, describe, recorded
from tools.dry_cuda import Device, problem
from tools.executed import executing

MAGNIFIED = 16  # moves inputs far enough to be measured in float64
LARGEST = 2**20  # elements of a call's inputs, which take seconds to execute


def inverted(skew: Tensor, backend: str = "triton") -> Tensor:
    """`fastkd.cayley` of random matrices so small that products invert them, skew or not."""
    return fastkd.cayley(skew / 16, backend=backend)


def inverted_in_large_tiles(skew: Tensor, backend: str = "triton") -> Tensor:
    """`inverted` in the tiles of matrices so large that they take minutes to execute."""
    tiles = cayley.blocks(cayley.MANY_ROWS, skew.device)
    with (
        mock.patch.object(cayley, "blocks", lambda n, device: tiles),
        mock.patch.object(cayley, "MANY_ROWS", 0),
    ):
        return inverted(skew, backend)


def related(B: int, N: int, D: int, over: str) -> Call:
    """A `fastkd.relation_loss` with a mask, in float32."""
    sides = {"student": learns(B, N, D), "teacher": given(B, N, D), "mask": numbers(B, N)}
    return Call(fastkd.relation_loss, sides, {"over": over, "backend": "triton"})


# Calls that start the forms of calls too large to execute, or with inputs that aren't random.
SMALLER = {
    "projection": [
        Call(inverted, {"skew": learns(2, 20, 20)}, {}),
        Call(inverted, {"skew": learns(32, 32)}, {}),
        Call(inverted_in_large_tiles, {"skew": learns(128, 128)}, {}),
    ],
    "relation": [
        related(2, 32, 16, over="tokens"),
        related(64, 2, 16, over="samples"),
        related(129, 2, 768, over="samples"),
        related(1, 129, 2064, over="tokens"),
    ],
}


class Inputs:
    """Random tensors in place of a call's `Made`, the same in each run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.made: list[tuple[Tensor, bool]] = []
        self.leaves: list[Tensor] = []
        self.run(None)

    def run(self, dtype: torch.dtype | None, moved: float = 0.0) -> None:
        """Begin a run, with floating-point tensors in ``dtype`` or their own, moved by a factor."""
        self.dtype, self.moved, self.next, self.leaves = dtype, moved, 0, []

    def tensor(self, made: Made) -> Tensor:
        if self.next == len(self.made):
            self.made.append((self._draw(made), made.learns))
        x, learns = self.made[self.next]
        self.next += 1
        x = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x.clone()
        if self.moved and x.is_floating_point():
            x *= 1 + self.moved * (torch.rand(x.shape, dtype=x.dtype) - 0.5)
        if learns:
            self.leaves.append(x.requires_grad_())
        return x

    def _draw(self, made: Made) -> Tensor:
        if made.learns or made.dtype in TOLERANCE:
            x = torch.randn(made.shape, generator=self.generator)
            return x.to(made.dtype)
        if not made.shape:  # a denominator
            return torch.tensor(3, dtype=made.dtype)
        # Ids, labels and masks: ids have to be different in a row.
        return torch.arange(made.shape[-1]).expand(made.shape).to(made.dtype)


def masked(call: Call) -> Call:
    """``call`` with masks that are real at some positions, and labels of two classes."""
    inputs = dict(call.inputs)
    for name, x in inputs.items():
        if isinstance(x, Made) and name.endswith(("mask", "labels")):
            generator = torch.Generator().manual_seed(len(name))
            drawn = torch.rand(x.shape, generator=generator) < 0.7
            drawn[..., :1] = True
            drawn.view(-1)[-1] = x.shape[-1] == 1
            inputs[name] = drawn.to(x.dtype)
    return call._replace(inputs=inputs)


def results(
    call: Call, inputs: Inputs, dtype: torch.dtype | None, backend: str, moved: float = 0.0
) -> list[Tensor]:
    """Value and gradients of a call."""
    inputs.run(dtype, moved)
    torch.manual_seed(0)
    taken = inspect.signature(call.of).parameters
    chosen = {"backend": backend} if {"backend", "options"} & set(taken) else {}
    call = call._replace(options=call.options | chosen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(call.multiplying())
        stack.enter_context(mock.patch.object(Made, "tensor", lambda x: inputs.tensor(x)))
        if backend == "triton":  # on a GPU Python can't read values
            stack.enter_context(mock.patch.object(Tensor, "is_cpu", False))
        arguments = {name: calls.made(x) for name, x in call.inputs.items()}
        if isinstance(call.of, type):
            module = call.module()
            module = module if dtype is None else module.to(dtype)
            found = module(**arguments)
            leaves = [*inputs.leaves, *module.parameters()]
        else:
            found, leaves = call.of(**arguments, **call.options), inputs.leaves
        value = found[0] if isinstance(found, tuple) else found
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(value.shape, generator=generator).to(value.dtype)
        if not value.requires_grad:
            return [value]
        grads = torch.autograd.grad(value, leaves, upstream, allow_unused=True)
        return [value.detach(), *(x for x in grads if x is not None)]


def wrong(call: Call) -> str | None:
    """What is wrong with a call's value or gradients, or None."""
    call, inputs = masked(call), Inputs()
    found = results(call, inputs, None, "triton")
    kinds = {x.dtype for x, _ in inputs.made if x.dtype in TOLERANCE} | {call.dtype}
    dtype = max(kinds, key=lambda kind: TOLERANCE[kind])
    if dtype == torch.float32 and call.precision != "highest":
        dtype = torch.float16  # TF32 has its precision
    right = results(call, inputs, torch.float64, "torch")
    plain = results(call, inputs, None, "torch")
    working = torch.float64 if kinds == {torch.float64} else torch.float32
    near = results(call, inputs, torch.float64, "torch", MAGNIFIED * torch.finfo(working).eps)
    every = zip(found, right, plain, near, strict=True)
    for number, (x, exact, reference, other) in enumerate(every):
        size = float(exact.norm())
        size = size if size > 1e-6 else 1e-2  # terms of random inputs that cancel
        errors = [float((y.double() - exact).norm() / size) for y in (x, reference, other)]
        if not errors[0] <= TOLERANCE[dtype] + 10 * max(errors[1], errors[2] / MAGNIFIED):
            what = f"gradient {number}" if number else "the value"
            return f"{what}: error {errors[0]:.2g}, PyTorch's {errors[1]:.2g}"
    return None


def chosen(loss: str, capability: int) -> list[Call]:
    """The smallest calls that together start every form."""
    every = [*calls.of(loss), *SMALLER.get(loss, [])]
    known: set[Form] = set()
    kept = []
    for call, forms in sorted(started(every, capability), key=lambda each: _size(each[0])):
        if _size(call) <= LARGEST and not forms <= known:
            known |= forms
            kept.append(call)
    return kept


def started(every: Iterable[Call], capability: int) -> Iterator[tuple[Call, set[Form]]]:
    """Calls that start kernels, and the forms of these."""
    device = Device()
    device.capability = capability
    with device.running():
        for call in every:
            device.forms.clear()
            if problem(call.run) is None and device.forms:
                yield call, set(device.forms)


def _size(call: Call) -> int:
    """Elements of the inputs, and of the parameters of a Module whose input has fewer."""
    inputs = (x for given in call.inputs.values() for x in calls.each_made(given))
    parameters = call.options.get("in_dim", 0) * call.options.get("out_dim", 0)
    return sum(math.prod(x.shape) for x in inputs) + parameters


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ptx.forms", description=__doc__)
    parser.add_argument("losses", nargs="*", default=list(calls.LOSSES), help="all by default")
    parser.add_argument("--capability", type=int, default=80, choices=(80, 90))
    parser.add_argument("--list", action="store_true", help="print each form that was executed")
    options = parser.parse_args()
    start, failures = time.monotonic(), 0
    launched: set[Form] = set()
    todo = [call for loss in options.losses for call in chosen(loss, options.capability)]
    with (
        mock.patch.object(calls, "DEVICE", torch.device("cpu")),
        executing(options.capability, forms=launched),
    ):
        for call in todo:
            try:
                found = wrong(call)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found:
                failures += 1
                print(f"{call}: {found}", flush=True)
    wanted = {
        form for loss in options.losses for form in recorded(loss)
        if form.capability == options.capability
    }  # fmt: skip
    done = launched & wanted
    counts = collections.Counter(form.name for form in wanted)
    for name, count in sorted(counts.items()):
        number = sum(form.name == name for form in done)
        print(f"{name}: {number} of {count} forms executed on sm_{options.capability}")
    if options.list:
        print(*sorted(f"{form.name} {describe(form)}" for form in done), sep="\n")
    more, seconds = len(launched - wanted), time.monotonic() - start
    print(
        f"{len(done)} of {len(wanted)} forms by {len(todo)} calls, {more} others, {seconds:.0f} s, "
        f"{failures} wrong"
    )
    return 1 if failures or len(done) < len(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
