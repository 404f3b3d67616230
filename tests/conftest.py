"""Fixtures for every test: backends, fixed seeds, outputs pre-filled with NaN."""

import collections
import gc
import inspect
import os
import signal
import tempfile

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from torch._dynamo import guards

from fastkd._core import dispatch
from tests.support.draw import FIRST
from tests.support.interpreter import MARKS, prepare

prepare()
# For all processes of the tests; before tests/study/conftest.py imports `datasets`, which reads it.
FOLDER = tempfile.TemporaryDirectory(prefix="fastkd-tests-")
os.environ.setdefault("HF_DATASETS_CACHE", FOLDER.name)
# Dynamo empties the processor's caches to time each graph's guards, for a line of its log.
guards.profile_guard_manager = lambda *_: 0.0

# Without a GPU it formats its caller's stack three times.
if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed
LONGEST = (
    "test_compile.py", "test_dry_cuda.py", "test_processes.py", "test_install.py"
)  # fmt: skip
# What starts processes: of tests.distill.processes and tests.cli.launched.
FORKING = {"run_ranks", "CONTEXT", "Launch"}


def pytest_report_header():
    return f"random calls: FASTKD_TEST_SEED={FIRST}"


def pytest_configure(config):
    """Keep cached data sets only while the tests run, in every process.

    Restore signals that the parent process ignores (nohup, a shell's &): tests send them.
    """
    os.fsync = lambda descriptor: None  # no test survives a power cut, and syncing to disk is slow
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.add_cleanup(FOLDER.cleanup)


@pytest.fixture(autouse=True)
def _seeded_and_poisoned():
    """Fixed seed, and torch.empty filled with NaN, which shows elements that were never written."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA if available, else the CPU, where Triton runs in its interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder, only to be read, with a classifier, 40 training rows and 20 evaluation rows."""
    from tests.support.tiny import make_teacher, write_tsv

    path = tmp_path_factory.mktemp("tiny")
    make_teacher(path / "teacher")
    write_tsv(path / "train.tsv")
    write_tsv(path / "dev.tsv", 20, seed=1)
    return path


@pytest.fixture
def distill(tiny, tmp_path):
    """`fastkd distill` on ``tiny`` to ``tmp_path / "out"``; options replace the usual ones."""
    from tests.support.tiny import run, usual

    return lambda *flags, **options: run("distill", *flags, **usual(tiny, tmp_path, **options))


def pytest_generate_tests(metafunc):
    """Parametrise ``backend``: torch, and those with kernels of the module's TRITON_FUNCTION."""
    if "backend" not in metafunc.fixturenames:
        return
    name = getattr(metafunc.module, "TRITON_FUNCTION", None)
    known = {"triton": dispatch.TRITON_FUNCTIONS, "cpp": dispatch.CPP_FUNCTIONS}
    backends = [backend for backend, functions in known.items() if name in functions]
    marked = [pytest.param(backend, marks=MARKS[backend]) for backend in backends]
    metafunc.parametrize("backend", ["torch", *marked])


@pytest.fixture
def loss(request):
    """The loss of a parameter of `tests.support.every`."""
    from tests.support import every  # it imports every loss

    return every.made(*request.param)


@pytest.fixture
def wanted(request):
    """The loss's value and gradient of the usual features."""
    from tests.support import every

    return every.usual(*request.node.callspec.params["loss"])


def _left_out(item) -> bool:
    """Whether a test of these parameters has nothing to test."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return any(mark.kwargs["where"](given) for mark in item.iter_markers("left_out"))


def pytest_collection_modifyitems(items):
    """Run the longest tests first, so that all processes end at the same time.

    Tests of a file share a process and its fixtures; other processes take from its end. Then those
    that start processes, also in one: it imports all packages once more, to fork that process.
    """
    items[:] = [item for item in items if not _left_out(item)]
    items.sort(
        key=lambda item: (item.path.name not in LONGEST, not _forks(item.function, item.module))
    )


def _forks(function, module) -> bool:
    """Whether a test, or a function of its module that it calls, starts processes."""
    names = set(function.__code__.co_names)
    called = [getattr(module, name, None) for name in names]
    return bool(names & FORKING) or any(
        inspect.isfunction(x) and FORKING & set(x.__code__.co_names) for x in called
    )


def pytest_collection_finish():
    """Freeze imported objects: accelerate runs many garbage collections, which then skip them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Freeze what tests imported and fixtures keep; scanning it took half of each tiny training."""
    if any(gc.get_count()[1:]):  # more than a few hundred new objects
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item):
    """A test marked gpu runs on a CUDA machine only."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_terminal_summary(terminalreporter):
    """Print the number of skipped tests by reason."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in skipped
    )
    if reasons:
        terminalreporter.write_sep("-", "skipped")
    for reason, tests in reasons.most_common():
        terminalreporter.write_line(f"{tests:5}  {reason}")


@pytest.fixture
def tensors_on_device(device):
    """Default device of a test: the one on which the kernels run."""
    with device:
        yield
