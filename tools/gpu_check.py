"""``make gpu-check``: everything that only a GPU can show, within a given time.

The stages are `STAGES`; ``--only tests,graphs`` selects some. A call ends after ``--minutes``: each
stage gets a fraction of the remaining time and leaves unused time to the next. Results are written
to ``--out`` at once, and ``--resume`` continues an earlier call. A failed stage does not stop the
others; the exit status is 0 if all passed. Everything takes two calls, ``--only
build,tests,graphs`` and ``--only bench``, which times the benchmark's sets by priority.
"""

import argparse
import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bench import suite
from bench.case import Case, GraphBound, Provider
from bench.measure import one_line

ROOT = Path(__file__).resolve().parent.parent
GENERAL = "values", "edges", "layouts", "derivatives", "errors"  # of every loss
PARITY = (
    *(
        f"tests/test_{name}.py"
        for name in (*suite.LOSSES, *GENERAL, "extension", "numerics", "gpu")
        if name != "step"
    ),
    "tests/kernels",
)
# Compilers and C++ need no GPU, and graphs are a stage of their own.
WITHOUT = "not compil and not graph and not inductor and not cpp"
GRAPH_SECONDS = 60.0  # for one capture; a hang ends there
STOPPING = 10.0  # seconds in which an interrupted command writes its results


@dataclass(frozen=True)
class Job:
    """Options of a stage and the time when it must end."""

    options: argparse.Namespace
    seconds: float

    @property
    def out(self) -> Path:
        return Path(self.options.out)


def build(job: Job) -> bool:
    """Build the extension in place; without it the package runs on PyTorch code."""
    return command(job, sys.executable, "setup.py", "-q", "build_ext", "--inplace")


def tests(job: Job) -> bool:
    """Run the parity tests on CUDA, and the tests marked gpu."""
    arguments = ["-m", "pytest", *PARITY, "-k", WITHOUT, f"--junitxml={job.out / 'tests.xml'}"]
    if job.options.workers > 1:
        arguments += ["-n", str(job.options.workers)]
    return command(job, sys.executable, *arguments, environment={"OMP_NUM_THREADS": "1"})


def graphs(job: Job) -> bool:
    """Capture every case in a CUDA graph; a failed capture ends only its own process."""
    results = job.out / "graphs.jsonl"
    known = read_lines(results) if job.options.resume else {}
    if not known:
        results.unlink(missing_ok=True)
    names = [name for name, (case, _) in pairs().items() if not waits(case)]
    command = [sys.executable, "-m", "tools.gpu_check", "--capture"]
    left = [name for name in names if known.get(name) != ""]
    answers = ask_children(command, left, job.seconds, min(job.options.workers, 4), GRAPH_SECONDS)
    failed = 0
    with results.open("a") as file:
        for name, problem in answers:
            print(json.dumps({"name": name, "problem": problem}), file=file, flush=True)
            if problem:
                failed += 1
                print(f"{name}: {problem}", flush=True)
    done = sum(name in read_lines(results) for name in names)
    print(f"{done} of {len(names)} captured or tried, {failed} failed")
    return not failed and done == len(names)


def bits(job: Job) -> bool:
    """Compare values and gradients of two processes bit by bit."""
    arguments = [sys.executable, "-m", "tools.gpu_check", "--digest", "full"]
    outputs = []
    for _ in range(2):
        try:
            run = subprocess.run(
                arguments, cwd=ROOT, capture_output=True, text=True, timeout=job.seconds / 2
            )
        except subprocess.TimeoutExpired:
            print(f"not finished after {job.seconds / 2:.0f} s")
            return False
        if run.returncode:
            print(run.stderr[-2000:])
            return False
        outputs.append(run.stdout.splitlines())
    different = [line for line, other in zip(*outputs, strict=True) if line != other]
    print("\n".join(different) or f"{len(outputs[0])} digests equal")
    return not different


def bench(job: Job) -> bool:
    """Run the benchmark sets for GPUs by priority, with a result file each."""
    end = time.monotonic() + job.seconds - STOPPING
    environment = {"FASTKD_COMMIT": job.options.commit} if job.options.commit else {}
    finished = True
    for name in chosen(job.options.set) or suite.CUDA_SETS:
        out = job.out / f"bench-{name}.json"
        if job.options.resume and out.exists():
            continue
        partial = out.with_suffix(".partial.json")
        arguments = ["-m", "pytest", "bench", "-m", name, "-rs", f"--benchmark-json={partial}"]
        left = Job(job.options, max(end - time.monotonic(), 0.0))
        if not command(left, sys.executable, *arguments, environment=environment):
            finished = False
        elif partial.exists():
            partial.rename(out)
    return finished


