"""`make test-machines`: the losses' tests with the code paths of other processors.

PyTorch, MKL, oneDNN and the extension choose code by processor, and settings select the code of an
older one. The order of sums changes the last bits: if a test passes on some processors only, the
test or the loss is wrong.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
# Environment variables by setting; they include the number of threads.
SETTINGS: dict[str, dict[str, str]] = {
    "aten-default": {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"},
    "aten-avx512": {"ATEN_CPU_CAPABILITY": "avx512", "OMP_NUM_THREADS": "3"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "4"},
    "mkl-avx2": {"MKL_CBWR": "AVX2", "OMP_NUM_THREADS": "1"},
    "onednn-sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "2"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3"},
    # All at once, as a processor without AVX-512 is.
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "1",
    },
    # Products as those of another BLAS library: AMD's processors, ARM's, an older MKL.
    "other-products": {"OMP_NUM_THREADS": "1"},
}
PLUGINS = {"other-products": ["tools.other_products"]}
LOSSES = (
    "attention cca contrastive draft_options head_of heads hidden_states knn linalg matched_tokens "
    "numerics projection promises queue relation soft_targets token_log_probs weights"
)
# Triton's interpreter is numpy, which none of this concerns; compiling takes minutes; products
# in another order are copies.
NOT = "triton or kernels or compile or graph or symbolic or inductor or twice or storage or memory"
CORE = [f"tests/test_{name}.py" for name in LOSSES.split()]


def playable() -> list[str]:
    """Settings that this processor can run."""
    has = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), 0)
    return [
        name
        for name in SETTINGS
        if not ("avx512" in name and has < 2) and not ("avx2" in name and has < 1)
    ]


def turn(names: list[str]) -> str:
    """One of the names, chosen by the commit."""
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    return names[int(commit, 16) % len(names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, help="all if not given")
    parser.add_argument("--turn", action="store_true", help="one, chosen by the commit")
    parser.add_argument("--most", type=int, default=1000, help="parameters of a test")
    parser.add_argument("--tests", nargs="+", default=CORE, help="paths; options go to pytest")
    options, others = parser.parse_known_args()
    names = options.setting or playable()
    failed = []
    for name in [turn(names)] if options.turn else names:
        variables = " ".join(f"{key}={value}" for key, value in SETTINGS[name].items())
        print(f"{name}: {variables}; again: make test-machines ARGS='--setting {name}'", flush=True)
        # Threads beyond the cores wait for each other.
        processes = max((os.cpu_count() or 1) // int(SETTINGS[name]["OMP_NUM_THREADS"]), 1)
        command = [sys.executable, "-m", "pytest", "-n", str(processes), "--tb=short"]
        for plugin in ["tools.spread", *PLUGINS.get(name, [])]:
            command += ["-p", plugin]
        command += [f"--most={options.most}"]
        command += ["-m", "not slow", "-k", f"not ({NOT})", *options.tests, *others]
        if subprocess.run(command, cwd=ROOT, env=os.environ | SETTINGS[name]).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
