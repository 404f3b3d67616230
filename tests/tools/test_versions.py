"""The table of tested versions, and everything that follows from it."""

import importlib
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from setuptools.config.pyprojecttoml import read_configuration

from fastkd._core import versions
from fastkd._core.versions import TESTED
from tools import check, machines

ROOT = Path(__file__).parents[2]
TABLE = re.findall(r"(?m)^\| (.*) \|$", (ROOT / "docs/versions.md").read_text().split("\n## ")[0])
ROWS = [dict(zip(TABLE[0].split(" | "), row.split(" | "), strict=True)) for row in TABLE[1:]]
PROJECT = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]


@pytest.mark.parametrize("package", TESTED)
def test_the_package_names_what_was_tested(package):
    """The oldest and the newest ran one wheel, as in the workflow."""
    rows = sorted(ROWS, key=lambda row: Version(row[package]))
    assert rows[0]["wheel"] == rows[-1]["wheel"] and {row["failed"] for row in rows} == {"0"}
    places = 2 if package == "python" else 3
    found = {".".join(row[package].partition("+")[0].split(".")[:places]) for row in ROWS}
    assert TESTED[package] == tuple(sorted(found, key=Version))
    if package == "triton":  # which torch installs
        return
    workflow = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())
    runs = workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert [run[package] for run in runs] == [TESTED[package][0], TESTED[package][-1]]


def test_bounds_are_the_oldest_tested():
    extras = PROJECT["optional-dependencies"]
    needs = map(Requirement, (*PROJECT["dependencies"], *extras["train"]))
    bounds = {need.name: str(need.specifier) for need in needs if need.name in TESTED}
    assert set(bounds) == {"torch", "transformers"}
    for package, bound in bounds.items():  # the newest tested is no bound
        assert bound[:2] == ">=" and Version(bound[2:]) == Version(TESTED[package][0])
    assert PROJECT["requires-python"] == f">={TESTED['python'][0]}"
    start = "Programming Language :: Python :: "
    pythons = [c.removeprefix(start) for c in PROJECT["classifiers"] if c.startswith(start)]
    oldest, newest = (int(TESTED["python"][i].removeprefix("3.")) for i in (0, -1))
    assert pythons == ["3", *(f"3.{i}" for i in range(oldest, newest + 1))]


def test_the_version_is_the_same_everywhere():
    found = {"fastkd/__init__.py": '__version__ = "(.*)"', "CITATION.cff": "(?m)^version: (.*)$"}
    for name, pattern in found.items():
        assert re.search(pattern, (ROOT / name).read_text())[1] == PROJECT["version"], name


def test_badges_say_what_was_tested():
    said = {"licence": PROJECT["license"].replace("-", "--")}
    for name in ("Python", "torch"):
        versions = [".".join(x.split(".")[:2]) for x in TESTED[name.lower()]]
        said[name] = f"{versions[0]}_to_{versions[-1]}"
    readme = (ROOT / "README.md").read_text()
    badges = re.findall(r"img\.shields\.io/badge/(\w+)-(\S+)-\w+\)", readme)
    assert len(badges) == len(said) and dict(badges) == said


def test_an_older_torch_gets_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.9.1+cpu")
    said = f"never tested with torch 2.9.1.cpu: the oldest .* with is {TESTED['torch'][0]}"
    with pytest.warns(UserWarning, match=said):
        importlib.reload(versions)


def test_lists_of_tests_name_existing_files():
    """A missing one would leave out no test."""
    assert machines.turn() == machines.turn() in machines.SETTINGS
    assert {threads for threads, _ in machines.SETTINGS.values()} == {1, 2, 3, 4}
    lists = machines.CORE, check.WHOLE, check.TRAINS, check.LEFT_OUT
    assert all((ROOT / path).exists() for files in lists for path in files)
