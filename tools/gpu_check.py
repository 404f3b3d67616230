"""``make gpu-check``: what only a GPU can show, the most important first, within ``--minutes``.

Its groups are functions below: correctness, rows of the tables, then the rest; ``--only
correct,headline`` selects some. An item runs in a process that has had no fault before
(`tools.apart`), and its line is in ``--out`` (lines.jsonl) before anything else happens.
``--resume`` keeps the lines without a problem, and tries the others. What is missing here (an
extension, compute-sanitizer) leaves out its own items. ``--dry`` runs the items on the CPU, at toy
sizes. The exit status is 0 if every item has a line without a problem.
"""

import argparse
import functools
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import setup as recipe
from bench import kernel_times, suite
from bench.case import Bound, Case, GraphBound, Provider
from bench.group import DEVICE
from bench.measure import Oracle, interleaved, limits, release
from fastkd._core import extension, machine, plans
from tools import apart
from tools.apart import Item

ROOT = Path(__file__).resolve().parent.parent
GENERAL = "values", "edges", "layouts", "derivatives", "errors"  # of every loss
PARITY = (
    *(
        f"tests/test_{name}.py"
        for name in (*suite.LOSSES, *GENERAL, "extension", "numerics", "gpu")
        if (ROOT / f"tests/test_{name}.py").exists()
    ),
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/kernels/test_*.py"))),
)
# Compilers and C++ need no GPU, and graphs are a group of their own.
WITHOUT = "not compil and not graph and not inductor and not cpp"
# Losses whose kernels changed since a GPU last ran them.
NEW = "contrastive", "knn", "soft_targets", "cca", "relation"
STOPPING = 10.0  # seconds in which an interrupted command writes its results
SIGHTS = 12  # calls after which a plan is recorded, proved and repeated
CHILD = [sys.executable, "-m", "tools.gpu_check", "--serve"]


class LeftOut(Exception):
    """An item needs what this machine doesn't have: no problem."""


class Group(NamedTuple):
    """``items`` lists what runs at most for ``seconds``, so many at a time."""

    items: Callable[[argparse.Namespace], Iterable[Item]]
    seconds: float
    workers: int = 1  # one where times are measured


GROUPS: dict[str, Group] = {}  # in the order of their functions below


def group(seconds: float, workers: int = 1) -> Callable:
    """Decorator of a function that yields a group's items."""

    def add(items: Callable) -> Callable:
        GROUPS[items.__name__] = Group(items, seconds, workers)
        return items

    return add


def item(name: str, run: Callable, *arguments: Any, seconds: float = 60.0) -> Item:
    return Item(name, functools.partial(run, *arguments), seconds)


# --- Correctness -------------------------------------------------------------------------------


@group(90, workers=8)
def correct(options: argparse.Namespace) -> Iterator[Item]:
    """Plans, streams, threads, captures, each kernel once; new kernels under compute-sanitizer."""
    yield Item("memcheck of new kernels", memcheck, 80.0)
    for name in ("another_stream", "two_threads", "graphed_callables"):
        yield item(name, module, "pytest", "tests/test_gpu.py", "-k", name)
    planned = "tests.kernels.planned", "--device", "cuda", "--every", "300"
    yield item("calls with plans", module, *planned)
    for name, (case, provider) in pairs().items():
        if provider.name in ("fastkd triton", "fastkd"):
            yield item(f"correct {name}", right, case, provider)


def right(case: Case, provider: Provider) -> str:
    """Value and gradients against float64; a plan gives the bits of the call as written."""
    inputs = made(case, provider)
    _, problem = Oracle(case, DEVICE).check(provider)
    if problem:
        raise AssertionError(problem)
    bound = provider.bind(inputs)
    with mock.patch.object(plans, "ENABLED", False):
        loss, grads = bound.step()
    for _ in range(SIGHTS):
        found, other = bound.step()
        if not same_bits((loss, *grads), (found, *other)):
            raise AssertionError("a plan gives other bits")
    if plans.problem is not None:
        raise AssertionError(plans.problem)
    proved = [x for found in plans._plans.values() for x in found if x.proved is not None]
    return f"{len(proved)} plans"


def same_bits(found: Any, expected: Any) -> bool:
    return all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(found, expected, strict=True)
    )