def kernels(job: Job) -> bool:
    """Measure the run time of each kernel at the benchmarks' sizes."""
    commit = ["--commit", job.options.commit] if job.options.commit else []
    seconds = f"--seconds={job.seconds - STOPPING:.0f}"
    own = [sys.executable, "-m", "bench.kernel_times", f"--out={job.out / 'kernels.json'}"]
    return command(job, *own, seconds, *commit)


def sanitizer(job: Job) -> bool:
    """Run every Triton kernel under compute-sanitizer's memcheck, at toy sizes."""
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        print("compute-sanitizer is not installed: skipped")
        return True
    # The caching allocator hides accesses beyond a tensor's end.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    memcheck = (tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    own = (sys.executable, "-m", "tools.gpu_check", "--digest", "toy")
    return command(job, *memcheck, *own, environment=environment)


def machine(job: Job) -> bool:
    """Compare the GPU's results with the same compiled code executed by `tools.executed`."""
    return command(job, sys.executable, "-m", "tools.gpu_check", "--machine")


# Name → function and weight of its share of the time.
STAGES: dict[str, tuple[Callable[[Job], bool], float]] = {
    "build": (build, 1),
    "tests": (tests, 5),
    "graphs": (graphs, 3),
    "bench": (bench, 8),
    "kernels": (kernels, 3),
    "bits": (bits, 2),
    "machine": (machine, 2),
    "sanitizer": (sanitizer, 2),
}


def run_stages(
    stages: Mapping[str, tuple[Callable[[Job], bool], float]],
    options: argparse.Namespace,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[str, bool, float]]:
    """Name, whether it passed, and seconds, of every stage; together no longer than allowed."""
    end = clock() + 60 * options.minutes
    outcome: list[tuple[str, bool, float]] = []
    for number, (name, (stage, share)) in enumerate(stages.items()):
        start = clock()
        to_come = sum(share for _, share in list(stages.values())[number:])
        seconds = max(end - start, 0) * share / to_come
        print(f"\n== {name}, at most {seconds:.0f} s", flush=True)
        try:
            passed = seconds > 0 and stage(Job(options, seconds))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            passed = False
        outcome.append((name, passed, clock() - start))
        save(Path(options.out) / "gpu_check.json", outcome)
    return outcome


def save(path: Path, outcome: list[tuple[str, bool, float]]) -> None:
    rows = [{"stage": name, "passed": ok, "seconds": round(s, 1)} for name, ok, s in outcome]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def command(job: Job, *arguments: str, environment: dict[str, str] | None = None) -> bool:
    """Run in the repository's root, output straight through; True if it succeeded in time."""
    variables = {**os.environ, **(environment or {})}
    with subprocess.Popen(arguments, cwd=ROOT, env=variables, start_new_session=True) as process:
        try:
            return process.wait(job.seconds) == 0
        except subprocess.TimeoutExpired:
            print(f"not finished after {job.seconds:.0f} s: stopped; --resume goes on")
            process.send_signal(signal.SIGINT)  # pytest then writes what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOPPING)
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started


def ask_children(
    command: list[str], questions: list[str], seconds: float, workers: int, patience: float
) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs from ``workers`` processes that read a line and answer with a line.

    If a process ends, or does not answer within ``patience`` seconds, the answer says so. After an
    answer that is not empty the next question gets a new process. Questions left after ``seconds``
    are omitted.
    """
    end = time.monotonic() + seconds
    idle: list[subprocess.Popen[str]] = []

    def ask(question: str) -> tuple[str, str] | None:
        if time.monotonic() >= end:
            return None
        try:
            child = idle.pop()
        except IndexError:
            child = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        answer = _answer(child, question, min(patience, end - time.monotonic()))
        if answer == "":
            idle.append(child)
            return question, answer
        child.kill()
        ended = child.wait()
        return question, answer or f"its process ended ({ended}) or hung"

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        for asked in as_completed([pool.submit(ask, question) for question in questions]):
            if found := asked.result():
                yield found
    for child in idle:
        child.kill()
        child.wait()


def _answer(child: "subprocess.Popen[str]", question: str, patience: float) -> str | None:
    assert child.stdin is not None and child.stdout is not None
    try:
        print(question, file=child.stdin, flush=True)
    except BrokenPipeError:
        return None
    ready, _, _ = select.select([child.stdout], [], [], patience)
    line = child.stdout.readline() if ready else ""
    return json.loads(line) if line else None


def read_lines(path: Path) -> dict[str, str]:
    """Problem ("" for none) by name, from a file of JSON lines."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["name"]: row["problem"] for row in rows}


