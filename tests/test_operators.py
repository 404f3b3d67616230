"""The C++ operators called directly, as exported and compiled graphs call them."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkd._core import extension
from tests.distill.processes import run_ranks
from tests.support.compare import raises

pytestmark = pytest.mark.skipif(
    not extension.CPU or torch.cuda.is_available(), reason="needs the extension, on the CPU"
)
OPS = torch.ops.fastkd_cpp

x = torch.randn(6, 5)
cube = torch.randn(6, 4, 5)
maps = torch.randn(2, 3, 4, 4)
labels = torch.arange(6)
every, all_tokens, weights = torch.ones(6).bool(), torch.ones(6, 4).bool(), torch.rand(6)
SOFT = dict(divergence="forward_kl", temperature=1.0, scale=1.0, coefficient=0.0)
OF_ROWS = dict(log_mass=torch.zeros(6), labels=labels % 5, terms=torch.empty(6, 6))
OF_TOP = dict(bucket=True, reduction="batchmean", denominator=torch.tensor(6.0))
MEAN, TOP = dict(reduction="mean", gradient=True), torch.tensor([[0, 3]] * 6)
STATES = dict(count=6.0, needs_hidden=True, needs_weight=True, needs_bias=True, vocabulary=7,
              scale=1.0, factor=1.0, label_smoothing=0.0, z_loss=0.0, narrow=False)  # fmt: skip
# Valid positional arguments and options of each operator.
CALLS = {
    "layer_norm_mse": ((x, x, weights), dict(eps=0.0, divisor=1, needs_dx=True, needs_dy=True)),
    "hidden_states": ((x, x, every, weights), dict(kind="mse", beta=1.0) | MEAN),
    "soft_targets": ((x, x, x.clone(), every, weights), SOFT | OF_ROWS),
    "top_k_soft_targets": ((x, TOP, x[:, :2], x.clone(), every, weights), SOFT | OF_TOP),
    "matched_soft_targets": (
        (x, x[:, :3], torch.tensor([2, -1, 0, 1, -1]), x.clone(), every, weights),
        SOFT | dict(unmatched="bucket"),
    ),
    "is_top_k": ((TOP, x[:, :2], every, 5, 10.0), {}),
    "cos_nce": (
        (cube, cube, cube, all_tokens, all_tokens, labels, labels, torch.rand(24)),
        dict(classes=6, others=True, own_too=False) | MEAN,
    ),
    "attention": (
        (maps, maps, torch.ones(2, 4).bool(), torch.rand(2)), dict(mean=False, layers=1) | MEAN
    ),
    "knn": (
        (x, x, labels, labels, labels, torch.tensor(6), weights),
        dict(k=1, ignore_index=-100, reduction="sum", gradient=True),
    ),
    "relation_terms": (
        (cube, cube, all_tokens, weights), dict(tokens=1.0, samples=1.0, eps=1e-8, gradient=True)
    ),
    "cross_entropy": ((x, labels % 5, x.clone(), weights), dict(label_smoothing=0.0, z_loss=0.0)),
    "cross_entropy_of_states": (
        (x, torch.randn(8, 5), torch.randn(8), labels, weights, torch.tensor(6.0)), STATES
    ),
}  # fmt: skip
NEEDS = [{f"needs_{name}" for name in row} for row in (("hidden",), ("weight", "bias"), ())]
if extension.CPU and OPS.has_half_product():
    half = x.bfloat16()
    CALLS["half_product"] = (torch.empty(6, 6), half, half.T, False), {}


def named(name: str) -> dict[str, Any]:
    """The valid call's arguments by name."""
    names = (a.name for a in getattr(OPS, name).default._schema.arguments)
    return dict(zip(names, CALLS[name][0], strict=False)) | CALLS[name][1]


