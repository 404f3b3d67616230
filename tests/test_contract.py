"""The public names and signatures of the package, its examples, and what an import costs."""

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastkd
from fastkd._losses import LOSSES

FEATURES = torch.ones(2, 3, 4)

SIGNATURES = {
    "relation_loss": "student teacher mask * over normalize distance temperature eps segments "
    "backend gather group",
    "knn_feature_loss": "student teacher student_labels teacher_labels * k tolerance ignore_index "
    "reduction backend gather group",
    "intra_class_similarity": "features labels",
    "cos_nce_loss": "student teacher * negatives labels mask negatives_mask negatives_labels "
    "reduction backend gather group",
    "cca_loss": "student teacher mask * ridge top_k reduction backend gather group",
    "canonical_correlations": "x y * ridge mask",
    "sqrtm": "a",
    "inv_sqrtm": "a ridge",
    "cayley": "skew",
    "layer_norm_mse": "x y eps reduction backend",
    "attention_loss": "student teacher mask * heads reduction backend",
    "soft_target_loss": "student_logits teacher_logits * temperature divergence mask reduction "
    "scale_by_t2 denominator backend",
    "linear_soft_target_loss": "student_hidden student_weight teacher_hidden teacher_weight *",
}

DEFAULTS = {
    "relation_loss": {
        "over": "tokens",
        "normalize": "l2",
        "distance": "pearson",
        "temperature": 10.0,
        "eps": 1e-8,
    },
    "knn_feature_loss": {"k": 1, "tolerance": None, "reduction": "sum"},
    "cos_nce_loss": {"negatives": None, "labels": None, "reduction": "mean"},
    "cca_loss": {"ridge": 1e-4, "top_k": None, "reduction": "sum"},
    "canonical_correlations": {"ridge": 0.0, "mask": None},
    "inv_sqrtm": {"ridge": 0.0},
    "layer_norm_mse": {"eps": 1e-5, "reduction": "mean"},
    "attention_loss": {"heads": "match", "reduction": "mean"},
    "soft_target_loss": {
        "temperature": 1.0,
        "divergence": "forward_kl",
        "reduction": "batchmean",
        "scale_by_t2": True,
        "denominator": None,
    },
}

# What a reference lacks: it is plain PyTorch, in one process.
AROUND = {"backend", "gather", "group"}
REFERENCES = [name for loss in LOSSES for name in loss.compared]

GATHER = {"gather": False, "group": None}
MODULES = {
    "FCDLoss": {"alpha": 1.0, "beta": 1.0, **GATHER},
    "IntraClassKNNLoss": {"k": 1, "student_dim": None, "teacher_dim": None, **GATHER},
    "CosNCELoss": GATHER,
    "CCALoss": {"top_k": None, **GATHER},
    "OrthogonalProjection": {"layers": 2, "orthogonal": True},
    "DualProjectionLoss": {"layers": 2, "gamma": 0.3, "orthogonal": True},
    "AttentionLoss": {"heads": "match", "reduction": "mean"},
    "SoftTargetLoss": {},
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_every_signature_is_written_down(loss):
    for name in (*loss.compared, *loss.measures):
        assert name in SIGNATURES, f"SIGNATURES lacks {name}"
    for name in loss.modules:
        assert name in MODULES, f"MODULES lacks {name}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_function_signature(name):
    parameters = inspect.signature(getattr(fastkd, name)).parameters
    expected = SIGNATURES[name].split()
    keyword_only = expected[expected.index("*") + 1 :] if "*" in expected else []
    expected = [word for word in expected if word != "*"]
    assert [p for p in parameters if p in expected] == expected
    assert next(iter(parameters)) == expected[0]
    for word in keyword_only:
        assert parameters[word].kind is inspect.Parameter.KEYWORD_ONLY, word
    if "backend" in expected:
        assert parameters["backend"].default == "auto"
    gather = GATHER if "gather" in expected else {}
    for word, default in {**DEFAULTS.get(name, {}), **gather}.items():
        assert parameters[word].default == default, word


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_takes_what_its_function_takes(name):
    function = inspect.signature(getattr(fastkd, name)).parameters
    reference = dict(inspect.signature(getattr(fastkd, f"{name}_ref")).parameters)
    passed_on = reference.pop("options", None)  # to another reference
    assert set(reference) <= set(function) - AROUND
    assert passed_on or set(reference) == set(function) - AROUND
    for word, parameter in reference.items():
        assert parameter.default == function[word].default, word


@pytest.mark.parametrize("name", MODULES)
def test_module_options(name):
    parameters = inspect.signature(getattr(fastkd, name).__init__).parameters
    for word, default in MODULES[name].items():
        assert parameters[word].default == default, word


def test_functional_holds_every_function_and_nothing_else():
    from fastkd import functional

    functions = set(SIGNATURES) | {f"{name}_ref" for name in REFERENCES}
    assert functions <= set(functional.__all__)
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
