"""The stage ``measure`` of `tools.gpu_check`: measurements on a GPU, the most valuable first.

`items` lists them: (a) the extension, (b) whole training steps, (c) README's rows,
eager and in CUDA graphs, with masks, (d) neighbours, Cayley maps and roots, (e) LM heads beside
other packages, (f) checks that need a GPU. Each result is written at once, as a line of
measure.jsonl in ``--out``; items with a line are not measured again. An item starts if its seconds
in the last run (or in a file of bench/results/measure) fit into the remaining time, and ends after
three times that.

At the end bench-measure.json has the benchmarks in the layout that ``python -m bench.report``
reads, and measure.json the steps, the checks and the seconds of each item. ``--tiny`` runs all
items at tiny sizes, on a CPU in Triton's interpreter, to find mistakes before a GPU is used.
"""

import argparse
import contextlib
import datetime
import functools
import io
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastkd
from bench import case as cases_of_bench
from bench import suite
from bench.case import (
    COMPILED,
    COMPILED_GRAPH,
    NEEDS_CUDA,
    REFERENCE,
    Bound,
    Case,
    Provider,
)
from bench.group import DEVICE, Group, described, where
from bench.measure import limits, one_line, quartiles, release
from bench.report import GRAPH, RESULTS
from fastkd._core import dispatch, extension

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = RESULTS / "measure"  # a file for each machine: seconds by item
PATIENCE = 3  # times an item's length, after which it ends
# fastkd's backends on a GPU.
OWN = ("fastkd triton", "fastkd", GRAPH)
BESIDE = (REFERENCE, COMPILED, COMPILED_GRAPH)


class Stop(Exception):
    """The following items would be worthless."""


@dataclass(frozen=True)
class Run:
    """How items are measured."""

    tiny: bool
    seconds: float = 0.5  # of timing, for each provider
    rounds: int = 7

    def size(self, case: Case) -> Case:
        return suite.toy(case) if self.tiny else case


@dataclass(frozen=True)
class Item:
    """A measurement: ``work`` returns the JSON of its result."""

    name: str
    seconds: float  # if no earlier run is known
    work: Callable[[Run], dict[str, Any]]


# --- (a) The extension ---------------------------------------------------------------------------


def loaded(run: Run) -> dict[str, Any]:
    found = {"cpu": extension.CPU, "cuda": extension.CUDA, "versions": where()["versions"]}
    if not (extension.CPU and (extension.CUDA or run.tiny)):
        raise Stop(f"the extension is not loaded: {found}; build it first (--only build,measure)")
    return found


# --- (b) Training steps --------------------------------------------------------------------------


def step(case: Case, provider: Provider, run: Run) -> dict[str, Any]:
    """Milliseconds of a step, of the host until all is launched, and of the GPU's kernels."""
    case = run.size(case)
    torch.manual_seed(0)
    inputs = case.make(device=DEVICE, dtype=case.dtype, **case.sizes)
    bound = provider.bind(inputs)
    for _ in range(1 if run.tiny else 5):
        bound.step()
    whole, host = [], []
    for _ in range(2 if run.tiny else 20):
        synchronize()
        start = time.perf_counter()
        bound.step()
        host.append(time.perf_counter() - start)
        synchronize()
        whole.append(time.perf_counter() - start)
    found = {"ms": 1e3 * statistics.median(whole), "host_ms": 1e3 * statistics.median(host)}
    found["kernels_ms"] = kernel_milliseconds(bound)
    found |= {"case": case.key, "provider": provider.name}
    return found


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def kernel_milliseconds(bound: Bound) -> float:
    """Milliseconds of all kernels of a step, by the profiler; 0 on a CPU."""
    if DEVICE.type != "cuda":
        bound.step()
        return 0.0
    from bench.kernel_times import durations

    return sum(µs for _, µs in durations(bound, steps=3).values()) / 1e3


# --- (c), (d), (e) Rows of the benchmark ---------------------------------------------------------