def changed(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """A tensor of another size, dtype or number of dimensions."""
    if kind == "dimensions":
        return tensor[None, None, None]
    if kind == "dtype":
        return tensor.to(torch.int32)
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor.expand(3)


@pytest.mark.parametrize("name", CALLS)
def test_operators_have_fake_implementations(name):
    """With and without what is optional, as exported graphs have them."""
    arguments, options = CALLS[name]
    forms, tests = [options], ("test_schema", "test_faketensor")
    if name == "cross_entropy_of_states":
        for count, needs in itertools.product((0.0, 6.0), NEEDS):
            wanted = {key: key in needs for key in options if key.startswith("needs_")}
            forms.append(options | wanted | {"count": count})
    for form in forms:
        torch.library.opcheck(getattr(OPS, name).default, arguments, form, test_utils=tests)


@pytest.mark.parametrize("kind", ["size", "dtype", "dimensions"])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_shapes_and_dtypes_are_refused(name, kind):
    """Wrong sizes, dtypes and numbers of dimensions of every tensor of every operator."""
    given = named(name)
    getattr(OPS, name)(**given)
    words = "|".join(f"{a.name}: " for a in getattr(OPS, name).default._schema.arguments)
    for argument, value in given.items():
        if isinstance(value, torch.Tensor):
            wrong = given | {argument: changed(value, kind)}
            raises(words, getattr(OPS, name), error=RuntimeError, **wrong)


def test_strides_that_would_be_misread_are_refused():
    wide = torch.randn(6, 10)[:, ::2]
    overlapping, words = x[:1].expand(6, 5), r"strides that .* pass \w+\.contiguous\(\)"
    for call in (
        lambda: OPS.layer_norm_mse(wide, x, None, 0.0, 1, True, False),
        lambda: OPS.layer_norm_mse(x, wide, None, 0.0, 1, True, False),
        lambda: OPS.soft_targets(
            x, x, overlapping, every, weights, **SOFT
        ),  # rows written over each other
        lambda: OPS.attention(maps.mT, maps, None, None, False, 1, "mean", False),
        lambda: OPS.relation_terms(cube.mT, cube.mT, None, None, 1.0, 0.0, 1e-8, False),
    ):
        raises(words, call, error=RuntimeError)


def test_indices_out_of_range_are_refused():
    not_one = "is not one of the 3 tokens"
    none = {"teacher_of": [-1] * 5, "unmatched": "renormalise"}
    for words, name, change in (
        ("own: 6 is not an index below 6", "cos_nce", {"own": labels + 1}),
        ("segments: 6 is not an index below 6", "cos_nce", {"segments": labels + 1}),
        ("teacher_rows: 6 is not an index below 6", "soft_targets", {"teacher_rows": labels + 1}),
        ("vocabulary: 9 of 8 rows", "cross_entropy_of_states", {"vocabulary": 9}),
        ("a gradient needs the weights", "cross_entropy", {"weights": None}),
        (f"teacher_of: 3 {not_one}", "matched_soft_targets", {"teacher_of": [0, 1, 2, 3, -1]}),
        (f"teacher_of: -2 {not_one}", "matched_soft_targets", {"teacher_of": [0, 1, 2, -2, -1]}),
        ("a token is there twice", "matched_soft_targets", {"teacher_of": [0, 1, 1, -1, -1]}),
        ("no token has a match", "matched_soft_targets", none),
    ):
        ids = {key: torch.tensor(x) for key, x in change.items() if isinstance(x, list)}
        raises(words, getattr(OPS, name), error=RuntimeError, **named(name) | change | ids)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_out_of_memory_on_a_thread_raises_memory_error(tmp_path):
    """The exception's type and text leave the parallel region."""
    run_ranks(_out_of_memory, 1, tmp_path)


def _out_of_memory(rank: int) -> None:
    import resource  # of Unix

    torch.set_num_threads(2)
    x = torch.randn(1, 20_000, 1)
    given = None, None, 1.0, 0.0, 1e-8, False
    OPS.relation_terms(x[:, :2], x[:, :2], *given)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, before[1]))
    try:
        raises("std::bad_alloc", OPS.relation_terms, x, x, *given, error=MemoryError)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
