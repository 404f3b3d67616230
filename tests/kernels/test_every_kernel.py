"""What only kernels have: few launches of a step, edges of their blocks, and their launchers."""

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton

import fastkd
from fastkd import functional
from fastkd._core.dispatch import TRITON_FUNCTIONS
from fastkd._core.operator import aligned
from fastkd.kernels.launch import cdiv, next_power_of_2
from fastkd.lm.soft_targets import DIVERGENCES
from tests.kernels.launches import count_launches
from tests.losses.hidden_states import KINDS
from tests.support.compare import assert_matches_reference, raises

pytestmark = pytest.mark.usefixtures("tensors_on_device")
MOST_COLUMNS = TRITON_FUNCTIONS["layer_norm_mse"].limits["columns"]


def learning(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


# A step, the kernels that it starts or their number, the most operations in all, and how many
# times the interpreter on the CPU also reads a mask.
Step = tuple[Callable, tuple, dict, list[str] | int, int, int]
HIDDEN = ["count_kernel", "hidden_states_kernel", "reduce_kernel", "upstream_kernel"]
MAPS = ["attention_count_kernel", "attention_kernel", "reduce_kernel", "upstream_kernel"]
TOP_K = ["reduce_kernel", "soft_target_kernel", "top_k_gradient_kernel", "top_k_outcomes_kernel"]


def steps() -> Iterator[Step]:
    mask = torch.ones(2, 5).bool()
    for kind, weights in itertools.product(KINDS, (None, torch.rand(2, 5))):
        given = learning(2, 5, 40), torch.randn(2, 5, 40), mask
        options = {"kind": kind, "weights": weights}
        yield fastkd.hidden_state_loss, given, options, HIDDEN, 8 + 2 * (weights is not None), 0
    for divergence in DIVERGENCES:
        given, own = (learning(2, 3, 40), torch.randn(2, 3, 40)), "soft_target_kernel"
        options = {"divergence": divergence, "mask": mask[:, :3], "temperature": 2.0}
        own = "adaptive_kl_kernel" if divergence == "adaptive_kl" else own
        yield fastkd.soft_target_loss, given, options, sorted([own, *HIDDEN[::2], HIDDEN[3]]), 8, 7
    log_probs, ids = torch.randn(6, 40).log_softmax(-1).topk(3)
    for tail in ("bucket", "renormalise"):
        given = learning(6, 40), fastkd.TopK(ids, log_probs, tail)
        yield fastkd.soft_target_loss, given, {}, TOP_K, 20, 0
    pair, names = (learning(5, 40), learning(5, 40)), ["layer_norm_mse_kernel", *HIDDEN[2:]]
    yield fastkd.layer_norm_mse, pair, {}, names, 8, 0
    for heads, layers, times in (("match", 1, 1), ("mean", 1, 1), ("match", 8, 1), ("mean", 9, 2)):
        sides = ([new(2, 3, 7, 7) for _ in range(layers)] for new in (learning, torch.randn))
        given, most = (*sides, torch.ones(2, 7).bool()), 13 if layers == 1 else 100
        module = fastkd.AttentionLoss(heads, backend="triton")
        yield module, given, {}, sorted(MAPS * times), most, 0
    for batch, own, labelled in ((4, 4, 4), (17, 4, 5), (33, 5, 5)):
        yield from contrasts(batch, own, labelled)


def contrasts(batch: int, own: int, labelled: int) -> Iterator[Step]:
    """COS-NCE in a batch, with labels, and with negatives that are given."""
    sides = [new(batch, 2, 8) for new in (learning, torch.randn)]
    labels, bank = {"labels": torch.arange(batch)}, {"negatives": torch.randn(5, 2, 8)}
    both = bank | labels | {"negatives_labels": torch.arange(5)}
    mask = {"mask": torch.ones(batch, 2).bool()}
    masked = bank | {"negatives_mask": torch.ones(5, 2).bool()}
    for options, count in (
        ({}, own), (labels, labelled), ({"reduction": "sum"}, own - (batch <= 32)),
        (bank, 6), (masked, 6), (both, 6),
    ):  # fmt: skip
        yield fastkd.cos_nce_loss, (*sides,), mask | options, count, 8, 2
    module = fastkd.CosNCELoss(8, 8, backend="triton")
    layers = [[x, x] for x in sides]
    negatives = {"negatives": [*bank.values()] * 2}
    for options, count in (({}, own), (labels, labelled), (negatives, 6)):
        yield module, (*layers, mask["mask"]), options, count, 100, 0


def test_few_launches(device):
    for call, given, options, kernels, most, looks in steps():
        options |= {} if isinstance(call, torch.nn.Module) else {"backend": "triton"}
        with count_launches() as launches:
            call(*given, **options).backward()
        found, name = launches.of_triton(), f"{call} {[*options.items()]}: {launches}"
        assert (len(found) if isinstance(kernels, int) else sorted(found)) == kernels, name
        assert len(launches) <= most + looks * (device.type == "cpu"), name


def block_edges() -> Iterator[tuple[str, tuple, dict]]:
    for N, dtype in ((16, torch.bfloat16), (130, torch.float32)):
        student, *teachers = (torch.randn(2, heads, N, N).to(dtype) for heads in (2, 2, 3))
        mask = torch.arange(N) < torch.tensor([[N], [N // 2]])
        for teacher, heads in zip(teachers, ("match", "mean"), strict=True):
            yield "attention_loss", (student, teacher, mask), {"heads": heads}
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])
    for kind, (D, dtype) in itertools.product(KINDS, ((64, torch.bfloat16), (1030, torch.float32))):
        yield "hidden_state_loss", (*torch.randn(2, 3, 5, D).to(dtype), mask), {"kind": kind}
    for columns in (1, 17, 129, 1025, 8193, MOST_COLUMNS):
        yield "layer_norm_mse", ([*torch.randn(2, 3 if columns < 1000 else 2, columns)],), {}
    # 33 samples have one label, so nothing is compared.
    for shape in ((16, 2, 128), (17, 1, 129), (33, 2, 65), (129, 1, 16)):
        pair, rows = torch.randn(2, *shape) + 0.5, torch.randn(shape[:2])
        labels = torch.randint(0, 4 if shape[0] != 33 else 1, shape[:1])
        options = {"mask": torch.rand(shape[:2]) > 0.3, "labels": labels}
        yield "cos_nce_loss", (*pair,), options | {"reduction": "none", "upstream": rows}
        yield "cos_nce_loss", (*pair.bfloat16(),), options | {"weights": rows}


def of_edges(name: str) -> Callable:
    """A test with a parameter for each of the loss's calls, of which compiled code runs one."""
    calls = [x for x, *_ in block_edges()].count(name)

    @pytest.mark.parametrize("number", range(calls))
    def test(number):
        given, options = [x for of, *x in block_edges() if of == name][number]
        functions = getattr(fastkd, name), getattr(functional, f"{name}_ref")
        assert_matches_reference(*functions, "triton", *given, **options)

    return test


test_block_edges_of_attention = of_edges("attention_loss")
test_block_edges_of_hidden_states = of_edges("hidden_state_loss")
test_block_edges_of_layer_norm = of_edges("layer_norm_mse")
test_block_edges_of_contrasts = of_edges("cos_nce_loss")


def test_rows_too_wide_say_so():
    x, loss = torch.zeros(1, MOST_COLUMNS + 1), fastkd.layer_norm_mse
    raises("at most 16384 columns, got 16385", loss, x, x, backend="triton")
    assert loss(x, x).item() == 0


def test_a_row_far_from_zero_changes_no_other_of_its_block():
    """Only rows that need it are computed again; other rows keep their bits."""
    gradients, (x, y) = [], torch.randn(2, 8, 64)
    for far in (0.0, 1e6):
        moved = x + 300
        moved[3] += far
        loss = fastkd.layer_norm_mse(moved.requires_grad_(), y, reduction="sum", backend="triton")
        gradients.append(torch.autograd.grad(loss, moved)[0][torch.arange(8) != 3])
    assert torch.equal(*gradients)


# Launchers


def test_tensors_are_aligned_and_sizes_rounded_as_triton_does():
    x = torch.arange(8.0)
    assert aligned(x) is x and aligned(3) == 3
    for moved in (aligned(x[1:]), *aligned([x[1:], x[1:]])):
        assert moved.data_ptr() % 16 == 0 and moved.equal(x[1:])
    for n, size in itertools.product((1, 2, 3, 16, 17, 1000, 2**31 + 1), (1, 7, 16)):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert cdiv(n, size) == triton.cdiv(n, size) and cdiv(0, size) == 0


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_gradient_is_saved_for_the_backward_pass(kind, dtype):
    """float16 can't hold it before the loss scale is multiplied in."""
    loss = functools.partial(fastkd.hidden_state_loss, kind=kind) if kind else fastkd.attention_loss
    student, teacher = torch.rand(2, *((10, 300) if kind else (2, 3, 40, 40)), dtype=dtype)
    own, kept = {x.data_ptr() for x in (student, teacher)}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss(student.detach().requires_grad_(), teacher, backend="triton")
        loss(student, teacher, backend="triton")
    gradients = [x for x in kept if x.data_ptr() not in own]
    assert [x.numel() for x in gradients] == [student.numel()] * (dtype == torch.bfloat16)