def row(case: Case, run: Run) -> dict[str, Any]:
    """Benchmarks of a case's providers, as pytest-benchmark writes them, and refused providers."""
    case = run.size(case)
    chosen = [p for p in case.providers if p.name in (*OWN, *BESIDE) or not _own(p)]
    if run.tiny:  # compiling takes seconds each, and shows nothing of a typing error
        chosen = [p for p in chosen if p.name not in (COMPILED, COMPILED_GRAPH)]
    reasons = {p.name: None if _interpreted(p, run) else p.why_not(DEVICE) for p in chosen}
    group = Group(case, [p for p in chosen if reasons[p.name] is None])
    if run.tiny:
        run_once(group)
    else:
        group.time(run.seconds, run.rounds)
    benchmarks = []
    for provider in group.providers:
        if samples := group.samples.get(provider.name):
            stats = quartiles(samples) | {"rounds": len(samples), "min": min(samples)}
            info = described(case, provider, group)
            benchmarks.append(
                {"group": case.key, "name": provider.name, "extra_info": info, "stats": stats}
            )
    refused = group.refused | {name: why for name, why in reasons.items() if why}
    wrong = [name for name in group.refused if _own_name(name)]
    if run.tiny and wrong:
        raise RuntimeError(f"{wrong[0]}: {group.refused[wrong[0]]}")
    release(DEVICE)
    return {"benchmarks": benchmarks, "refused": refused}


def run_once(group: Group) -> None:
    """Check the providers, with the check's time as their sample."""
    for provider in group.providers:
        start = time.perf_counter()
        if reason := group.check(provider):
            group.refused[provider.name] = reason
        else:
            group.samples[provider.name] = [time.perf_counter() - start]


def _own(provider: Provider) -> bool:
    return _own_name(provider.name)


def _own_name(name: str) -> bool:
    return name.startswith("fastkd")


def _interpreted(provider: Provider, run: Run) -> bool:
    """Whether a provider runs in the interpreter, though it is for a GPU."""
    if not (run.tiny and dispatch.triton_interpreted()):
        return False
    return provider.name == GRAPH or provider.why_not(DEVICE) == NEEDS_CUDA


# --- (f) What no CPU shows -----------------------------------------------------------------------