def made(case: Case, provider: Provider) -> dict[str, Any]:
    """Inputs of a case, if the provider can run here."""
    reason = provider.why_not(DEVICE)
    if reason is not None:
        raise LeftOut(reason)
    torch.manual_seed(0)
    return case.make(device=DEVICE, dtype=case.dtype, **case.sizes)


def memcheck() -> None:
    """Kernels that no GPU has run yet under compute-sanitizer, at toy sizes."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if tool is None:
        raise LeftOut("compute-sanitizer is not installed")
    needs_gpu()
    checked = (tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    own = (sys.executable, "-m", "tools.gpu_check", "--digest", "new")
    # The caching allocator hides accesses beyond a tensor's end.
    command(*checked, *own, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def needs_gpu() -> None:
    if DEVICE.type != "cuda":
        raise LeftOut("needs a CUDA device")


def module(*arguments: str, seconds: float = 50.0) -> None:
    """Run a module as a command, with one thread."""
    needs_gpu()
    one_thread = {"OMP_NUM_THREADS": "1"}
    command(sys.executable, "-m", *arguments, seconds=seconds, environment=one_thread)


def command(
    *arguments: str, seconds: float = 50.0, environment: Mapping[str, str] | None = None
) -> None:
    """Run in the repository's root; raises with the last lines of a command that fails."""
    process = subprocess.Popen(
        arguments, cwd=ROOT, env={**os.environ, **(environment or {})}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    late = ""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = f"not finished after {seconds:.0f} s; "
        process.send_signal(signal.SIGINT)  # pytest then writes what it has
        try:
            output, _ = process.communicate(timeout=STOPPING)
        except subprocess.TimeoutExpired:
            output = ""
    finally:
        status = apart.stop(process)  # with the processes that it started
    if late or status:
        print(output)
        raise RuntimeError(f"{late}status {status}: {output.strip()[-300:]}")


# --- Rows of the tables ------------------------------------------------------------------------


class Unplanned(Bound):
    """A provider's step as written."""

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        with mock.patch.object(plans, "ENABLED", False):
            return super().step()


@group(80)
def headline(options: argparse.Namespace) -> Iterator[Item]:
    """Milliseconds of the README's cases, with plans and without."""
    for case in suite.cases(kernel_times.SETS):
        if case.headline:
            yield item(f"row {case.key}", timed, sized(case, options))


def sized(case: Case, options: argparse.Namespace) -> Case:
    return suite.toy(case) if options.dry else case


def timed(case: Case) -> dict[str, float]:
    provider = kernel_times.own_provider(case)
    bound = provider.bind(made(case, provider))
    for _ in range(SIGHTS):
        bound.step()
    both = {"with plans": bound, "as written": Unplanned(bound.forward, bound.leaves)}
    samples = interleaved(both, DEVICE, 1.5, 5)
    return {name: statistics.median(rounds) * 1e3 for name, rounds in samples.items()}


@group(30)
def host(options: argparse.Namespace) -> Iterator[Item]:
    """Microseconds of the host for a forward and a backward pass, with plans and without."""
    yield item("host with plans", host_times, True)
    yield item("host as written", host_times, False)


def host_times(planned: bool) -> dict[str, list[float]]:
    needs_gpu()
    from tools.host_time import calls as host_calls  # one thread from here on

    found = {}
    with mock.patch.object(plans, "ENABLED", planned), torch.device(DEVICE):
        for key, bound in host_calls.cases():
            found[key] = host_calls.measured(bound, lambda: 0, 100)[:2]
            torch.cuda.synchronize()
    return found


@group(185)
def steps(options: argparse.Namespace) -> Iterator[Item]:
    """Whole training steps: the benchmark's set, which the last group then has."""
    yield bench_item("step", "step", options)


@group(300)
def build(options: argparse.Namespace) -> Iterator[Item]:
    """The extension's CUDA part, where it is missing and can be built; its items need it."""
    yield Item("build", build_extension, 300.0)


@group(180)
def kernels(options: argparse.Namespace) -> Iterator[Item]:
    """Durations of all kernels of a step, first of cases with a language model's numbers."""
    yield item("limits", described, options.commit)
    for case in sorted(suite.cases(kernel_times.SETS), key=lambda x: (not x.data, not x.headline)):
        yield item(f"kernels {case.key}", kernel_row, sized(case, options), seconds=30.0)


def described(commit: str | None) -> dict[str, Any]:
    dtypes = torch.bfloat16, torch.float32
    return machine.describe(DEVICE, commit) | {"limits": limits(DEVICE, dtypes)}


def kernel_row(case: Case) -> dict[str, Any]:
    if DEVICE.type != "cuda":
        timed(case)
        raise LeftOut("durations are a GPU's")
    return kernel_times.row(case)


def build_extension() -> None:
    if extension.CUDA:
        raise LeftOut("it is there")
    if recipe.find_nvcc() is None or DEVICE.type != "cuda":
        raise LeftOut("no nvcc: roots run in PyTorch")
    command(sys.executable, "setup.py", "-q", "build_ext", "--inplace", seconds=280.0)


# --- The rest ----------------------------------------------------------------------------------


@group(90, workers=4)
def graphs(options: argparse.Namespace) -> Iterator[Item]:
    """Every case captured in a CUDA graph."""
    for name, (case, provider) in pairs().items():
        if not waits(case):
            yield item(f"graph {name}", graph, case, provider)


def graph(case: Case, provider: Provider) -> None:
    """The replayed graph's values and gradients are those of the step as written."""
    needs_gpu()
    bound = provider.bind(made(case, provider))
    bound.step()
    captured = GraphBound(bound)
    for what in ("", " for other inputs, which it has to read anew"):
        loss, grads = bound.step()
        replayed, others = captured.step()
        torch.cuda.synchronize()
        if not same_bits((loss, *grads), (replayed, *others)):
            raise AssertionError(f"the graph gives other numbers{what}")
        with torch.no_grad():
            for leaf in bound.leaves:
                leaf.mul_(0.5)


@group(240, workers=8)
def tests(options: argparse.Namespace) -> Iterator[Item]:
    """The parity tests on CUDA, a file at a time, and the tests marked gpu."""
    out = Path(options.out).resolve()
    for path in PARITY:
        given = ["pytest", path, "-k", WITHOUT, f"--junitxml={out / Path(path).stem}.xml"]
        yield Item(path, functools.partial(module, *given, seconds=200.0), 215.0)


@group(120)
def bits(options: argparse.Namespace) -> Iterator[Item]:
    yield Item("bits", equal_bits, 120.0)


def equal_bits() -> str:
    """Values and gradients of two processes, bit by bit."""
    needs_gpu()
    own = [sys.executable, "-m", "tools.gpu_check", "--digest", "full"]
    runs = [subprocess.run(own, cwd=ROOT, capture_output=True, text=True) for _ in range(2)]
    if any(run.returncode for run in runs):
        raise RuntimeError(runs[0].stderr[-300:] or runs[1].stderr[-300:])
    one, two = (run.stdout.splitlines() for run in runs)
    different = [line for line, other in zip(one, two, strict=True) if line != other]
    if different:
        raise AssertionError("; ".join(different))
    return f"{len(one)} digests equal"


@group(900)
def bench(options: argparse.Namespace) -> Iterator[Item]:
    """The benchmark's sets for GPUs by priority, a loss of a set at a time."""
    for set in suite.CUDA_SETS:
        for loss in dict.fromkeys(case.loss for case in suite.cases([set])):
            yield bench_item(set, loss, options)


def bench_item(set: str, loss: str, options: argparse.Namespace) -> Item:
    return item(f"bench {set} {loss}", bench_file, set, loss, options, seconds=180.0 + STOPPING)


def bench_file(set: str, loss: str, options: argparse.Namespace) -> None:
    needs_gpu()
    out = Path(options.out).resolve() / f"bench-{set}-{loss}.json"
    given = ["-m", "pytest", f"bench/test_{loss}.py", "-m", set, "-q", "-rs"]
    environment = {"FASTKD_COMMIT": options.commit} if options.commit else {}
    one = (sys.executable, *given, f"--benchmark-json={out}")
    command(*one, seconds=165.0, environment=environment)


def run_groups(
    names: list[str], options: argparse.Namespace, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Whether every item of the groups has a line without a problem; ends in time."""
    end = clock() + 60 * options.minutes
    path = Path(options.out) / "lines.jsonl"
    known = read_lines(path) if options.resume else {}
    if not known:
        path.unlink(missing_ok=True)
    passed = True
    child = [*CHILD, *(["--dry"] if options.dry else []), f"--out={Path(options.out).resolve()}"]
    child += [f"--commit={options.commit}"] if options.commit else []
    with path.open("a") as file:

        def note(line: apart.Line) -> None:
            known[line["name"]] = line
            print(json.dumps(line), file=file, flush=True)
            if line["problem"]:
                print(f"{line['name']}: {line['problem']}", flush=True)

        for name in names:
            group = GROUPS[name]
            items = list(group.items(options))
            left = [item for item in items if known.get(item.name, {"problem": "?"})["problem"]]
            seconds = min(group.seconds, max(end - clock(), 0.0))
            print(f"== {name}: {len(left)} items, at most {seconds:.0f} s", flush=True)
            apart.ask(child, left, seconds, min(group.workers, options.workers), note)
            there = [known[item.name] for item in items if item.name in known]
            failed = sum(bool(line["problem"]) for line in there)
            print(f"{len(there)} of {len(items)} have a line, {failed} a problem", flush=True)
            passed = passed and not failed and len(there) == len(items)
            write_kernels(Path(options.out), known)
    return passed


def write_kernels(out: Path, lines: Mapping[str, apart.Line]) -> None:
    """Rows of kernels as `bench.kernel_times` reads them."""
    found = {name: x["result"] for name, x in lines.items() if isinstance(x["result"], dict)}
    cases = [row for name, row in found.items() if name.startswith("kernels ")]
    if cases and "limits" in found:
        text = json.dumps(found["limits"] | {"cases": cases}, indent=1)
        (out / "kernels.json").write_text(text + "\n")


def read_lines(path: Path) -> dict[str, apart.Line]:
    """The last line of each item."""
    if not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")]
    return {line["name"]: line for line in lines}


def serve(options: argparse.Namespace) -> None:
    """A child process: runs the named items."""

    def guarded(item: Item) -> Any:
        try:
            result = item.run()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()  # a fault belongs to this item
        except LeftOut as reason:
            return f"left out: {reason}"
        return result

    items = [item for group in GROUPS.values() for item in group.items(options)]
    own = {x.name: x._replace(run=functools.partial(guarded, x)) for x in items}
    apart.serve(own, functools.partial(release, DEVICE))


def pairs(toys: bool = DEVICE.type != "cuda") -> dict[str, tuple[Case, Provider]]:
    """Cases with fastkd's backends: each loss, title and dtype at toy sizes; BERT's on a GPU."""
    cases = [suite.toy(case) for case in suite.every_case()]
    if not toys:
        cases += suite.cases(["bert"])
    return {
        f"{case.set} {case.key} {provider.name}": (case, provider)
        for case in {case.key: case for case in cases if case.loss != "step"}.values()
        for provider in case.providers
        if provider.name.startswith("fastkd") and "graph" not in provider.name
    }


def waits(case: Case) -> bool:
    """Whether only PyTorch computes eigenvectors: it waits, and can't be captured."""
    sizes = case.sizes
    n = sizes.get("n", 0)  # roots.cu's `has_kernel`
    return case.loss == "linalg" and (n > 256 or n * n > 5500 * sizes["batch"])


def digests(size: str) -> Iterator[str]:
    """A line for each case and backend: SHA-256 of the value and gradients of one step."""
    for name, (case, provider) in pairs(toys=size != "full").items():
        new = case.loss in NEW and provider.name in ("fastkd triton", "fastkd")
        if provider.why_not(DEVICE) is None and (new or size != "new"):
            loss, grads = provider.bind(made(case, provider)).step()
            parts = (x.reshape(-1).contiguous().view(torch.uint8).cpu() for x in (loss, *grads))
            found = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts))
            yield f"{name} {found.hexdigest()[:16]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(GROUPS)}")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all groups together")
    parser.add_argument("--out", default=str(ROOT / "runs" / "gpu"), help="folder of results")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 14))
    parser.add_argument("--commit", help="recorded where git can't tell")
    parser.add_argument("--resume", action="store_true", help="go on, and try problems again")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at toy sizes")
    parser.add_argument("--digest", choices=("toy", "new", "full"), help="print digests and stop")
    parser.add_argument("--serve", action="store_true", help="run items named on standard input")
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or options.dry):
        print(f"make gpu-check needs a CUDA device; torch {torch.__version__} sees none")
        return 2
    if options.digest:
        print(*digests(options.digest), sep="\n")
        return 0
    if options.serve:
        serve(options)
        return 0
    only = options.only.replace(" ", "").split(",") if options.only else list(GROUPS)
    if unknown := [name for name in only if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    return 0 if run_groups([name for name in GROUPS if name in only], options) else 1


if __name__ == "__main__":
    sys.exit(main())
