"""The kernels in the hub's layout: loaded by file, in a process that may have fastkd or not."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import tomllib
import torch
import torch.nn.functional as F

import fastkd
from tools import hub

# As the hub's builder names a kernel: its name, backend and commit.
OPERATORS = "_fastkd_kernels_cpu_0a1b2c3"
OPS = """
import torch

ops = getattr(torch.ops, "{name}")


def add_op_namespace_prefix(op_name):
    return "{name}::" + op_name
"""


@pytest.fixture(scope="module")
def projects(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    hub.write(out)
    return out


@pytest.fixture(scope="module")
def kernels(projects):
    """The package as the `kernels` library imports it: by file, under its unique name."""
    pytest.importorskip("triton")
    folder = projects / "fastkd-kernels" / "torch-ext" / "fastkd_kernels"
    (folder / "_ops.py").write_text(OPS.format(name=OPERATORS))
    spec = importlib.util.spec_from_file_location(OPERATORS, folder / "__init__.py")
    assert spec and spec.loader
    module = sys.modules[OPERATORS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.startswith(OPERATORS)]:
        del sys.modules[name]


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


def test_its_own_tests_say_what_holds(projects, kernels, monkeypatch):
    """Those that the hub runs on a GPU, here wherever kernels run."""
    fake = type(sys)("kernels")
    fake.get_kernel = lambda *args, **options: kernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", fake)
    namespace: dict = {}
    source = (projects / "fastkd-kernels/tests/test_kernels.py").read_text()
    exec(source.replace("@pytest.mark.kernels_ci\n", ""), namespace)  # the builder's own marker
    tests = [test for name, test in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(device())


def test_soft_targets_and_their_gradient(kernels):
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 6, 50, device=device()).unbind()
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool, device=device())
    student.requires_grad_()
    expected = fastkd.soft_target_loss_ref(student, teacher, mask=mask, temperature=2.0)
    (gradient,) = torch.autograd.grad(expected, student)
    rows, options = (student.detach(), teacher, mask), ("forward_kl", 2.0, 4.0)
    losses, stats = kernels.soft_target_forward(*rows, *options)
    loss, divisor = kernels.soft_target_reduce(losses, mask, None, True)
    torch.testing.assert_close(loss, expected)
    assert divisor.item() == 5
    found = kernels.soft_target_backward(*rows, stats, divisor, loss.new_ones(()), *options)
    torch.testing.assert_close(found, gradient)


def test_relations(kernels):
    torch.manual_seed(0)
    student, teacher = (
        torch.randn(2, 6, 16, device=device()),
        torch.randn(2, 6, 32, device=device()),
    )
    losses, *_ = kernels.relations([student], [teacher], None, 1.0, 0.0, 1e-8, False)
    torch.testing.assert_close(losses.sum(), fastkd.relation_loss_ref(student, teacher))


def test_operators_have_the_namespace_of_their_version(kernels):
    assert set(kernels.__all__) <= set(dir(getattr(torch.ops, OPERATORS)))
    norm = torch.compile(kernels.layer_norm_mse_forward, backend="eager", fullgraph=True)
    x, y = torch.randn(2, 4, 8, device=device()).unbind()
    losses, _ = norm(x, y, 1e-5, x.numel())
    wanted = 0.5 * F.mse_loss(F.layer_norm(x, (8,)), F.layer_norm(y, (8,)))
    torch.testing.assert_close(losses.sum(), wanted)
