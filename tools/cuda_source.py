"""``python -m tools.cuda_source``: csrc/linalg/roots.cu compiles without register spills.

nvcc alone compiles it for every GPU, because torch's build helper hides CUDA where torch has none.
Problems are printed.
"""

import hashlib
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import setup as recipe
from fastkd._core.atomic_files import write_file
from tools.compile_report import ROOT

SOURCE = "csrc/linalg/roots.cu"
KERNELS = 2  # by one warp or by a block


def problems(nvcc: str, architectures: Sequence[str] = recipe.GPU_ARCHITECTURES) -> str:
    """Output of nvcc if it fails or a kernel spills registers, else ""."""
    command = [*_command(nvcc), "-Xptxas=-v", "-c", SOURCE]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    with tempfile.TemporaryDirectory() as folder:
        command += ["-o", f"{folder}/roots.o"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    count, frames = KERNELS * len(architectures), done.stderr.count("bytes stack frame")
    clean = done.stderr.count("0 bytes stack frame, 0 bytes spill stores")
    return "" if done.returncode == 0 and frames == clean == count else done.stderr


def ptx(nvcc: str, capability: int) -> str:
    """The source as PTX, cached by the state of the sources."""
    file = ROOT / "build" / "ptx" / f"roots-{capability}-{state(nvcc)}.ptx"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [*_command(nvcc), "-ptx", f"-arch=compute_{capability}", SOURCE, "-o", "-"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        write_file(file, done.stdout, shared=True)
    return file.read_text()


def _command(nvcc: str) -> list[str]:
    includes = ["csrc", Path(torch.__file__).parent / "include", sysconfig.get_paths()["include"]]
    return recipe.nvcc_command(nvcc, includes)


def state(nvcc: str) -> str:
    """Hash of the sources, the compiler's version and its command."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [path for folder in ("base", "linalg") for path in (ROOT / "csrc" / folder).iterdir()]
    parts = [
        *(path.read_text() for path in sorted(sources)),
        *recipe.nvcc_command("nvcc", []),
        said,
    ]
    parts += [*recipe.GPU_ARCHITECTURES, torch.__version__.partition("+")[0]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def main() -> None:
    nvcc = recipe.find_nvcc()
    if nvcc is None:
        raise SystemExit("there is no nvcc, so csrc/linalg/roots.cu was not compiled")
    raise SystemExit(problems(nvcc))


if __name__ == "__main__":
    main()
