"""The C++ kernels: threads, unsupported calls, and fastkd without the extension.

The files of the losses test values and gradients of all backends.
"""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastkd
from fastkd._core import dispatch, extension
from tests.losses import subjects
from tests.support.compare import assert_accurate, raises, relative_error, value_and_grad
from tests.support.interpreter import MARKS
from tests.support.subject import D_S, D_T

ROOT = Path(__file__).resolve().parent.parent
(needs_extension,) = MARKS["cpp"]
SUBJECTS = {subject.name: subject for subject in subjects("cpp")}


def assert_same_bits(function, *given, **options):
    """On one thread and on several. Returns value and gradient."""
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with _ProductsAlone():
                results.append(value_and_grad(function, *given, **options))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, found, results[0])) for found in results)
    return results[0]


class _ProductsAlone(TorchDispatchMode):
    """Compute a head's products on one thread, since BLAS may order sums by threads."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = torch.get_num_threads()
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            torch.set_num_threads(1)
        try:
            return func(*args, **kwargs or {})
        finally:
            torch.set_num_threads(before)


@needs_extension
@pytest.mark.parametrize("name", SUBJECTS)
def test_bits_do_not_depend_on_the_number_of_threads(name):
    """Nor on flushing of subnormals: features of 2e-5 are subnormal in float16, not in float32."""
    student, teacher = torch.randn(40, 30, D_S), torch.randn(40, 30, D_T)
    assert_same_bits(SUBJECTS[name], student, teacher)
    student, teacher = (x[:6, :5].mul(2e-5).half() for x in (student, teacher))
    wanted = value_and_grad(SUBJECTS[name], student, teacher)
    torch.set_flush_denormal(True)
    try:
        found = value_and_grad(SUBJECTS[name], student, teacher)
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(found, wanted)


@needs_extension
@pytest.mark.parametrize("name", ["layer_norm_mse", "cos_nce_loss"])
def test_sums_of_long_rows_are_accurate(name):
    """For every vector width, although each lane would sum thousands of numbers."""
    student, teacher = torch.randn(2, 6, 98_304) + 0.5
    found = value_and_grad(getattr(fastkd, name), student, teacher, backend="cpp")
    wanted = value_and_grad(getattr(fastkd, name), student.double(), teacher.double())
    for actual, expected in zip(found, wanted, strict=True):
        assert relative_error(actual, expected) <= 1.2e-7


@needs_extension
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ranges_of_long_rows_on_any_number_of_threads(dtype):
    """Threads share three ranges of each row, the last of them short, and tiles of the bank."""
    student, teacher = torch.randn(5, 17_003, dtype=dtype), torch.randn(43, 17_003, dtype=dtype)
    labels = torch.arange(5) % 2, torch.arange(43) % 2
    for row, number in ((12, 9_000), (40, -2), (6, 3)):  # near, and apart in one range each
        teacher[row] = student[0]
        teacher[row, number] += 3 + row / 10

    loss = functools.partial(fastkd.knn_feature_loss, k=2, reduction="none")
    found = assert_same_bits(loss, student, teacher, *labels, backend="cpp")
    wanted = value_and_grad(loss, student.double(), teacher.double(), *labels, backend="torch")
    for actual, expected in zip(found, wanted, strict=True):
        assert_accurate(actual, expected, dtype)


@needs_extension
def test_the_backend_of_the_cpu(monkeypatch):
    x, choose = torch.ones(2, 3), functools.partial(dispatch.backend_of, columns=3)
    assert all(dispatch.why_not("cpp", name, x) is None for name in dispatch.CPP_FUNCTIONS)
    assert choose("auto", "layer_norm_mse", x) == "cpp"
    for name, given, words in (
        ("cayley", x, r"can't run cayley: .* no C\+\+ kernel"),
        ("layer_norm_mse", x.to("meta"), r"student is on meta, and C\+\+ kernels run on the CPU"),
        ("layer_norm_mse", x, "the extension is not built"),
    ):
        if "built" in words:
            monkeypatch.setattr(extension, "CPU", False)
        raises(f"backend='cpp' .*{words}", choose, "cpp", name, given)
        assert choose("auto", name, given) == "torch"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("sanitizer", "width"), [("address,undefined", 64), ("thread", 32)])
def test_sanitizers_find_nothing(sanitizer, width, tmp_path):
    """Bounds, undefined behaviour and races; other bits on threads; roundings of exp and log.

    Of kernels with vectors of so many bytes, for one round; `make sanitize` runs more.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    # Without the files that need torch, such as the operators.
    sources = [
        path for path in sorted((ROOT / "csrc").rglob("*.cpp"))
        if not re.search("tensors.h|operators.h", path.read_text())
    ]  # fmt: skip
    lines = "-g1" if "SANITIZE_ROUNDS" in os.environ else "-g0"  # a quarter of the compiler's time
    program = tmp_path / "row_kernels"
    built = subprocess.run(
        [
            compiler, "-std=c++17", "-O0", lines, "-Wno-psabi", "-pthread", "-Icsrc",
            f"-DFASTKD_BYTES={width}", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined",
            *sources, "tests/row_kernels.cpp", "-o", program,
        ],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    command = [program, os.environ.get("SANITIZE_ROUNDS", "1")]
    run = subprocess.run(command, capture_output=True, text=True)
    if "FATAL: ThreadSanitizer" in run.stderr:
        pytest.skip("ThreadSanitizer can't run here")
    assert run.returncode == 0 and not run.stdout and not run.stderr, run.stdout + run.stderr
