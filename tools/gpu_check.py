"""``make gpu-check``: what only a GPU can show, the most important first, within ``--minutes``.

`GROUPS` lists it: correctness, rows of the tables, then the rest; ``--only correct,headline``
selects some. An item runs in a process that has had no fault before (`tools.apart`), and its line
is in ``--out`` (lines.jsonl) before anything else happens. ``--resume`` keeps the lines without a
problem, and tries the others. What is missing here (an extension, compute-sanitizer) leaves out its
own items. ``--dry`` runs the items on the CPU, at toy sizes. The exit status is 0 if every item has
a line without a problem.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import setup as recipe
from bench import kernel_times, suite
from bench.case import Bound, Case, GraphBound, Provider
from bench.group import DEVICE
from bench.measure import Oracle, interleaved, limits, release, seconds_of
from bench.test_step import StepBound, method_step
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
METHODS = "FCD", "MC3KD", "SoftTargets"  # of whole steps
CHILD = [sys.executable, "-m", "tools.gpu_check", "--serve"]


class LeftOut(Exception):
    """An item needs what this machine doesn't have: no problem."""


@dataclass(frozen=True)
class Group:
    """``items`` lists what `GROUPS` runs at most for ``seconds``, so many at a time."""

    items: Callable[[argparse.Namespace], list[Item]]
    seconds: float
    workers: int = 1


# --- Correctness -------------------------------------------------------------------------------


def correct(options: argparse.Namespace) -> list[Item]:
    """Plans, streams, threads, captures, each kernel once; new kernels under compute-sanitizer."""
    gpu = "tests/test_gpu.py"
    asked = {
        "another stream": [gpu, "-k", "another_stream"],
        "two threads": [gpu, "-k", "two_threads"],
        "captures around a record": [gpu, "-k", "graphed_callables"],
    }
    items = [Item("memcheck of new kernels", memcheck, 80.0)]
    items += [Item(name, functools.partial(pytest, *given)) for name, given in asked.items()]
    items.append(Item("calls with plans", planned_calls))
    for name, (case, provider) in pairs().items():
        if provider.name in ("fastkd triton", "fastkd"):
            items.append(Item(f"correct {name}", functools.partial(right, case, provider)))
    return items


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


def planned_calls() -> None:
    needs_gpu()
    own = (sys.executable, "-m", "tests.kernels.planned", "--device", "cuda")
    command(*own, "--every", "300")


def memcheck() -> None:
    """Kernels that no GPU has run yet under compute-sanitizer, at toy sizes."""
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
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


def pytest(*arguments: str, seconds: float = 50.0) -> None:
    needs_gpu()
    one_thread = {"OMP_NUM_THREADS": "1"}
    command(sys.executable, "-m", "pytest", *arguments, seconds=seconds, environment=one_thread)


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


def headline(options: argparse.Namespace) -> list[Item]:
    """Milliseconds of the README's cases, with plans and without."""
    cases = [case for case in suite.cases(kernel_times.SETS) if case.headline]
    return [Item(f"row {c.key}", functools.partial(timed, sized(c, options))) for c in cases]


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


def host(options: argparse.Namespace) -> list[Item]:
    """Microseconds of the host for a forward and a backward pass, with plans and without."""
    names = "with plans", "as written"
    return [Item(f"host {n}", functools.partial(host_times, n == names[0])) for n in names]


def host_times(planned: bool) -> dict[str, list[float]]:
    needs_gpu()
    from tools.host_time import calls as host_calls  # one thread from here on

    found = {}
    with mock.patch.object(plans, "ENABLED", planned):
        with torch.device(DEVICE):
            cases = host_calls.cases()
        for name, case in cases.items():
            found[name] = host_calls.measured(case, lambda: 0, 100)[:2]
            torch.cuda.synchronize()
    return found


def steps(options: argparse.Namespace) -> list[Item]:
    """A whole training step of BERT-base and a student of six layers: milliseconds and memory."""
    (case,) = (c for c in suite.cases(["step"]) if c.title == "training step")
    case = sized(case, options)
    items = []
    for name in METHODS:
        for captured in (False, True):
            how = "captured" if captured else "eager"
            run = functools.partial(whole_step, case, name, captured)
            items.append(Item(f"step {name}, {how}", run))
    return items


