"""The C++ operators called directly, as exported and compiled graphs call them."""

import sys
from pathlib import Path

import pytest
import torch

from fastkd._core import extension
from tests.distill.processes import run_ranks

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
TOP = torch.tensor([[0, 3]] * 6)
STATES = dict(count=6.0, needs_hidden=True, needs_weight=True, needs_bias=True, vocabulary=7,
              scale=1.0, factor=1.0, label_smoothing=0.0, z_loss=0.0, narrow=False)  # fmt: skip
# Valid positional arguments and options of each operator.
CALLS = {
    "layer_norm_mse": (
        (x, x, weights),
        dict(eps=0.0, divisor=1, needs_dx=True, needs_dy=True),
    ),
    "hidden_states": (
        (x, x, every, weights),
        dict(kind="mse", beta=1.0, reduction="mean", gradient=True),
    ),
    "soft_targets": (
        (x, x, x.clone(), every, weights),
        SOFT | dict(log_mass=torch.zeros(6), labels=labels % 5, terms=torch.empty(6, 6)),
    ),
    "top_k_soft_targets": (
        (x, TOP, x[:, :2], x.clone(), every, weights),
        SOFT | dict(bucket=True, reduction="batchmean", denominator=torch.tensor(6.0)),
    ),
    "matched_soft_targets": (
        (x, x[:, :3], torch.tensor([2, -1, 0, 1, -1]), x.clone(), every, weights),
        SOFT | dict(unmatched="bucket"),
    ),
    "is_top_k": ((TOP, x[:, :2], every, 5, 10.0), {}),
    "cos_nce": (
        (cube, cube, cube, all_tokens, all_tokens, labels, labels, torch.rand(24)),
        dict(classes=6, others=True, own_too=False, reduction="mean", gradient=True),
    ),
    "attention": (
        (maps, maps, torch.ones(2, 4).bool(), torch.rand(2)),
        dict(mean=False, layers=1, reduction="mean", gradient=True),
    ),
    "knn": (
        (x, x, labels, labels, labels, torch.tensor(6), weights),
        dict(k=1, ignore_index=-100, reduction="sum", gradient=True),
    ),
    "relation_terms": (
        (cube, cube, all_tokens, weights),
        dict(tokens=1.0, samples=1.0, eps=1e-8, gradient=True),
    ),
    "cross_entropy": (
        (x, labels % 5, x.clone(), weights),
        dict(label_smoothing=0.0, z_loss=0.0),
    ),
    "cross_entropy_of_states": (
        (x, torch.randn(8, 5), torch.randn(8), labels, weights, torch.tensor(6.0)),
        STATES,
    ),
}
NEEDS = "needs_hidden", "needs_weight", "needs_bias"
FORMS = {
    "cross_entropy_of_states": [
        {"count": count} | dict(zip(NEEDS, needs, strict=True))
        for count in (0.0, 6.0)
        for needs in ((True, False, False), (False, True, True), (False, False, False))
    ]
}
if extension.CPU and OPS.has_half_product():
    half = x.bfloat16()
    CALLS["half_product"] = (torch.empty(6, 6), half, half.T, False), {}


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
    operator = getattr(OPS, name).default
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(operator, arguments, options, test_utils=tests)
    for change in FORMS.get(name, ()):
        torch.library.opcheck(operator, arguments, options | change, test_utils=tests)


@pytest.mark.parametrize("kind", ["size", "dtype", "dimensions"])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_shapes_and_dtypes_are_refused(name, kind):
    """Wrong sizes, dtypes and numbers of dimensions of every tensor of every operator."""
    arguments, options = CALLS[name]
    schema = getattr(OPS, name).default._schema
    given = dict(zip((a.name for a in schema.arguments), arguments, strict=False)) | options
    getattr(OPS, name)(**given)
    for argument, value in given.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(RuntimeError) as error:
                getattr(OPS, name)(**given | {argument: changed(value, kind)})
            named = [a.name for a in schema.arguments if f"{a.name}: " in str(error.value)]
            assert named, error.value


def test_strides_that_would_be_misread_are_refused():
    wide = torch.randn(6, 10)[:, ::2]
    overlapping = x[:1].expand(6, 5), torch.ones(6).bool(), torch.rand(6)
    for call in (
        lambda: OPS.layer_norm_mse(wide, x, None, 0.0, 1, True, False),
        lambda: OPS.layer_norm_mse(x, wide, None, 0.0, 1, True, False),
        lambda: OPS.soft_targets(x, x, *overlapping, **SOFT),  # rows written over each other
        lambda: OPS.attention(maps.mT, maps, None, None, False, 1, "mean", False),
        lambda: OPS.relation_terms(cube.mT, cube.mT, None, None, 1.0, 0.0, 1e-8, False),
    ):
        with pytest.raises(RuntimeError, match=r"strides that .* pass \w+\.contiguous\(\)"):
            call()


def test_indices_out_of_range_are_refused():
    arguments, options = CALLS["cos_nce"]
    for place, name in ((5, "own"), (6, "segments")):
        wrong = list(arguments)
        wrong[place] = labels + 1
        with pytest.raises(RuntimeError, match=f"{name}: 6 is not an index below 6"):
            OPS.cos_nce(*wrong, **options)
    with pytest.raises(RuntimeError, match="teacher_rows: 6 is not an index below 6"):
        OPS.soft_targets(x, x, None, None, None, **SOFT, teacher_rows=labels + 1)
    for ids, problem in (
        ([0, 1, 2, 5, -1], "5 is not one of the 5 tokens"),
        ([0, 1, 2, -2, -1], "-2 is not one of the 5 tokens"),
        ([0, 1, 1, -1, -1], "a token is there twice"),
        ([-1] * 5, "no token has a match"),
    ):
        given = x, x, torch.tensor(ids), None, None, None
        with pytest.raises(RuntimeError, match=f"teacher_of: {problem}"):
            OPS.matched_soft_targets(*given, **SOFT, unmatched="renormalise")
    arguments, options = CALLS["cross_entropy_of_states"]
    with pytest.raises(RuntimeError, match="vocabulary: 9 of 8 rows"):
        OPS.cross_entropy_of_states(*arguments, **options | {"vocabulary": 9})
    with pytest.raises(RuntimeError, match="a gradient needs the weights"):
        OPS.cross_entropy(x, labels % 5, x.clone(), None, 0.0, 0.0)


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
        with pytest.raises(MemoryError, match="std::bad_alloc"):
            OPS.relation_terms(x, x, *given)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
