"""torch.compile: one graph, few graphs for changing sizes, tensors passed twice, Inductor."""

import collections
import itertools
import random

import pytest
import torch

import fastkd
from tests.losses import FILES, subjects
from tests.support.compare import count_graphs, counted, relative_error
from tests.support.draw import FIRST
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
    """Of each loss in PyTorch its function or its Module, and each function on one other backend.

    Which, is drawn anew in each run. The kernels are one operator in a graph, whoever calls it.
    """
    draw, rows = random.Random(FIRST), collections.defaultdict(list)
    for file in FILES.values():
        for name in (subject.name for subject in getattr(file, "subjects", lambda _: ())("torch")):
            rows[file, "torch"].append(("torch", name))
            others = [(backend, name) for backend in BACKENDS[1:] if (backend, name) in TABLE]
            if name[0].islower():
                rows[name.split()[0], "kernels"] += others
    chosen = {draw.choice(forms) for forms in rows.values() if forms}
    return [given for given in parameters(*BACKENDS) if given.values[0] in chosen]


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


GROWING = [
    pytest.param(file, name, id=f"{row}: {name}", marks=pytest.mark.thorough)
    for row, file in FILES.items()
    if hasattr(file, "growing")
    for name in file.growing()
]
# One of them, which is drawn; the others in `make test-all`.
drawn = random.Random(FIRST).randrange(len(GROWING))
GROWING[drawn] = pytest.param(*GROWING[drawn].values, id=GROWING[drawn].id)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the calls are on the CPU")
@pytest.mark.parametrize(("file", "name"), GROWING)
def test_two_graphs_serve_all_sizes(file, name):
    """In PyTorch; a kernel is one operator in a graph, as above."""
    loss, calls = file.growing()[name]
    assert count_graphs(loss, calls) <= 2


def test_inductor():
    """One of three losses under Inductor, whose compilation takes long."""
    divergence = fastkd.SoftTargetLoss(temperature=2.0)
    step = random.Random(FIRST).choice([
        fastkd.relation_loss,
        lambda student, teacher, mask: divergence(student, teacher[..., :D_S], mask),
        lambda student, teacher, mask: fastkd.layer_norm_mse(student, teacher[..., :D_S]),
    ])  # fmt: skip

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