def whole_step(case: Case, name: str, captured: bool) -> dict[str, float]:
    if captured:
        needs_gpu()
    inputs, on_gpu = made(case, case.providers[0]), DEVICE.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    bound = method_step(name, 0.0)(inputs)
    assert isinstance(bound, StepBound)
    for group in bound.optimizer.param_groups:
        group["capturable"] = captured
    if captured:
        bound = GraphBound(bound)
    times = [seconds_of(bound, DEVICE) for _ in range(SIGHTS + 20 if on_gpu else 2)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return {"ms": statistics.median(times[-20:]) * 1e3, "peak_bytes": peak}


def rows(options: argparse.Namespace, data: bool) -> list[Item]:
    """Durations of all kernels of a step; ``data``: of cases with a language model's numbers."""
    commit = options.commit
    cases = sorted(suite.cases(kernel_times.SETS), key=lambda case: not case.headline)
    items = [] if data else [Item("limits", functools.partial(described, commit))]
    for case in cases:
        if bool(case.data) == data:
            run = functools.partial(kernel_row, sized(case, options))
            items.append(Item(f"kernels {case.key}", run, 30.0))
    return items


def described(commit: str | None) -> dict[str, Any]:
    dtypes = torch.bfloat16, torch.float32
    return machine.describe(DEVICE, commit) | {"limits": limits(DEVICE, dtypes)}


def kernel_row(case: Case) -> dict[str, Any]:
    if DEVICE.type != "cuda":
        timed(case)
        raise LeftOut("durations are a GPU's")
    return kernel_times.row(case)


def build(options: argparse.Namespace) -> list[Item]:
    """The extension's CUDA part, where it is missing and can be built; its items need it."""
    return [Item("build", build_extension, 300.0)]


def build_extension() -> None:
    if extension.CUDA:
        raise LeftOut("it is there")
    if recipe.find_nvcc() is None or DEVICE.type != "cuda":
        raise LeftOut("no nvcc: roots run in PyTorch")
    command(sys.executable, "setup.py", "-q", "build_ext", "--inplace", seconds=280.0)


# --- The rest ----------------------------------------------------------------------------------


def graphs(options: argparse.Namespace) -> list[Item]:
    """Every case captured in a CUDA graph."""
    return [
        Item(f"graph {name}", functools.partial(graph, case, provider))
        for name, (case, provider) in pairs().items()
        if not waits(case)
    ]


def graph(case: Case, provider: Provider) -> None:
    needs_gpu()
    made(case, provider)
    problem = graph_problem(case, provider, DEVICE)
    if problem:
        raise AssertionError(problem)


def tests(options: argparse.Namespace) -> list[Item]:
    """The parity tests on CUDA, a file at a time, and the tests marked gpu."""
    out = Path(options.out).resolve()
    items = []
    for path in PARITY:
        given = [path, "-k", WITHOUT, f"--junitxml={out / Path(path).stem}.xml"]
        run = functools.partial(pytest, *given, seconds=200.0)
        items.append(Item(path, run, 215.0))
    return items


def bits(options: argparse.Namespace) -> list[Item]:
    return [Item("bits", equal_bits, 120.0)]


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


def compare_machine(options: argparse.Namespace) -> list[Item]:
    """The GPU's results, and the same compiled code executed by `tools.executed`."""
    return [
        Item(f"machine {name}", functools.partial(machine_item, case, provider))
        for name, (case, provider) in pairs().items()
        if provider.name == "fastkd triton" and not provider.own_leaves
        if case.sizes == suite.toy(case).sizes
    ]


def machine_item(case: Case, provider: Provider) -> str:
    needs_gpu()
    made(case, provider)
    problem, equal = against_machine(case, provider, DEVICE)
    if problem:
        raise AssertionError(problem)
    return "equal bits" if equal else "other last bits"


def bench(options: argparse.Namespace) -> list[Item]:
    """The benchmark's sets for GPUs by priority, a loss of a set at a time."""
    found = {(case.set, case.loss): None for case in suite.cases(suite.CUDA_SETS)}
    items = []
    for set, loss in sorted(found, key=lambda pair: suite.CUDA_SETS.index(pair[0])):
        run = functools.partial(bench_file, set, loss, options)
        items.append(Item(f"bench {set} {loss}", run, 180.0 + STOPPING))
    return items


def bench_file(set: str, loss: str, options: argparse.Namespace) -> None:
    needs_gpu()
    out = Path(options.out).resolve() / f"bench-{set}-{loss}.json"
    given = ["-m", "pytest", f"bench/test_{loss}.py", "-m", set, "-q", "-rs"]
    environment = {"FASTKD_COMMIT": options.commit} if options.commit else {}
    one = (sys.executable, *given, f"--benchmark-json={out}")
    command(*one, seconds=165.0, environment=environment)


# Name → items, most seconds, and how many at a time: one where times are measured.
GROUPS = {
    "correct": Group(correct, 90, 8),
    "headline": Group(headline, 80),
    "host": Group(host, 30),
    "steps": Group(steps, 90),
    "data": Group(functools.partial(rows, data=True), 60),
    "build": Group(build, 300),
    "kernels": Group(functools.partial(rows, data=False), 120),
    "graphs": Group(graphs, 90, 4),
    "tests": Group(tests, 240, 8),
    "bits": Group(bits, 120),
    "machine": Group(compare_machine, 90, 8),
    "bench": Group(bench, 900),
}


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
            items = group.items(options)
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


def chosen(names: str) -> list[str]:
    """Names of a comma-separated list."""
    return [name.strip() for name in names.split(",") if name.strip()]


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


def pairs() -> dict[str, tuple[Case, Provider]]:
    """Cases with fastkd's backends: each loss, title and dtype at toy sizes, and BERT's sizes."""
    cases = [suite.toy(case) for case in suite.every_case()]
    if DEVICE.type == "cuda":
        cases += suite.cases(["bert"])
    return {
        f"{case.set} {case.key} {provider.name}": (case, provider)
        for case in {case.key: case for case in cases if case.loss != "step"}.values()
        for provider in chosen_providers(case)
    }


def waits(case: Case) -> bool:
    """Whether only PyTorch computes eigenvectors: it waits, and can't be captured."""
    sizes = case.sizes
    n = sizes.get("n", 0)  # roots.cu's `has_kernel`
    return case.loss == "linalg" and (n > 256 or n * n > 5500 * sizes["batch"])


def graph_problem(case: Case, provider: Provider, device: torch.device) -> str:
    """Problem of the replayed graph's values and gradients; "" if they are right."""
    if provider.why_not(device) is not None:
        return ""
    bound = provider.bind(case.make(device=device, dtype=case.dtype, **case.sizes))
    bound.step()
    captured = GraphBound(bound)
    for what in ("", " for other inputs, which it has to read anew"):
        loss, grads = bound.step()
        replayed_loss, replayed = captured.step()
        torch.cuda.synchronize()
        same = torch.equal(loss, replayed_loss)
        if not same or not all(map(torch.equal, grads, replayed)):
            return f"the graph gives other numbers{what}"
        with torch.no_grad():
            for leaf in bound.leaves:
                leaf.mul_(0.5)
    return ""


def chosen_providers(case: Case) -> Iterator[Provider]:
    """fastkd's own backends, without graphs."""
    for provider in case.providers:
        if provider.name.startswith("fastkd") and "graph" not in provider.name:
            yield provider


def digests(size: str, device: torch.device) -> Iterator[str]:
    """A line for each case and backend: SHA-256 of the value and gradients of one step."""
    cases = [suite.toy(case) for case in suite.every_case() if case.loss != "step"]
    if size == "new":
        cases = [case for case in cases if case.loss in NEW]
    if size == "full":
        cases += [case for case in suite.cases(["bert"]) if case.loss != "step"]
    for case in {(c.key, c.set): c for c in cases}.values():
        for provider in chosen_providers(case):
            others = size == "new" and provider.name not in ("fastkd triton", "fastkd")
            if not others and provider.why_not(device) is None:
                inputs = case.make(device=device, dtype=case.dtype, **case.sizes)
                loss, grads = provider.bind(inputs).step()
                summary = hashlib.sha256()
                for x in (loss, *grads):
                    summary.update(
                        x.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()
                    )
                yield f"{case.key} {provider.name} {summary.hexdigest()[:16]}"


# Largest difference of the GPU's results from the executed code's, relative to the largest value:
# `.approx` instructions and the order of sums in tensor cores differ in their last bits.
DIFFERENCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def step(case: Case, provider: Provider, inputs: dict[str, Any]) -> list[Tensor]:
    """Value and gradients of one step, on the CPU."""
    torch.manual_seed(0)
    loss, grads = provider.bind(inputs).step()
    return [x.detach().cpu() for x in (loss, *grads)]


def against_machine(case: Case, provider: Provider, device: torch.device) -> tuple[str, bool]:
    """Problem of the device's results or "", and whether they have the executed code's bits."""
    from tools.executed import executing
    from tools.ptx.memory import Hazard

    major, _ = torch.cuda.get_device_capability(device)
    inputs = case.make(device=torch.device("cpu"), dtype=case.dtype, **case.sizes)
    on_device = tree_map_only(Tensor, lambda x: copied(x, device), inputs)
    found = step(case, provider, on_device)
    try:
        with executing(90 if major >= 9 else 80):  # tcgen05 is not executed
            expected = step(case, provider, inputs)
    except Hazard as hazard:
        return f"executed here: {hazard}", False
    problem = difference(found, expected, DIFFERENCE[case.dtype])
    return problem, all(map(torch.equal, found, expected))


def copied(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().to(device).requires_grad_(x.requires_grad)


def difference(found: list[Tensor], right: list[Tensor], most: float) -> str:
    """Why two lists of tensors don't agree; "" if they do."""
    for number, (x, y) in enumerate(zip(found, right, strict=True)):
        what = f"gradient {number}" if number else "the loss"
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{what}: {x.dtype} {tuple(x.shape)}, executed {y.dtype} {tuple(y.shape)}"
        x, y = x.double(), y.double()
        if not torch.equal(x.isnan(), y.isnan()):
            return f"{what}: NaN at other places"
        largest = y.abs().nan_to_num().amax() if y.numel() else torch.tensor(0.0)
        worst = (x - y).abs().nan_to_num().amax() if y.numel() else torch.tensor(0.0)
        if worst > most * largest:
            return f"{what}: differs by {float(worst / largest):.2g} of the largest value"
    return ""


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
        for line in digests(options.digest, DEVICE):
            print(line, flush=True)
        return 0
    if options.serve:
        serve(options)
        return 0
    only = chosen(options.only) or list(GROUPS)
    if unknown := [name for name in only if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    return 0 if run_groups([name for name in GROUPS if name in only], options) else 1


if __name__ == "__main__":
    sys.exit(main())
