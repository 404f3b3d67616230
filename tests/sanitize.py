"""The extension's operators under AddressSanitizer and UBSan, from Python: `make sanitize`.

    python -m tests.sanitize --rounds 4

The extension is built once more with both. A process in which their library comes first loads it
in the place of fastkd._C, for random calls of every loss with row kernels, and the tests of roots,
of products and of CCA. PyTorch allocates its tensors through the sanitizer there, so a row read
beyond its tensor's end is detected. Leaks of PyTorch and Python are ignored. Threads:
`tests/row_kernels.cpp`.
"""

import argparse
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Last, to override earlier flags. One vector size only, in bytes.
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -DFASTKD_BYTES=32 -fsanitize=address,undefined "
FLAGS += "-fno-sanitize-recover=undefined"
EXTENSION = "FASTKD_SANITIZED"


def build(folder: Path) -> Path:
    """The instrumented extension."""
    compiler = os.environ.get("CXX", "g++")
    wrapper = folder / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {FLAGS}\n')
    wrapper.chmod(0o755)
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder]
    env = os.environ | {"CC": str(wrapper), "CXX": str(wrapper)}
    subprocess.run([*command, "--build-temp", folder], cwd=ROOT, env=env, check=True)
    (extension,) = folder.glob("fastkd/_C.*")
    return extension


def load(path: str) -> None:
    """Import the instrumented extension as fastkd._C, before fastkd does."""
    import torch  # noqa: F401  # whose libraries it needs

    loader = importlib.machinery.ExtensionFileLoader("fastkd._C", path)
    spec = importlib.util.spec_from_file_location("fastkd._C", path, loader=loader)
    assert spec is not None
    sys.modules["fastkd._C"] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)


def calls(rounds: int) -> int:
    """Random calls that disagree with their oracles, and whether other operators' tests failed."""
    import pytest

    from tests import fuzz

    wrong = 0
    for name in sorted(fuzz.CPP):
        found = [(seed, fuzz.checked(name, "cpp", seed)) for seed in range(20 * rounds)]
        failures = [f"{name} --seed {seed}: {failure}" for seed, failure in found if failure]
        print(*failures, f"{name}: {len(found)} calls", sep="\n", flush=True)
        wrong += len(failures)
    for file, chosen in (("half_product", ""), ("cca", "roots"), ("extension", "nan or eigen")):
        wrong += pytest.main(["-q", "-n0", f"tests/test_{file}.py", "-k", chosen])
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="times 20 calls of each loss")
    options = parser.parse_args()
    if EXTENSION in os.environ:
        load(os.environ[EXTENSION])
        return int(calls(options.rounds) != 0)
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise SystemExit(f"{compiler}: no such compiler")
    # The C++ library too: the sanitizer wraps its exceptions before anything has loaded it.
    names = "libasan.so", "libstdc++.so.6"
    libraries = [subprocess.getoutput(f"{compiler} -print-file-name={name}") for name in names]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            EXTENSION: str(build(Path(folder))),
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TRITON_INTERPRET": "1",
        }
        # Not as tests.sanitize: the package tests loads fastkd, and that its own extension.
        code = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        command = [sys.executable, "-c", code, "--rounds", str(options.rounds)]
        return subprocess.run(command, cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
