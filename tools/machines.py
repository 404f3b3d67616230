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
ATEN, MKL, ONEDNN = "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"
# Number of threads and environment variables by setting.
SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
    "aten-default": (1, {ATEN: "default"}),
    "aten-avx2": (2, {ATEN: "avx2"}),
    "aten-avx512": (3, {ATEN: "avx512"}),
    "mkl-compatible": (4, {MKL: "COMPATIBLE"}),
    "mkl-avx2": (1, {MKL: "AVX2"}),
    "onednn-sse41": (2, {ONEDNN: "SSE41"}),
    "onednn-avx2": (3, {ONEDNN: "AVX2"}),
    # As a processor without AVX-512 is.
    "avx2": (1, {ATEN: "avx2", MKL: "AVX2", ONEDNN: "AVX2"}),
}
LOSSES = (
    "cca derivatives edges errors extension head_of knn layouts numerics projection queue "
    "relation soft_targets token_log_probs values"
)
# Triton's interpreter is numpy, which none of this concerns; compiling takes minutes.
NOT = "triton or kernels or compile or graph or symbolic or inductor or twice"
CORE = [f"tests/test_{name}.py" for name in LOSSES.split()]


def turn() -> str:
    """A setting that this processor can run, chosen by the commit."""
    has = torch.backends.cpu.get_cpu_capability()
    names = [name for name in SETTINGS if "avx512" not in name or has == "AVX512"]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    return names[int(commit, 16) % len(names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, help="all if not given")
    parser.add_argument("--turn", action="store_true", help="one, chosen by the commit")
    options, others = parser.parse_known_args()
    failed = []
    for name in [turn()] if options.turn else options.setting or SETTINGS:
        print(f"{name}; again: make test-machines ARGS='--setting {name}'", flush=True)
        threads, variables = SETTINGS[name]
        # Threads beyond the cores wait for each other.
        processes = str(max((os.cpu_count() or 1) // threads, 1))
        command = [sys.executable, "-m", "pytest", "-n", processes, "--tb=short"]
        command += ["-p", "tools.spread", "-m", "not slow", "-k", f"not ({NOT})", *CORE, *others]
        environment = os.environ | variables | {"OMP_NUM_THREADS": str(threads)}
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