def chosen(names: str) -> list[str]:
    """Names of a comma-separated list."""
    return [name.strip() for name in names.split(",") if name.strip()]


def pairs() -> dict[str, tuple[Case, Provider]]:
    """Cases with fastkd's backends: each loss, title and dtype at toy sizes, and BERT's sizes."""
    cases = [suite.toy(case) for case in suite.every_case()] + suite.cases(["bert"])
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


def capture(device: torch.device) -> None:
    """Print the problem of each case named on standard input when captured in a graph."""
    known = pairs()
    for line in sys.stdin:
        case, provider = known[line.rstrip("\n")]
        try:
            problem = graph_problem(case, provider, device)
        except Exception as error:
            problem = f"{type(error).__name__}: {one_line(error)}"
        print(json.dumps(problem), flush=True)
        if problem:
            break  # a failed capture leaves the device unusable


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
    if size == "full":
        cases += [case for case in suite.cases(["bert"]) if case.loss != "step"]
    for case in {(c.key, c.set): c for c in cases}.values():
        for provider in chosen_providers(case):
            if provider.why_not(device) is None:
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


def against_machine(device: torch.device) -> Iterator[tuple[str, str]]:
    """Each toy case with Triton kernels, and the problem of the device's results or ""."""
    from tools.executed import executing
    from tools.ptx.memory import Hazard

    major, _ = torch.cuda.get_device_capability(device)
    capability = 90 if major >= 9 else 80  # tcgen05 is not executed
    equal = compared = 0
    for name, (case, provider) in pairs().items():
        if provider.name != "fastkd triton" or provider.own_leaves:
            continue
        if case.sizes != suite.toy(case).sizes or provider.why_not(device) is not None:
            continue
        inputs = case.make(device=torch.device("cpu"), dtype=case.dtype, **case.sizes)
        on_device = tree_map_only(Tensor, lambda x: copied(x, device), inputs)
        found = step(case, provider, on_device)
        try:
            with executing(capability) as launches:
                right = step(case, provider, inputs)
        except Hazard as hazard:
            yield name, f"executed here: {hazard}"
            continue
        if launches:
            equal += all(map(torch.equal, found, right))
            compared += 1
            yield name, difference(found, right, DIFFERENCE[case.dtype])
    print(f"{equal} of {compared} cases have the same bits as sm_{capability} code executed here")


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
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(STAGES)}")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together")
    parser.add_argument("--out", default=str(ROOT / "runs" / "gpu"), help="folder of results")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 14))
    parser.add_argument("--set", default="", help="size sets of the benchmark; all if empty")
    parser.add_argument("--commit", help="recorded where git can't tell")
    parser.add_argument("--resume", action="store_true", help="go on where the last call ended")
    parser.add_argument("--digest", choices=("toy", "full"), help="print digests and stop")
    parser.add_argument("--machine", action="store_true", help="compare with executed code")
    parser.add_argument("--capture", action="store_true", help="capture the cases asked for")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"make gpu-check needs a CUDA device; torch {torch.__version__} sees none")
        return 2
    if options.digest:
        for line in digests(options.digest, torch.device("cuda")):
            print(line, flush=True)
        return 0
    if options.machine:
        wrong = [(name, why) for name, why in against_machine(torch.device("cuda")) if why]
        print("\n".join(f"{name}: {why}" for name, why in wrong))
        return 1 if wrong else 0
    if options.capture:
        capture(torch.device("cuda"))
        return 0
    only = chosen(options.only) or list(STAGES)
    if unknown := [name for name in only if name not in STAGES]:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    outcome = run_stages({name: STAGES[name] for name in STAGES if name in only}, options)
    print()
    for name, passed, seconds in outcome:
        print(f"{name}: {'passed' if passed else 'FAILED'} ({seconds:.0f} s)")
    return 0 if all(passed for _, passed, _ in outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
