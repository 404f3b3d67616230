"""Later passes of a run: each case timed again, every pass in a process of its own.

Where memory lies and on which core a thread runs is decided once a process, so the rounds of one
process agree with each other better than two runs of the same code do. `run_pass` starts
``python -m fastkd.bench.passes``, which reads its job from the standard input and answers each
case with a line of JSON.
"""

import contextlib
import gc
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fastkd

from . import suite
from .harness import REFERENCE, measure_again, one_line, ours, release

HERE = Path(__file__).resolve().parent


class PassFailed(RuntimeError):
    """The process of a later pass ended before its last case."""


def timed_again(row: dict[str, Any]) -> list[str]:
    """Providers that later passes time: the reference and fastkd's own; none without the latter."""
    names = [name for name, result in row["providers"].items() if "both" in result]
    own = [name for name in names if ours(row["loss"], name)]
    return [name for name in names if name == REFERENCE or name in own] if own else []


def run_pass(
    rows: list[dict[str, Any]], device: torch.device, seconds: float, code: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each of ``rows`` with its times in a new process, as soon as they are there."""
    job = {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "code": code,
        "cases": [[row["set"], row["key"], timed_again(row)] for row in rows],
    }
    # The allocator's cache would be missing on the GPU that the other process shares.
    release(device)
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with child.stdin:
                json.dump(job, child.stdin)
            for row, line in zip(rows, child.stdout, strict=False):
                yield row, json.loads(line)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise PassFailed("a later pass failed; --resume goes on from the last measured case")


def code_digest() -> str:
    """SHA-256 over the sources of fastkd and the benchmarks: what passes must share."""
    package = Path(fastkd.__file__).resolve().parent
    folders = (package, package / "kernels", HERE)
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    files |= {path for path in (HERE.parent / "csrc").rglob("*") if path.is_file()}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Do the job that stands on the standard input."""
    job = json.load(sys.stdin)
    if code_digest() != job["code"]:
        print("the code has changed since the first pass: start again", file=sys.stderr)
        return 1
    torch.set_num_threads(job["threads"])
    # Modules never go away: the collection before each timing need not look at them.
    gc.freeze()
    device = torch.device(job["device"])
    cases = {(case.set, case.key): case for case in suite.every_case()}
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for set_, key, names in job["cases"]:
            try:
                times = measure_again(cases[set_, key], device, names, job["seconds"])
            except RuntimeError as error:
                print(f"\n{key}: {one_line(error)}")
                times = {}
            print(json.dumps(times), file=answers, flush=True)
            release(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
