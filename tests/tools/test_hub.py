"""The kernels in the hub's layout: loaded by file, in a process that may have fastkd or not."""

import ast
import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
import torch
import torch.nn.functional as F

import fastkd
from tools import hub
from tools.hub import check


@pytest.fixture(scope="module")
def projects(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    hub.write(out)
    return out


@contextlib.contextmanager
def loaded(folder: Path) -> Iterator[ModuleType]:
    """A package as the `kernels` library imports it: by file, under its unique name."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for imported in [other for other in sys.modules if other.startswith(name)]:
        del sys.modules[imported]


@pytest.fixture(scope="module")
def kernels(projects):
    pytest.importorskip("triton")
    with loaded(check.kernels_for_the_cpu(projects / "fastkd-kernels")) as module:
        yield module


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_it_keeps_the_hubs_rules(projects):
    names = {"torch", "triton", *sys.stdlib_module_names}
    for path in projects.rglob("torch-ext/**/*.py"):
        text = path.read_text()
        tree = ast.parse(text, feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= names, path
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.module or "").partition(".")[0] in names, path
            elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
                assert "|" not in ast.unparse(node.annotation), path
            elif isinstance(node, ast.Call):
                assert "strict" not in {keyword.arg for keyword in node.keywords}, path
        assert not re.search(r"[\"']fastkd(_cpp)?::|torch\.ops\.fastkd", text), path
    kernels, roots = (tomllib.loads((projects / name / "build.toml").read_text())
                      for name in ("fastkd-kernels", "fastkd-roots"))  # fmt: skip
    assert kernels["general"]["edition"] == 5 and kernels["torch-noarch"] == {}
    assert set(roots["torch"]["stable-abi"]) == set(roots["general"]["backends"])
    wanted = {*roots["torch"]["src"], *(f for k in roots["kernel"].values() for f in k["src"])}
    assert not [name for name in wanted if not (projects / "fastkd-roots" / name).exists()]
    for name in re.findall(r'"(\w+)",', (projects / "fastkd-kernels/torch-ext/fastkd_kernels"
                                         / "__init__.py").read_text()):  # fmt: skip
        assert f"- `{name}`: " in (projects / "fastkd-kernels" / "CARD.md").read_text()


def jitted(path: Path) -> dict[str, str]:
    """Sources of a file's Triton functions."""
    text = path.read_text()
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return {
        function.name: ast.get_source_segment(text, function) or ""
        for function in functions
        if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    }


def test_its_kernels_are_those_that_compile(projects):
    """Without spills: test_compile.py."""
    package = projects / "fastkd-kernels" / "torch-ext" / "fastkd_kernels"
    ours = {path.name: jitted(path) for path in (hub.ROOT / "kernels").glob("*.py")}
    assert ours == {name: jitted(package / name) for name in ours}
    assert sum(map(len, ours.values())) > 20


def test_its_own_tests_say_what_holds(projects, kernels):
    """Those that the hub runs on a GPU, here wherever kernels run."""
    assert check.run_tests(projects / "fastkd-kernels", kernels, device()) == 2


@pytest.mark.slow
def test_roots_are_compiled_and_their_tests_hold(projects):
    """Against PyTorch's stable ABI, beside fastkd's own operators of the same names."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    project = projects / "fastkd-roots"
    with loaded(check.roots_for_the_cpu(project, "-O0")) as roots:
        assert check.run_tests(project, roots, torch.device("cpu")) == 2
        a = torch.randn(3, 8, 16).double()
        a = (a @ a.mT).requires_grad_()
        for found, wanted in (
            (roots.sqrtm(a), fastkd.sqrtm(a)),
            (roots.inv_sqrtm(a, 0.1), fastkd.inv_sqrtm(a, 0.1)),
        ):
            torch.testing.assert_close(found, wanted)
            gradients = (torch.autograd.grad(x.square().sum(), a)[0] for x in (found, wanted))
            torch.testing.assert_close(*gradients)
        graph = torch.compile(roots.sqrtm, backend="eager", fullgraph=True)
        torch.testing.assert_close(graph(a.detach()), fastkd.sqrtm(a.detach()))


def test_soft_targets_and_their_gradient(kernels):
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 6, 50, device=device()).unbind()
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool, device=device())
    student.requires_grad_()
    expected = fastkd.soft_target_loss_ref(student, teacher, mask=mask, temperature=2.0)
    (gradient,) = torch.autograd.grad(expected, student)
    rows, options = (student.detach(), teacher, mask, None, None), ("forward_kl", 2.0, 4.0, 0.0)
    loss, found = kernels.soft_targets(*rows, "batchmean", *options, True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, gradient)
    upstream = loss.new_full((), 3.0)
    found = kernels.soft_target_gradient(*rows, upstream, "batchmean", *options)
    torch.testing.assert_close(found, 3 * gradient)
    kernels.scale_in_place(found, 1 / upstream)
    torch.testing.assert_close(found, gradient)


def test_relations(kernels):
    torch.manual_seed(0)
    student, teacher = (
        torch.randn(2, 6, 16, device=device()),
        torch.randn(2, 6, 32, device=device()),
    )
    losses, *_ = kernels.relations([student], [teacher], None, None, 1.0, 0.0, 1e-8, False)
    torch.testing.assert_close(losses.sum(), fastkd.relation_loss_ref(student, teacher))


def test_operators_have_the_namespace_of_their_version(kernels):
    assert set(kernels.__all__) <= set(dir(getattr(torch.ops, kernels.__name__)))
    norm = torch.compile(kernels.layer_norm_mse, backend="eager", fullgraph=True)
    x, y = torch.randn(2, 4, 8, device=device()).unbind()
    (loss,) = norm(x, y, None, None, 1e-5, x.numel(), False, False)
    wanted = 0.5 * F.mse_loss(F.layer_norm(x, (8,)), F.layer_norm(y, (8,)))
    torch.testing.assert_close(loss, wanted)
