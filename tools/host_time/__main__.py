"""The command; see `tools.host_time`."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "host_time"
WIDTH = 76  # of a call's name in the table


def environment(tree: Path) -> dict[str, str]:
    """Variables under which Triton finds the stub, built before, and imports come from a tree."""
    library, source = BUILD / "libcuda.so.1", HERE / "stub.c"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise SystemExit("host_time: no C compiler; install one, for example gcc")
        BUILD.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
    without = ("TRITON_INTERPRET", "FASTKD_PLANS")
    kept = {name: x for name, x in os.environ.items() if name not in without}
    return kept | {
        "LD_LIBRARY_PATH": str(BUILD),
        "TRITON_LIBCUDA_PATH": str(BUILD),
        "TRITON_CACHE_DIR": str(BUILD / "cache"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Memory isn't returned to the system at each step: a GPU's allocator keeps it, too.
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "PYTHONPATH": str(tree),
    }


def measure(tree: Path, repeat: int, names: list[str]) -> dict[str, list[float]]:
    """[forward, backward, launches] of each call in a checkout, in a process of its own."""
    command = [sys.executable, str(HERE / "calls.py"), str(repeat), *names]
    process = subprocess.run(
        command, env=environment(tree), cwd=tree, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, list[float]] = json.loads(process.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.host_time", description=__doc__)
    parser.add_argument("names", nargs="*", help="keys of cases in bench/, by default all")
    parser.add_argument("--repeat", type=int, default=200, help="repetitions of each call")
    parser.add_argument("--rounds", type=int, default=1, help="processes, of which medians count")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    trees = [ROOT, *([given.against.resolve()] if given.against else [])]
    found = [
        [measure(tree, given.repeat, given.names) for tree in trees] for _ in range(given.rounds)
    ]
    own, *other = (
        {name: [statistics.median(x) for x in zip(*(x[name] for x in rounds), strict=True)]
         for name in rounds[0]}
        for rounds in zip(*found, strict=True)
    )  # fmt: skip
    if given.json:
        print(json.dumps(own))
        return
    print(
        f"{'call':{WIDTH}} {'forward':>8} {'backward':>8} {'launches':>8}" + "   ratio" * len(other)
    )
    for name, (forward, backward, launches) in own.items():
        line = f"{name:{WIDTH}} {forward:8.1f} {backward:8.1f} {launches:8.1f}"
        for found in other:
            line += f" {(forward + backward) / sum(found[name][:2]):7.2f}"
        print(line)


if __name__ == "__main__":
    main()
