"""``make gpu-check``: everything that only a GPU can show, in one command.

Builds the extension, runs the parity suite and the tests marked ``gpu``, looks for memory errors
with compute-sanitizer where it is installed, compares the bits of two processes, then measures
every GPU set and writes ``bench/results/<gpu>.json``. A step that fails doesn't stop the others;
the exit status says whether all passed. ``--resume`` continues a benchmark that was cut short.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from . import runner, suite
from .harness import Case, Provider
from .passes import PassFailed

ROOT = Path(__file__).resolve().parent.parent
PARITY = (
    *(
        f"tests/test_{name}.py"
        for name in (*suite.LOSSES, "extension", "numerics", "gpu")
        if name != "step"
    ),
    "tests/kernels",
)


def build(options: argparse.Namespace) -> bool:
    """The extension in place; without it the package runs on PyTorch code."""
    return command(sys.executable, "setup.py", "-q", "build_ext", "--inplace")


def tests(options: argparse.Namespace) -> bool:
    """Tests marked gpu, and the whole parity suite: its ``device`` fixture takes CUDA here."""
    return command(sys.executable, "-m", "pytest", *PARITY)


def sanitizer(options: argparse.Namespace) -> bool:
    """Every Triton kernel under compute-sanitizer's memcheck, at toy sizes."""
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        print("compute-sanitizer is not installed: skipped")
        return True
    # The caching allocator hides accesses beyond a tensor's end.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    memcheck = (tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    own = (sys.executable, "-m", "bench.gpu_check", "--digest", "toy")
    return command(*memcheck, *own, environment=environment)


def bits(options: argparse.Namespace) -> bool:
    """Values and gradients of two processes, bit by bit."""
    arguments = [sys.executable, "-m", "bench.gpu_check", "--digest", "full"]
    runs = [
        subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        for _ in range(2)
    ]
    if any(run.returncode for run in runs):
        print(runs[0].stderr[-2000:], runs[1].stderr[-2000:])
        return False
    different = [
        line
        for line, other in zip(*(run.stdout.splitlines() for run in runs), strict=True)
        if line != other
    ]
    print("\n".join(different) or f"{len(runs[0].stdout.splitlines())} digests equal")
    return not different


def bench(options: argparse.Namespace) -> bool:
    """All GPU sets."""
    try:
        runner.run(
            runner.split(options.set),
            device="cuda",
            out=options.out,
            commit=options.commit,
            resume=options.resume,
            seconds=options.seconds,
            passes=options.passes,
        )
    except PassFailed as error:
        print(error)
        return False
    return True


STEPS = {step.__name__: step for step in (build, tests, sanitizer, bits, bench)}


def command(*arguments: str, environment: dict[str, str] | None = None) -> bool:
    """Run in the repository's root, output straight through; True if it succeeded."""
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(arguments, cwd=ROOT, env=variables, check=False).returncode == 0


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


def main(arguments: list[str] | None = None) -> int:
    """Run the steps and print what passed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(STEPS)}")
    parser.add_argument("--set", default="", help="size sets of the benchmark; all if empty")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results"))
    parser.add_argument("--commit", help="recorded where git can't tell")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted benchmark")
    parser.add_argument("--seconds", type=float, default=2.0, help="timing budget of one case")
    parser.add_argument("--passes", type=int, help="how often every case is timed")
    parser.add_argument("--digest", choices=("toy", "full"), help="print digests and stop")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"make gpu-check needs a CUDA device; torch {torch.__version__} sees none")
        return 2
    if options.digest:
        for line in digests(options.digest, torch.device("cuda")):
            print(line, flush=True)
        return 0
    only = runner.split(options.only) or tuple(STEPS)
    unknown = [name for name in only if name not in STEPS]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    outcome = []
    for name in only:
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        passed = STEPS[name](options)
        seconds = time.perf_counter() - start
        outcome.append((passed, f"{name}: {'passed' if passed else 'FAILED'} ({seconds:.0f} s)"))
    print("\n" + "\n".join(line for _, line in outcome))
    return 0 if all(passed for passed, _ in outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
