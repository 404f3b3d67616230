"""Each row of `fastkd._core.registry` has its tests, benchmark, pages and kernels."""

import inspect
import re
from pathlib import Path

import pytest

import fastkd
from bench import suite
from fastkd._core.registry import ARGUMENTS, LOSSES
from tests.losses import FILES, subjects
from tools import calls

ROOT = Path(__file__).resolve().parents[1]
SHARED_KERNEL_FILES = {"halves", "launch", "pointers", "rounding"}
# Public, and no loss.
HELPERS = {"FeatureQueue", "clear_plans", *ARGUMENTS}


def announced(loss) -> list[str]:
    """Names of the losses, which a page about losses must contain."""
    return [*loss.functions, *(name for name in loss.modules if name.endswith("Loss"))]


def test_every_public_name_has_a_row():
    known = HELPERS.union(*(loss.names for loss in LOSSES))
    missing = {name for name in fastkd.__all__ if callable(getattr(fastkd, name))} - known
    assert not missing, f"fastkd/_core/registry.py has no row for {missing}"


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
class TestRow:
    def test_names_are_defined_in_one_module(self, loss):
        for name in (*loss.with_reference, *loss.modules, *loss.without_reference):
            home = inspect.getmodule(getattr(fastkd, name)).__name__
            assert home == loss.module, f"{name} is defined in {home}"

    def test_loss_has_tests_and_a_benchmark(self, loss):
        assert loss.name in FILES, f"there is no tests/losses/{loss.name}.py"
        assert loss.name in calls.LOSSES, f"tools/calls.py has none of {loss.name}"
        assert set(loss.calls) == set(loss.with_reference), f"the row {loss.name} lacks calls"
        assert loss.name in suite.LOSSES, f"there is no bench/test_{loss.name}.py"

    def test_loss_is_documented(self, loss):
        names = ("README.md", "docs/losses.md", "CHANGELOG.md")
        readme, choice, changes = ((ROOT / file).read_text() for file in names)
        for name in (*loss.with_reference, *loss.modules, *loss.without_reference):
            assert f"`{name}`" in choice + readme, f"README.md and docs/losses.md have no {name}"
        for name in announced(loss):
            assert f"`{name}`" in choice, f"docs/losses.md has no {name}"
        for name in set(announced(loss)) & set(loss.modules):
            assert f"`{name}`" in changes, f"CHANGELOG.md has no {name}"
        modules = ", ".join(f"`{name}`" for name in loss.modules if name.endswith("Loss"))
        row = f"| {', '.join(f'`{name}`' for name in loss.functions)} | {modules} |"
        assert not loss.functions or row in readme, f"README.md lacks the row\n{row}"

    def test_loss_has_random_calls(self, loss):
        source = "".join(inspect.getsource(call) for call in FILES[loss.name].RANDOM.values())
        for name in (*loss.with_reference, *loss.without_reference, *loss.modules):
            called = re.search(rf"fastkd\.{name}\b|function\(\"{name}\"\)", source)
            assert called, f"no RANDOM call of tests/losses/{loss.name}.py is of {name}"

    def test_loss_is_a_subject_of_the_promises(self, loss):
        subject_names = {subject.name.split()[0] for subject in subjects("torch")}
        for name in announced(loss):
            assert name in subject_names, f"tests/losses/{loss.name}.py has no subject of {name}"

    def test_kernels_have_files(self, loss):
        assert bool(loss.triton) == bool(loss.kernel_files)
        assert set(loss.triton) <= {*loss.with_reference, *loss.modules}


def test_every_kernel_file_has_one_row():
    files = [path.stem for path in (ROOT / "kernels").glob("*.py")]
    owned = [file for loss in LOSSES for file in loss.kernel_files]
    assert sorted([*owned, *SHARED_KERNEL_FILES]) == sorted(files)
