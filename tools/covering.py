"""The tests on compiled code with one set of parameters each: ``make covering``, in ``make test``.

`tools.ptx` executes what Triton compiles, which takes minutes. So nothing runs where
kernels/proven.json has this state: of the sources that compute losses, the tests, what executes
them, and the versions of torch, Triton and numpy. Where they pass the state is noted there.
"""

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.compile_report import COVERING, PROVEN, ROOT, note_proven

SOURCES = (
    "kernels",
    "fastkd/*.py",
    "fastkd/_core",
    "fastkd/linalg",
    "fastkd/losses",
    "fastkd/lm",
    "tools/ptx",
    "tools/calls",
)
OF_TESTS = ("tests/conftest.py", "tests/support", "tests/losses", "tools/versions/spread.py")
LEFT_OUT = "not (compil or graph or sizes)"


def state(tests: list[str]) -> str:
    """Of everything that decides whether the tests pass."""
    found = hashlib.sha256(LEFT_OUT.encode())
    for name in ("torch", "triton", "numpy"):
        found.update(importlib.metadata.version(name).partition("+")[0].encode())
    for path in files((*SOURCES, *OF_TESTS, *tests)):
        found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def files(names: tuple[str, ...]) -> Iterator[Path]:
    """The Python files that are named, or lie in a named folder, in a fixed order."""
    for name in names:
        for path in sorted(ROOT.glob(name)):
            yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.covering", description=__doc__)
    parser.add_argument("tests", nargs="+", help="files and folders")
    parser.add_argument("-n", default="1", help="processes")
    options = parser.parse_args()
    now = state(options.tests)
    if json.loads(PROVEN.read_text()).get(COVERING) == now:
        print("tests on compiled code: kernels/proven.json has this state")
        return 0
    plugins = ["-p", "tools.ptx.plugin", "-p", "tools.versions.spread"]
    command = [sys.executable, "-m", "pytest", *plugins, "-k", LEFT_OUT, "-n", options.n]
    status = subprocess.run([*command, "--dist", "worksteal", *options.tests], cwd=ROOT).returncode
    if status == 0:
        note_proven({COVERING: now})
    return status


if __name__ == "__main__":
    sys.exit(main())
