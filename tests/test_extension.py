"""The compiled matrix roots: parity with float64 eigh, registration, the CUDA source."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import setup as recipe
from fastkd._core import extension
from fastkd.linalg import roots
from fastkd.linalg.roots import inv_sqrtm, inv_sqrtm_ref, sqrtm
from tests.support.compare import relative_error
from tests.support.lanes import roots_by_threads
from tools import cuda_source

from .test_linalg import KINDS, matrix, with_eigenvalues

ROOT = Path(__file__).resolve().parent.parent
needs_extension = pytest.mark.skipif(
    not extension.CPU, reason="fastkd._C is not built (python setup.py build_ext --inplace)"
)
# Also eigenvalues and eigenvectors, which the public functions do not return.
SIZES = (1, 2, 3, 16, 31, 32, 33, 64, 127, 128, 129)


@pytest.fixture
def op_device(device):
    """Device of the operators: CUDA if their CUDA part is built."""
    return device if extension.CUDA else torch.device("cpu")


def check_roots(a: torch.Tensor, roots, inverse_roots, dtype, device="cpu") -> None:
    """‖S·S − A‖/‖A‖ ≤ 1e-5 in float32; inverse roots to condition·1e-6."""
    unit = 1.0 if dtype == torch.float32 else 1e-8
    root, values, vectors = (x.cpu() for x in roots(a.to(device, dtype)))
    assert root.dtype == values.dtype == vectors.dtype == dtype
    assert relative_error(root.double() @ root.double(), a) <= 1e-5 * unit
    assert relative_error((vectors.double() * values) @ vectors.double().mT, a) <= 1e-5 * unit
    assert (values.diff() >= 0).all()
    identity = torch.eye(a.shape[-1]).double()
    assert relative_error(vectors.mT.double() @ vectors.double(), identity) <= 1e-5 * unit

    ridge = 1e-3 * a.diagonal().max().item() + 1e-6
    for r in (0.0, ridge):
        inverse = inverse_roots(a.to(device, dtype), r)[0].cpu()
        assert inverse.isfinite().all()
        eigenvalues = torch.linalg.eigvalsh(a) + r
        condition = (eigenvalues[-1] / eigenvalues[0]).abs().item()
        if condition < 1e5:
            assert relative_error(inverse, inv_sqrtm_ref(a, r)) <= condition * 1e-6 * unit


def check_all(n: int, roots, inverse_roots, kinds=KINDS, device="cpu") -> None:
    for kind in kinds:
        for dtype in (torch.float32, torch.float64):
            check_roots(matrix(n, kind), roots, inverse_roots, dtype, device)


@needs_extension
@pytest.mark.parametrize("n", SIZES)
def test_roots(n, op_device):
    check_all(n, torch.ops.fastkd.sqrtm, torch.ops.fastkd.inv_sqrtm, device=op_device)


@pytest.mark.parametrize(
    "n, warps",
    [(1, 1), (2, 2), (3, 1), (3, 5), (16, 3), (31, 1), (31, 4), (32, 2), (33, 3)]
    + [(n, 0) for n in (1, 2, 3, 4, 16, 31, 32)],
)
def test_roots_of_the_cuda_source_on_threads(n, warps):
    """The CUDA kernels' source with a thread for each lane, three in a warp; 0: one warp only."""
    check_all(
        n,
        lambda a: roots_by_threads(a, False, 0.0, warps),
        lambda a, ridge: roots_by_threads(a, True, ridge, warps),
        KINDS if n < 16 else ["condition 1e+08", "rank-deficient", "repeated"],
    )


@needs_extension
@pytest.mark.parametrize("n", [0, 1, 2, 33, 129, 300])
def test_eigenvalues_and_vectors(n, op_device):
    """Also for matrices that are not positive definite."""
    a = torch.randn(3, n, n).double()
    a[1] = a[1].tril().mT @ a[1].tril()
    a[2] = torch.eye(n)
    values, vectors = (x.cpu() for x in torch.ops.fastkd.eigh((a + a.mT).to(op_device)))
    assert (values.diff() >= 0).all()
    assert relative_error(values, torch.linalg.eigvalsh(a + a.mT)) <= 1e-13
    assert relative_error((vectors * values.unsqueeze(-2)) @ vectors.mT, a + a.mT) <= 1e-13
    assert relative_error(vectors.mT @ vectors, torch.eye(n).expand(3, n, n)) <= 1e-13


