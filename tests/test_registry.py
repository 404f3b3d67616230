"""Each row of `fastkd._core.registry` has its tests, benchmark, pages and kernels."""

import inspect
import re
from pathlib import Path

import pytest

import fastkd
from bench import suite
from fastkd import functional
from fastkd._core.registry import ARGUMENTS, LOSSES
from tests.losses import FILES, subjects
from tools import calls

ROOT = Path(__file__).resolve().parents[1]
KERNEL_FILES = [path.stem for path in (ROOT / "kernels").glob("*.py")]
SHARED_KERNEL_FILES = {"halves", "launch", "pointers", "rounding"}
# Public, and no loss.
HELPERS = {"FeatureQueue", "clear_plans", *ARGUMENTS}


def announced(loss) -> list[str]:
    """Names of the losses, which a page about losses must contain."""
    return [*loss.functions, *(name for name in loss.modules if name.endswith("Loss"))]


@pytest.mark.parametrize("name", [n for n in fastkd.__all__ if callable(getattr(fastkd, n))])
def test_every_public_name_has_a_row(name):
    rows = [loss.names for loss in LOSSES]
    assert name in HELPERS or any(name in row for row in rows), (
        f"{name} stands in no row of fastkd/_core/registry.py"
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
class TestRow:
    def test_names_are_public(self, loss):
        for name in {*loss.names}.difference(loss.modules):
            assert name in functional.__all__, f"fastkd.functional lacks {name}"
        for name in loss.modules:
            assert name in fastkd.__all__, f"fastkd lacks {name}"
        for name in (*loss.with_reference, *loss.modules, *loss.without_reference):
            home = inspect.getmodule(getattr(fastkd, name)).__name__
            assert home == loss.module, f"{name} is defined in {home}"

    def test_loss_has_tests(self, loss):
        assert loss.name in FILES, f"there is no tests/losses/{loss.name}.py"
        assert list(calls.of(loss.name)), f"tools/calls/{loss.name}.py has no calls"
        if loss.triton:
            file = ROOT / f"tests/kernels/test_{loss.name}_kernel.py"
            assert file.exists(), f"there is no {file.name}"

    def test_doctor_has_a_call_of_each_function(self, loss):
        assert set(loss.calls) == set(loss.with_reference), f"the row {loss.name} lacks calls"

    def test_loss_has_a_benchmark(self, loss):
        assert loss.name in suite.LOSSES, f"there is no bench/test_{loss.name}.py"

    def test_loss_is_documented(self, loss):
        readme, choice, contract = (
            (ROOT / file).read_text() for file in ("README.md", "docs/losses.md", "docs/design.md")
        )
        for name in (*loss.with_reference, *loss.modules, *loss.without_reference):
            assert f"`{name}`" in choice + readme, f"README.md and docs/losses.md have no {name}"
            assert f"`{name}" in contract, f"the contract in docs/design.md has no {name}"
        for name in announced(loss):
            assert f"`{name}`" in choice, f"docs/losses.md has no {name}"
        changes = (ROOT / "CHANGELOG.md").read_text()
        for name in set(announced(loss)) & set(loss.modules):
            assert f"`{name}`" in changes, f"CHANGELOG.md has no {name}"

    def test_loss_has_random_calls(self, loss):
        source = "".join(inspect.getsource(call) for call in FILES[loss.name].RANDOM.values())
        for name in (*loss.with_reference, *loss.without_reference, *loss.modules):
            called = re.search(rf"fastkd\.{name}\b|function\(\"{name}\"\)", source)
            assert called, f"no RANDOM call of tests/losses/{loss.name}.py is of {name}"

    def test_loss_is_a_subject_of_the_promises(self, loss):
        subject_names = {subject.name.split()[0] for subject in subjects("torch")}
        for name in announced(loss):
            assert name in subject_names, f"tests/losses/{loss.name}.py has no subject of {name}"

    def test_kernel_files_exist(self, loss):
        for file in loss.kernel_files:
            assert file in KERNEL_FILES, f"there is no kernels/{file}.py"
        assert bool(loss.triton) == bool(loss.kernel_files)
        assert set(loss.triton) <= {*loss.with_reference, *loss.modules}


@pytest.mark.parametrize("file", sorted(set(KERNEL_FILES) - SHARED_KERNEL_FILES))
def test_every_kernel_file_has_a_row(file):
    owners = [loss.name for loss in LOSSES if file in loss.kernel_files]
    assert len(owners) == 1, f"kernels/{file}.py belongs to the rows {owners}"


def test_the_readme_lists_every_loss():
    def code(names) -> str:
        return ", ".join(f"`{name}`" for name in names)

    table = [
        f"| {code(loss.functions)} | "
        f"{code(name for name in loss.modules if name.endswith('Loss'))} |"
        for loss in LOSSES
        if loss.functions
    ]
    readme = (ROOT / "README.md").read_text()
    for row in table:
        assert row in readme, f"README.md lacks the row\n{row}"
