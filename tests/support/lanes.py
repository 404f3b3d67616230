"""The CUDA matrix roots on threads, compiled from their source at first use."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [*(ROOT / "csrc/linalg").glob("*.h"), *(ROOT / "tests").glob("*thread*")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources)))
    library = ROOT / "build" / f"roots_by_threads-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        own = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Icsrc"]
        command += ["tests/roots_by_threads.cpp", "-o", str(own)]
        subprocess.run(command, cwd=ROOT, check=True)
        own.rename(library)
    return ctypes.CDLL(str(library))


def eigh_by_threads(a: Tensor, warps: int) -> tuple[Tensor, Tensor]:
    """(values, vectors) of ``a`` (*, n, n), as ``torch.ops.fastkd.eigh`` returns them.

    ``warps``: of a CUDA block; 0 for one warp without a block, as small matrices have it.
    """
    a = a.contiguous()
    values, vectors = a.new_empty(a.shape[:-1]), torch.empty_like(a)
    sizes = ctypes.c_int64(a[..., 0, 0].numel()), ctypes.c_int64(a.shape[-1])
    results = (ctypes.c_void_p(x.data_ptr()) for x in (values, vectors))
    _library().eigh_by_threads(ctypes.c_void_p(a.data_ptr()), *sizes, ctypes.c_int(warps), *results)
    return values, vectors
