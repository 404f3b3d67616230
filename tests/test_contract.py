"""The public names and signatures of the package, its examples, and what an import costs."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch

import fastkd
from fastkd._core.dispatch import Backend
from fastkd._core.losses import LOSSES

FEATURES = torch.ones(2, 3, 4)

CONTRACT = (Path(__file__).parent.parent / "docs/design.md").read_text().split("## Contract")[1]
PUBLIC = [name for loss in LOSSES for name in (*loss.compared, *loss.measures, *loss.modules)]

PARTS = ["CrossEntropy", "Divergence", "Head", "TopK"]  # arguments of their own

# What a reference lacks: it is plain PyTorch, in one process.
AROUND = {"backend", "gather", "group"}
REFERENCES = [name for loss in LOSSES for name in loss.compared]


class Argument(NamedTuple):
    name: str
    keyword_only: bool
    default: Any
    words: frozenset[str]  # it takes no others


def pieces(text: str, mark: str) -> list[str]:
    """Parts between marks that stand in no parentheses."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        parts = [*parts, ""] if letter == mark and not depth else [*parts[:-1], parts[-1] + letter]
    return [part.strip() for part in parts if part.strip()]


def written(arguments: str) -> list[Argument]:
    """``student (B,N,Ds), mask (B,N)=None, *, over="tokens"|"samples"`` of the contract."""
    found, keyword_only = [], False
    for piece in pieces(arguments, ","):
        if piece == "*":
            keyword_only = True
            continue
        declared, _, values = piece.partition("=")
        name, *_ = declared.split()
        choices = [ast.literal_eval(x) for x in pieces(values, "|") if not x.startswith("(")]
        default, *_ = choices or [inspect.Parameter.empty]
        known = choices if isinstance(default, str) else ()
        # Those of backend stand in "Rules that every loss keeps".
        known = get_args(Backend) if name == "backend" else known
        found.append(Argument(name, keyword_only, default, frozenset(known)))
    return found


def words(kind: Any) -> frozenset[str]:
    """The fixed words of an annotation, alone or beside other types."""
    kinds = (kind,) if get_origin(kind) is Literal else get_args(kind)
    return frozenset(word for one in kinds if get_origin(one) is Literal for word in get_args(one))


def coded(function: Callable[..., Any]) -> list[Argument]:
    parameters, kinds = inspect.signature(function).parameters, get_type_hints(function)
    return [
        Argument(
            name,
            parameter.kind is inspect.Parameter.KEYWORD_ONLY,
            parameter.default,
            words(kinds[name]),
        )
        for name, parameter in parameters.items()
        if name != "self"
    ]


@pytest.mark.parametrize("name", [*PUBLIC, *PARTS])
def test_signature_is_the_contracts(name):
    entry = re.search(rf"`{name}(\(.*?)( -> .*?)?`", CONTRACT)
    assert entry, f"the contract in docs/design.md has no {name}"
    calls = [piece[1:-1] for piece in re.findall(r"\((?:[^()]|\([^()]*\))*\)", entry[1])]
    public = getattr(fastkd, name)
    functions = [public]
    if inspect.isclass(public):
        functions = [public.__init__] if name in PARTS else [public.__init__, public.forward]
    assert list(map(written, calls)) == list(map(coded, functions))


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_takes_what_its_function_takes(name):
    function = inspect.signature(getattr(fastkd, name)).parameters
    reference = dict(inspect.signature(getattr(fastkd, f"{name}_ref")).parameters)
    passed_on = reference.pop("options", None)  # to another reference
    assert set(reference) <= set(function) - AROUND
    assert passed_on or set(reference) == set(function) - AROUND
    for word, parameter in reference.items():
        assert parameter.default == function[word].default, word


def test_functional_holds_every_function_and_nothing_else():
    from fastkd import functional

    functions = {name for name in PUBLIC if not inspect.isclass(getattr(fastkd, name))}
    assert functions | {f"{name}_ref" for name in REFERENCES} == set(functional.__all__)
    assert all(getattr(functional, name) is getattr(fastkd, name) for name in functional.__all__)
    assert not any(inspect.isclass(getattr(functional, name)) for name in functional.__all__)


@pytest.mark.parametrize("name", sorted(fastkd.__all__))
def test_public_docstrings_have_an_example(name):
    item = getattr(fastkd, name)
    assert item.__doc__, name
    if inspect.isfunction(item) and not name.endswith("_ref"):
        assert ">>>" in item.__doc__, f"{name} has no example"


LIBRARY = [
    info.name
    for info in pkgutil.walk_packages(fastkd.__path__, "fastkd.")
    if not info.name.startswith("fastkd.kernels")
    and not info.name.endswith(("._C", "._C_cuda", ".__main__"))
]


@pytest.mark.parametrize("module", LIBRARY)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(
        importlib.import_module(module), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


def test_readme_example_runs(capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    example = readme.split("```python\n")[1].split("```")[0]
    exec(example, {})
    assert "torch.Size([8, 32, 384])" in capsys.readouterr().out


def test_import_is_light():
    """Importing fastkd brings in neither triton nor anything of the extras."""
    code = (
        "import sys, torch; before = set(sys.modules); import fastkd; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(new & {'triton', 'transformers', 'datasets', 'sklearn', 'matplotlib', 'typer'})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize("wrong", ([[1.0]], [], "features", [[FEATURES, FEATURES.numpy()]]))
def test_layers_must_be_tensors(wrong):
    with pytest.raises((TypeError, ValueError), match="student"):
        fastkd.FCDLoss()(wrong, FEATURES)