@pytest.mark.slow
def test_cuda_source_has_no_races_between_lanes(tmp_path):
    """The CUDA kernels' source on threads, watched by ThreadSanitizer; and with a barrier less."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = (ROOT / "csrc/linalg/eigen_lanes.h").read_text()
    functions = ["double load(", "void tridiagonalise(", "void reduce_by_columns(", "Sweep next("]
    for i, name in enumerate(functions):
        barrier = re.compile(r"lanes_?\.sync\(\);").search(source, source.index(name))
        source = f"{source[: barrier.start()]}if (left_out != {i}) {source[barrier.start() :]}"
    left_out = 'inline const int left_out = std::atoi(std::getenv("LEFT_OUT"));'
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "csrc/linalg/eigen_lanes.h").write_text(f"#include <cstdlib>\n{left_out}\n{source}")
    (tmp_path / "tests").mkdir()
    for name in ("lane_races.cpp", "thread_lanes.h"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    command = [compiler, "-std=c++17", "-O1", "-fsanitize=thread", "-Icsrc", "tests/lane_races.cpp"]
    built = subprocess.run([*command, "-o", "races"], cwd=tmp_path, capture_output=True, text=True)
    if built.returncode:
        assert "sanitize" in built.stderr, built.stderr
        pytest.skip("the compiler has no ThreadSanitizer")
    for i in range(-1, len(functions)):
        # Threads that share a core may run in order by chance if the barrier is missing.
        for _ in range(1 if i < 0 else 30):
            run = subprocess.run(
                ["./races"],
                cwd=tmp_path,
                env=os.environ | {"LEFT_OUT": str(i)},
                capture_output=True,
                text=True,
                timeout=120,
            )
            if "FATAL: ThreadSanitizer" in run.stderr:
                pytest.skip("ThreadSanitizer can't run here")
            if "data race" in run.stderr:
                break
        assert i >= 0 or not run.stdout, run.stdout
        assert ("data race" in run.stderr) == (i >= 0), run.stderr


@pytest.mark.parametrize("n", SIZES)
def test_roots_without_the_extension_are_accurate(n):
    check_all(
        n,
        lambda a: roots._roots_by_eigh(a, False, 0.0),
        lambda a, ridge: roots._roots_by_eigh(a, True, ridge),
        KINDS if n < 64 else ["condition 1e+08", "rank-deficient", "repeated"],
    )


@needs_extension
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_stay_in_their_matrix(value, op_device):
    for n in (1, 2, 5, 40):
        a = with_eigenvalues(torch.rand(4, n) + 0.5)
        a[2, n - 1, 0] = value
        for result in (
            torch.ops.fastkd.sqrtm(a.to(op_device)),
            torch.ops.fastkd.inv_sqrtm(a.to(op_device), 0.0),
            torch.ops.fastkd.eigh(a.to(op_device)),
            *(roots_by_threads(a, False, 0.0, warps) for warps in (0, 2)),
            roots._roots_by_eigh(a, False, 0.0),
        ):
            for x in result:
                assert x[2].isnan().all()
                assert x[[0, 1, 3]].isfinite().all()


@needs_extension
def test_invalid_input_is_named():
    with pytest.raises(RuntimeError, match="a must be float64"):
        torch.ops.fastkd.eigh(torch.eye(2, dtype=torch.float32))
    for op in (torch.ops.fastkd.sqrtm, lambda a: torch.ops.fastkd.inv_sqrtm(a, 0.0)):
        with pytest.raises(RuntimeError, match="a must hold square matrices"):
            op(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="a must have at least 2 dimensions"):
            op(torch.ones(3))
        for dtype in (torch.int64, torch.bfloat16):
            with pytest.raises(RuntimeError, match="a must be float32 or float64"):
                op(torch.ones(2, 2, dtype=dtype))


@needs_extension
def test_opcheck(op_device):
    a = with_eigenvalues(torch.rand(3, 6) + 0.5)
    for dtype in (torch.float32, torch.float64):
        here = a.to(op_device, dtype)
        torch.library.opcheck(torch.ops.fastkd.sqrtm.default, (here,))
        torch.library.opcheck(torch.ops.fastkd.sqrtm.default, (here[:0],))
        torch.library.opcheck(torch.ops.fastkd.inv_sqrtm.default, (here, 0.1))
    torch.library.opcheck(torch.ops.fastkd.eigh.default, (a.to(op_device),))


@needs_extension
@pytest.mark.parametrize("root", [sqrtm, functools.partial(inv_sqrtm, ridge=0.1), inv_sqrtm])
def test_values_and_gradients_equal_the_pytorch_path(root, monkeypatch):
    """Also for repeated and zero eigenvalues."""
    values = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.5])
    a = torch.stack([with_eigenvalues(values), with_eigenvalues(values + 0.5)]).requires_grad_()
    upstream = torch.randn(2, 5, 5).double()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        result = root(a)
        return result.detach(), torch.autograd.grad(result, a, upstream)[0]

    compiled = run()
    monkeypatch.setattr(extension, "CPU", False)
    plain = run()
    if root is sqrtm:  # √ of rounding around zero: 1e-16 becomes 1e-8
        assert relative_error(compiled[0], plain[0]) <= 1e-7
        assert relative_error(compiled[1][1], plain[1][1]) <= 1e-10
    else:
        assert relative_error(compiled[0], plain[0]) <= 1e-10
        assert relative_error(compiled[1], plain[1]) <= 1e-10


@pytest.mark.slow
def test_cuda_source_compiles_without_spills():
    nvcc = recipe.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed, so csrc/linalg/roots.cu was not compiled")
    assert not cuda_source.problems(nvcc, ["90"])  # `make test-all` compiles for all
