"""Rules of the package's structure: which module may import which, and what is declared."""

import ast
import functools
import gc
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import read_configuration

from fastkd._core.extras import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
# Layers from the lowest up; a module imports from its own layer and lower ones.
FLOORS = (
    "_core", "distributed", "kernels", "linalg", "lm", "losses", "",
    "models", "analysis", "distill", "integrations", "train", "study", "cli",
    "bench", "tools", "tests",
)  # fmt: skip
OUTSIDE = FLOORS[-3:]  # folders outside the package
FOLDERS = {floor: ROOT / "fastkd" / floor for floor in FLOORS if floor not in OUTSIDE}
FOLDERS["train.tasks"] = ROOT / "fastkd/train/tasks"


def sources() -> dict[str, Path]:
    """Every module by its import name."""
    found = {}
    for floor, folder in FOLDERS.items():
        for path in sorted(folder.glob("*.py")):
            name = ".".join(("fastkd", *filter(None, (floor, path.stem.replace("__init__", "")))))
            found[name] = path
    for folder in OUTSIDE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


SOURCES = sources()


@functools.cache
def parsed(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    gc.freeze()  # a collection would look at all trees again, three times as long as parsing
    return tree


def floor(module: str) -> int:
    if module == "fastkd.__main__":
        return FLOORS.index("cli")
    parts = module.split(".")
    if parts[0] in OUTSIDE:
        return FLOORS.index(parts[0])
    name = parts[1] if len(parts) > 1 else ""
    return FLOORS.index(name if name in FLOORS else "")


def imported(module: str, types: bool = False) -> Iterator[str]:
    """Modules that ``module`` imports, at its top or inside functions; with ``types`` those for
    type checkers too."""
    path = SOURCES[module]
    left: list[ast.AST] = [parsed(path)]
    while left:
        node = left.pop()
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        # Expressions have no imports, and most nodes are expressions.
        left += [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.expr)]
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.stem == "__init__" else module.rpartition(".")[0]
                for _ in range(node.level - 1):
                    package = package.rpartition(".")[0]
                base = f"{package}.{base}".strip(".")
            below = [f"{base}.{alias.name}" for alias in node.names]
            # ``from fastkd import cca`` needs public.py only if it imports a public name.
            yield from (name if name in SOURCES else base for name in below)


@functools.cache
def arrows(types: bool = False) -> dict[str, set[str]]:
    return {
        module: {name for name in imported(module, types) if name in SOURCES and name != module}
        for module in SOURCES
    }


def test_modules_import_from_lower_layers_only():
    """And the PTX executor nothing of fastkd."""
    for module, needs in arrows().items():
        assert max(map(floor, needs), default=0) <= floor(module), f"{module} imports {needs}"
        if module.startswith("tools.ptx"):
            assert all(name.startswith("tools.ptx") for name in needs), module


@pytest.mark.parametrize("package", ["fastkd", ""])
def test_imports_form_no_cycle(package):
    """Within fastkd imports for type checkers count too."""
    known = arrows(types=bool(package)).items()
    left = {module: needs for module, needs in known if module.startswith(package)}
    while free := [module for module, needs in left.items() if not needs & set(left)]:
        for module in free:
            del left[module]
    circle = {module: sorted(needs & set(left)) for module, needs in left.items()}
    assert not left, f"these import each other, or depend on some that do: {circle}"


def test_only_cli_imports_typer_and_rich():
    """Library code prints through a display object that the caller passes."""
    for module, path in SOURCES.items():
        if floor(module) < FLOORS.index("cli"):
            packages = {name.partition(".")[0] for name in imported(module)}
            assert not packages & {"typer", "rich"}, f"{module} imports what only cli does"
        if floor(module) in (FLOORS.index("train"), FLOORS.index("study")):
            called = {
                getattr(getattr(node, "func", None), "id", "") for node in ast.walk(parsed(path))
            }
            assert "print" not in called, module


# Public losses, whose arguments are those of a paper.
LARGE = "merged_span_loss", "linear_soft_target_loss", "knn_feature_loss", "relation_loss"


def test_classes_and_functions_fit_on_a_page():
    """350 lines of a class; 60 lines of code and 12 parameters of a function, without docstrings.

    ruff counts parameters and statements too. kernels/ has its own rule there.
    """
    for module, path in SOURCES.items():
        if not module.startswith("fastkd.") or module.startswith("fastkd.kernels."):
            continue
        lines = [line.strip() for line in path.read_text().splitlines()]
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno - node.lineno < 350, f"{module}.{node.name}"
            if not isinstance(node, ast.FunctionDef) or node.name in LARGE:
                continue
            first = node.body[0]
            start = first.end_lineno if ast.get_docstring(node) else first.lineno - 1
            head = first.lineno - node.lineno
            code = [x for x in lines[start : node.end_lineno] if x and not x.startswith("#")]
            assert head + len(code) <= 60, f"{module}.{node.name}"
            inputs = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            assert len(inputs) <= 13 - (inputs[:1] == []), f"{module}.{node.name}"


def test_imported_packages_are_declared_dependencies():
    """Every imported package is a declared dependency, except triton, which torch installs."""
    project = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    known = {Requirement(line).name for line in asked} | {"fastkd", "bench", "examples", "triton"}
    for module, path in SOURCES.items():
        if floor(module) < FLOORS.index("tools"):
            names = {name.partition(".")[0] for name in imported(module)}
            names |= set(re.findall(r'require\("(\w+)', path.read_text()))
            names -= sys.stdlib_module_names
            packages = {PACKAGES.get(name, name).lower().replace("_", "-") for name in names}
            assert packages <= known, f"{module} imports {packages - known}"
