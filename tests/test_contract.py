"""The public names and signatures of the package, its examples, and what an import costs."""

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import fastkd
from fastkd._core.registry import ARGUMENTS, LOSSES
from tests.support.compare import counted, raises

# Parameters that references don't have: they are plain PyTorch, in one process.
AROUND = {"backend", "chunk_bytes", "gather", "group"}
REFERENCES = [name for loss in LOSSES for name in loss.with_reference]


def arguments(function) -> str:
    """``student, mask=None, *, over="tokens"|"samples"``: a word's other choices follow it."""
    kinds, written = get_type_hints(function), []
    parameters = [x for x in inspect.signature(function).parameters.values() if x.name != "self"]
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        name, default = parameter.name, parameter.default
        if isinstance(default, str):
            kind = kinds[name]
            literals = [x for x in (kind, *get_args(kind)) if get_origin(x) is Literal]
            words = [word for x in literals if name != "backend" for word in get_args(x)]
            default = "|".join(f'"{word}"' for word in dict.fromkeys([default, *words]))
            written.append(f"{name}={default}")
        else:
            stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
            written.append(stars + name if default is parameter.empty else f"{name}={default!r}")
    return ", ".join(written)


def signature(name: str) -> str:
    """A Module's options, then the arguments of its call."""
    public = getattr(fastkd, name)
    if not inspect.isclass(public):
        return f"{name}({arguments(public)})"
    call = "" if name in ARGUMENTS else f"({arguments(public.forward)})"
    return f"{name}({arguments(public.__init__)}){call}"


def test_signatures_in_the_docs_equal_the_code():
    lines = ["```text"]
    for loss in LOSSES:
        lines.append(f"# {loss.module.removeprefix('fastkd.').replace('.', '/')}.py")
        lines += map(signature, (*loss.with_reference, *loss.without_reference, *loss.modules))
    lines += ["# Arguments of soft targets", *map(signature, ARGUMENTS), "```"]
    page = (Path(__file__).parents[1] / "docs/design.md").read_text()
    assert "\n".join(lines) in page, "docs/design.md must have:\n" + "\n".join(lines)


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_has_its_functions_parameters(name):
    function, reference = (
        {word: x.default for word, x in inspect.signature(getattr(fastkd, each)).parameters.items()}
        for each in (name, f"{name}_ref")
    )
    passed_on = reference.pop("options", None)  # links to another reference
    assert reference.items() <= {w: x for w, x in function.items() if w not in AROUND}.items()
    assert passed_on or set(reference) == set(function) - AROUND


def test_functional_has_exactly_the_public_functions():
    from fastkd import functional

    functions = {x for loss in LOSSES for x in (*loss.with_reference, *loss.without_reference)}
    assert functions | {f"{name}_ref" for name in REFERENCES} == set(functional.__all__)
    assert all(getattr(functional, name) is getattr(fastkd, name) for name in functional.__all__)
    assert not any(inspect.isclass(getattr(functional, name)) for name in functional.__all__)


def test_public_docstrings_have_an_example():
    for name in fastkd.__all__:
        item = getattr(fastkd, name)
        needs_example = inspect.isfunction(item) and not name.endswith("_ref")
        assert item.__doc__ and (">>>" in item.__doc__ or not needs_example), name


LIBRARY = [
    info.name
    for info in pkgutil.walk_packages(fastkd.__path__, "fastkd.")
    if not re.search(r"^fastkd\.kernels|\.(_C|_C_cuda|__main__)$", info.name)
]


@pytest.mark.parametrize("module", LIBRARY)
def test_examples_in_docstrings_run(module):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(module), optionflags=flags).failed == 0


def test_import_loads_neither_triton_nor_the_extras():
    """Resolving all public names imports neither triton nor a package of the extras."""
    code = (
        "import sys, torch; before = set(sys.modules); import fastkd; fastkd.FCDLoss; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(new & {'triton', 'transformers', 'datasets', 'sklearn', 'matplotlib', 'typer'})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_package_has_exactly_its_public_names():
    from fastkd import public

    assert fastkd.__all__ == public.__all__ and set(fastkd.__all__) <= set(dir(fastkd))
    assert all(getattr(fastkd, name) is getattr(public, name) for name in fastkd.__all__)
    words = "module 'fastkd' has no attribute 'relation_los'"
    raises(words, getattr, fastkd, "relation_los", error=AttributeError)


def test_public_name_resolves_inside_a_compiled_function(monkeypatch):
    for name in fastkd.__all__:
        monkeypatch.delitem(vars(fastkd), name, raising=False)
    monkeypatch.delitem(sys.modules, "fastkd.public")
    x = torch.randn(2, 4, 8)
    compiled, graphs = counted(lambda: fastkd.relation_loss(x, x))
    assert compiled() < 1e-6 and len(graphs) == 1


def test_layers_must_be_tensors():
    features = torch.ones(2, 3, 4)
    for wrong in ([[1.0]], [], "features", [[features, features.numpy()]]):
        raises("student", fastkd.FCDLoss(), wrong, features, error=(TypeError, ValueError))
