"""torch.compile: one graph, few graphs for changing sizes, tensors passed twice, Inductor."""

import itertools

import pytest
import torch

import fastkd
from tests.losses import FILES, subjects
from tests.support.compare import count_graphs, counted, relative_error
from tests.support.every import (
    BACKENDS,
    DEVICE,
    TABLE,
    features,
    padding,
    parameters,
    value_and_gradient,
)
from tests.support.subject import D_S, D_T


def traced() -> list:
    """Each function, and in PyTorch each Module.

    The kernels are one operator in a graph, whether a function or a Module calls it.
    """
    once = {(backend, name.split()[0]): name for backend, name in reversed(TABLE)}
    return [
        given
        for given in parameters(*BACKENDS)
        for backend, name in [given.values[0]]
        if once[backend, name.split()[0]] == name and (backend == "torch" or name[0].islower())
    ]


@pytest.mark.parametrize("loss", traced(), indirect=True)
def test_compile(loss):
    """torch.compile(fullgraph=True)"""

    def call(student, teacher, mask):
        """Also with one tensor as both, which Dynamo refuses in an autograd function."""
        own = torch.cat([student, student[..., : D_T - D_S]], -1).detach()
        return loss(student, teacher, mask) + loss(own[..., :D_S], own, mask)

    compiled, graphs = counted(call)
    # More samples than features, and fewer tokens: CCA's cheaper side is one.
    for batch, tokens in ((13, 3), (16, 4)):
        student = torch.randn(batch, tokens, D_S, device=DEVICE, requires_grad=True)
        teacher = torch.randn(batch, tokens, D_T, device=DEVICE)
        mask = (torch.rand(batch, tokens, device=DEVICE) < 0.8).long()
        mask[:, 0] = 1
        for x, dim in itertools.product((student, teacher, mask), (0, 1)):
            torch._dynamo.mark_dynamic(x, dim)
        values = [run(student, teacher, mask) for run in (compiled, call)]
        gradients = [torch.autograd.grad(x, student)[0] for x in values]
        assert max(relative_error(*values), relative_error(*gradients)) <= 1e-5
    assert len(graphs) == 1, f"{len(graphs)} graphs for two sizes"


# Those of two rows; the others in `make test-all`.
GROWING = [
    pytest.param(
        file, name, id=f"{row}: {name}",
        marks=[pytest.mark.thorough] * (place > 0 or row not in ("relation", "soft_targets")),
    )
    for row, file in FILES.items()
    if hasattr(file, "growing")
    for place, name in enumerate(file.growing())
]  # fmt: skip


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the calls are on the CPU")
@pytest.mark.parametrize(("file", "name"), GROWING)
def test_two_graphs_serve_all_sizes(file, name):
    """In PyTorch; a kernel is one operator in a graph, as above."""
    loss, calls = file.growing()[name]
    assert count_graphs(loss, calls) <= 2


def test_inductor():
    """Losses in one graph under Inductor, whose compilation takes long."""
    divergence = fastkd.SoftTargetLoss(temperature=2.0)

    def step(student, teacher, mask):
        same = teacher[..., :D_S]
        rows = fastkd.layer_norm_mse(student, same) + divergence(student, same, mask)
        return fastkd.relation_loss(student, teacher, mask) + rows

    pair, mask = features(), padding()
    compiled = torch.compile(step, fullgraph=True)
    wanted, found = (value_and_gradient(call, *pair, mask) for call in (step, compiled))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_an_empty_batch_in_a_dynamic_graph():
    names = "layer_norm_mse", "hidden_state_loss mse"
    losses = [s for s in subjects("torch") if s.name in names]

    def step(student, teacher):
        return sum(loss(student, teacher) for loss in losses)

    student, teacher = (x[:0] for x in features())
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    assert compiled(student, teacher).item() == 0


def test_compile_without_gradients():
    projection = fastkd.OrthogonalProjection(D_S, D_T)

    def step(student, teacher):
        return fastkd.relation_loss(student, teacher) + projection(student[0]).sum()

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*features()), step(*features()))