def pair(run: Run, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features of student and teacher, and a mask."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    B, N, D = (3, 4, 16) if run.tiny else (32, 128, 768)
    new = functools.partial(torch.randn, B, N, D, device=DEVICE, generator=generator)
    mask = torch.rand(B, N, device=DEVICE, generator=generator) < 0.8
    return new().requires_grad_(), new(), mask


def losses(student: Tensor, teacher: Tensor, mask: Tensor) -> list[Tensor]:
    """Losses and gradients of three Triton kernels."""
    found = []
    for function in (fastkd.relation_loss, fastkd.hidden_state_loss, fastkd.cos_nce_loss):
        loss = function(student, teacher, mask=mask, backend="triton")
        found += [loss.detach(), *torch.autograd.grad(loss, student)]
    return found


def same(found: list[Tensor], right: list[Tensor]) -> None:
    synchronize()
    if not all(map(torch.equal, found, right)):
        raise RuntimeError("other numbers")


def other_stream(run: Run) -> dict[str, Any]:
    """Compute losses three times on another stream: first call, recorded plan, replayed plan."""
    right = losses(*pair(run))
    stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
    context = torch.cuda.stream(stream) if stream else contextlib.nullcontext()
    with context:
        for _ in range(3):
            same(losses(*pair(run)), right)
    return {}


def two_threads(run: Run) -> dict[str, Any]:
    """Compute losses of different inputs in two threads at a time."""
    rights = [losses(*pair(run, seed)) for seed in range(2)]
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(1 if run.tiny else 50):
                same(losses(*pair(run, seed)), rights[seed])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
        if run.tiny:  # Triton's interpreter serves one
            thread.join()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return {}


def large_tensors(run: Run) -> dict[str, Any]:
    """More than 2³¹ logits: the last rows have the same losses as without the others."""
    rows, V = (6, 40) if run.tiny else (16896, 2**17)
    new = functools.partial(torch.randn, V, device=DEVICE, dtype=torch.bfloat16)
    student, teacher = (new().repeat(rows, 1) for _ in range(2))
    student += torch.arange(rows, device=DEVICE, dtype=torch.bfloat16)[:, None] / rows
    student[-4:, 0] += 3.0
    student.requires_grad_()
    function = functools.partial(fastkd.soft_target_loss, reduction="none", backend="triton")
    found = function(student, teacher)
    (gradient,) = torch.autograd.grad(found[-4:].sum(), student)
    last = student.detach()[-4:].clone().requires_grad_()
    right = function(last, teacher[-4:])
    same([found[-4:].detach(), gradient[-4:]], [right, *torch.autograd.grad(right.sum(), last)])
    if gradient[:-4].any():
        raise RuntimeError("a gradient of rows that don't count")
    return {"entries": student.numel()}


def deterministic(run: Run) -> dict[str, Any]:
    """PyTorch's deterministic mode changes no bit and raises no error."""
    right = losses(*pair(run))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        same(losses(*pair(run)), right)
    finally:
        torch.use_deterministic_algorithms(before)
    return {}


def reduce_overhead(run: Run) -> dict[str, Any]:
    """``torch.compile(mode="reduce-overhead")``, which captures CUDA graphs."""
    options: dict[str, Any] = {"backend": "eager"} if run.tiny else {"mode": "reduce-overhead"}

    def call(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return fastkd.relation_loss(student * 2.0, teacher, mask=mask, backend="triton")

    compiled = torch.compile(call, fullgraph=True, **options)
    for seed in range(3):
        student, teacher, mask = pair(run, seed)
        expected = call(student, teacher, mask)
        (right,) = torch.autograd.grad(expected, student)
        found = compiled(student, teacher, mask)
        (gradient,) = torch.autograd.grad(found, student)
        torch.testing.assert_close(found.detach(), expected.detach())
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()
    return {}


def random_calls(run: Run) -> dict[str, Any]:
    """`tests.fuzz` against float64, from another seed than the tests'."""
    return reported(run, "tests.fuzz", f"--seconds={0.1 if run.tiny else 15}", "--seed=90000")


def planned(run: Run) -> dict[str, Any]:
    """Random calls replayed from plans have the same bits as without plans."""
    count = 2 if run.tiny else 60
    return reported(run, "tests.kernels.planned", f"--device={DEVICE}", f"--sequences={count}")


def reported(run: Run, module: str, *arguments: str) -> dict[str, Any]:
    """Last line that a command prints; a failed command raises RuntimeError with its output.

    The command has a process of its own, except for tiny sizes: imports take seconds.
    """
    if run.tiny:
        output, status = io.StringIO(), None
        argv = mock.patch.object(sys, "argv", [module, *arguments])
        with argv, contextlib.redirect_stdout(output):
            try:
                runpy.run_module(module, run_name="__main__")
            except SystemExit as end:
                status = end.code
        text = output.getvalue()
    else:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        status, text = process.returncode, process.stdout or process.stderr
    if status:
        raise RuntimeError(text[-500:])
    return {"report": text.splitlines()[-1]}


CHECKS = (other_stream, two_threads, large_tensors, deterministic, reduce_overhead, random_calls,
          planned)  # fmt: skip


# --- The list ------------------------------------------------------------------------------------


def items() -> Iterator[Item]:
    """All items, in order of worth."""
    yield Item("a extension", 2, loaded)
    for case in suite.cases(["step"]):
        for provider in case.providers:
            if provider.why_not(DEVICE) is None:
                work = functools.partial(step, case, provider)
                yield Item(f"b {case.title}: {provider.name}", 8, work)
    headline = [case for case in suite.cases(suite.CUDA_SETS) if case.headline]
    masked = [case for case in suite.cases(["bert"]) if case.title.endswith(", mask")]
    neighbours = suite.cases(["bert", "bank"], ["knn"])
    inverses = [case for case in suite.cases(["bert", "long"]) if case.title == "Cayley"]
    roots = suite.cases(["bert"], ["linalg"])
    heads = [*suite.cases(["vocab"], ["heads"]), *suite.cases(["vocab"], ["soft_targets"])]
    listed = {"c": [*headline, *masked], "d": [*neighbours, *inverses, *roots], "e": heads}
    known = set()
    for part, chosen in listed.items():
        for case in chosen:
            if case.key not in known and "all pairs" not in case.title:
                known.add(case.key)
                yield Item(f"{part} {case.key}", 15, functools.partial(row, case))
    for check in CHECKS:
        name = f"f {check.__name__.replace('_', ' ')}"
        yield Item(name, 20 if check is random_calls else 6, check)


# --- A run ---------------------------------------------------------------------------------------


def lengths() -> dict[str, float]:
    """Seconds of each item in the last run on a machine like this, or on any."""
    own = where()["machine"].get("gpu", "")
    files = sorted(LENGTHS.glob("*.json"), key=lambda path: path.stem == _file_of(own))
    found: dict[str, float] = {}
    for path in files:
        found |= json.loads(path.read_text())["seconds"]
    return found


def _file_of(name: str) -> str:
    return "-".join(name.lower().split())


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of an earlier call, by item."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["name"]: line for line in lines}


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """TimeoutError after ``seconds``, in the main thread."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(
    chosen: list[Item], run: Run, out: Path, seconds: float, expected: dict[str, float]
) -> list[dict[str, Any]]:
    """Measure the items without a line in ``out`` that fit into the time; return all lines."""
    path = out / "measure.jsonl"
    end = time.monotonic() + seconds
    known = read(path)
    with path.open("a") as file:
        for item in chosen:
            if item.name in known:
                continue
            left = end - time.monotonic()
            length = expected.get(item.name, item.seconds)
            if left < length:
                print(f"{item.name}: left out, {length:.0f} s do not fit", flush=True)
                continue
            start = time.monotonic()
            line: dict[str, Any] = {"name": item.name}
            try:
                with alarm(min(left, PATIENCE * max(length, 1.0))):
                    line["result"] = item.work(run)
            except Stop:
                raise
            except Exception as error:
                line["problem"] = one_line(error)
                release(DEVICE)
            line["seconds"] = round(time.monotonic() - start, 2)
            known[item.name] = line
            print(json.dumps(line), file=file, flush=True)
            print(
                f"{item.name}: {line.get('problem', 'measured')}, {line['seconds']} s", flush=True
            )
    return [known[item.name] for item in chosen if item.name in known]


def write(lines: list[dict[str, Any]], out: Path) -> None:
    """bench-measure.json and measure.json."""
    results = {line["name"]: line.get("result", {}) for line in lines}
    benchmarks = [bench for found in results.values() for bench in found.get("benchmarks", [])]
    machine = where()["machine"] | {"versions": where()["versions"]}
    dtypes = sorted({bench["extra_info"]["dtype"] for bench in benchmarks})
    tiny = DEVICE.type == "cpu"
    file = {
        "machine_info": machine,
        "datetime": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "benchmarks": benchmarks,
        "limits": {} if tiny else limits(DEVICE, tuple(getattr(torch, name) for name in dtypes)),
    }
    (out / "bench-measure.json").write_text(json.dumps(file, indent=1) + "\n")
    steps = {name: x for name, x in results.items() if "host_ms" in x}
    references = {x["case"]: x["ms"] for x in steps.values() if x["provider"] == REFERENCE}
    for x in steps.values():
        if x["case"] in references:
            x["of_reference"] = x["ms"] / references[x["case"]]
    summary = {
        "machine": machine,
        "commit": where()["commit"],
        "steps": steps,
        "checks": {
            line["name"]: line.get("problem", line.get("result"))
            for line in lines
            if line["name"].startswith(("a ", "f "))
        },
        "problems": {line["name"]: line["problem"] for line in lines if "problem" in line},
        "seconds": {line["name"]: line["seconds"] for line in lines},
    }
    (out / "measure.json").write_text(json.dumps(summary, indent=1) + "\n")


@contextlib.contextmanager
def on_a_cpu() -> Iterator[None]:
    """Context in which steps run eagerly instead of in CUDA graphs."""
    with mock.patch.object(cases_of_bench, "GraphBound", lambda bound: bound):
        yield


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.measure", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of results")
    parser.add_argument("--seconds", type=float, default=400.0, help="for all items together")
    parser.add_argument("--only", default="", help="parts, for example abf; all if empty")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on any machine")
    parser.add_argument("--commit", help="recorded where git can't tell")
    parser.add_argument("--list", action="store_true", help="print items and lengths, and stop")
    given = parser.parse_args(arguments)
    if given.commit:
        os.environ["FASTKD_COMMIT"] = given.commit
    if not (given.tiny or torch.cuda.is_available()):
        print(f"tools.measure needs a CUDA device, or --tiny; torch {torch.__version__} sees none")
        return 2
    chosen = [x for x in items() if not given.only or x.name[0] in given.only]
    expected = {} if given.tiny else lengths()
    if given.list:
        for item in chosen:
            print(f"{expected.get(item.name, item.seconds):6.1f} s  {item.name}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given.tiny)
    context = on_a_cpu() if DEVICE.type == "cpu" else contextlib.nullcontext()
    try:
        with context:
            lines = measure(chosen, run, given.out, given.seconds, expected)
    except Stop as reason:
        print(reason)
        return 3
    write(lines, given.out)
    problems = [line["name"] for line in lines if "problem" in line]
    print(f"{len(lines)} of {len(chosen)} items measured, {len(problems)} with a problem")
    return 1 if problems or len(lines) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
