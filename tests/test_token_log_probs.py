"""Log-probabilities of tokens and top k, without all logits."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastkd import Head, TopK
from fastkd.lm.log_probs import log_probs, log_probs_ref
from tests.support.compare import DTYPES, assert_matches_reference, counted, values_and_grads


def case(R=7, D=6, V=20, K=3, dtype=torch.float32):
    ids = torch.randint(V, (R, K) if K else (R,))
    return torch.randn(R, D).to(dtype), torch.randn(V, D).to(dtype), ids


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [0, 1, 4])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_matches_reference(dtype, K, temperature):
    hidden, weight, ids = case(K=K, dtype=dtype)

    def call(hidden, weight, backend="torch", function=log_probs, **options):
        return function(hidden, weight, ids, temperature=temperature, **options)

    for chunk_bytes in (1, 200, 10**6):
        assert_matches_reference(
            functools.partial(call, chunk_bytes=chunk_bytes),
            functools.partial(call, function=log_probs_ref),
            "torch",
            [hidden, weight],
        )


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_bias_scale_and_cap(softcap):
    hidden, weight, ids = case()

    def call(hidden, weight, bias, function, **options):
        return function(hidden, Head(weight, bias, 0.5, softcap), ids, temperature=2.0, **options)

    found, expected = (
        values_and_grads(call, [hidden, weight, torch.arange(20.0)], function, **options)
        for function, options in ((log_probs, {"chunk_bytes": 170}), (log_probs_ref, {}))
    )
    torch.testing.assert_close(found, expected)


def test_leading_dimensions_no_rows_and_repeated_ids():
    hidden, weight, _ = case(12)
    ids = torch.randint(20, (3, 4, 5))
    ids[..., 1] = ids[..., 0]  # a gradient twice
    options = {"chunk_bytes": 100}
    found = values_and_grads(log_probs, [hidden.view(3, 4, 6), weight], ids, **options)
    torch.testing.assert_close(
        found, values_and_grads(log_probs_ref, [hidden.view(3, 4, 6), weight], ids)
    )
    one = log_probs(hidden.view(3, 4, 6), weight, ids[..., 0])
    torch.testing.assert_close(one, found[0][..., 0])
    assert log_probs(hidden[:0], weight, ids[0, :0]).shape == (0, 5)
    single = log_probs(hidden[0], weight, ids[0, 0, 0])
    assert single.shape == () and single == found[0][0, 0, 0]


def test_gradcheck():
    hidden, weight, ids = case(R=5, D=3, V=7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: log_probs(h, Head(w, softcap=4.0), ids, temperature=1.5, chunk_bytes=150),
        (hidden.requires_grad_(), weight.requires_grad_()),
    )


class Largest(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_the_logits_of_all_tokens_are_never_made():
    hidden, weight, ids = case(R=1000, D=4, V=300)
    with Largest() as largest:
        values_and_grads(log_probs, [hidden, weight], ids, chunk_bytes=4 * 300 * 10)
        TopK.of(hidden, weight, 3, chunk_bytes=4 * 300 * 10)
    assert largest.numel <= max(1000 * 4, 300 * 10)


def test_one_graph_under_compile():
    hidden, weight, ids = case()
    compiled, graphs = counted(functools.partial(log_probs, chunk_bytes=170))
    for R in (7, 5):
        found = values_and_grads(compiled, [hidden[:R], weight], ids[:R])
        torch.testing.assert_close(
            found, values_and_grads(log_probs, [hidden[:R], weight], ids[:R])
        )
    assert len(graphs) <= 2
    top, _ = counted(lambda h, w: TopK.of(h, w, 4).log_probs)
    torch.testing.assert_close(top(hidden, weight), TopK.of(hidden, weight, 4).log_probs)


def test_autocast_changes_nothing_and_backward_runs_twice():
    hidden, weight, ids = case()
    plain = values_and_grads(log_probs, [hidden, weight], ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = values_and_grads(log_probs, [hidden, weight], ids)
    assert all(map(torch.equal, under, plain))
    loss = log_probs(hidden.requires_grad_(), weight, ids).sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_bytes", [None, 1, 250])
def test_top_k_of_hidden_states(dtype, chunk_bytes):
    hidden, weight, _ = case(12, dtype=dtype)
    head = Head(weight.requires_grad_(), torch.linspace(-1, 1, 20), softcap=8.0)
    hidden = hidden.view(3, 4, 6)
    top = TopK.of(hidden, head, 5, temperature=2.0, tail="renormalise", chunk_bytes=chunk_bytes)
    wide = Head(weight.double(), torch.linspace(-1, 1, 20).double(), softcap=8.0)
    exact = (wide.logits(hidden.double()) / 2).log_softmax(-1)
    assert top.tail == "renormalise" and not top.log_probs.requires_grad
    assert top.ids.shape == top.log_probs.shape == (3, 4, 5)
    torch.testing.assert_close(
        top.log_probs.double(), exact.gather(-1, top.ids), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(top.log_probs.double(), exact.topk(5)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k_keeps_the_mass_of_a_thin_tail(temperature):
    logits = torch.randn(7, 50)
    logits[:, 0] = 20 * temperature
    top = TopK.of(torch.eye(7), logits.T, 1, temperature=temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    rest = [-torch.expm1(x.double()[:, 0]) for x in (top.log_probs, exact)]
    assert (rest[1] < 1e-6).all()
    torch.testing.assert_close(*rest, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"hidden": torch.zeros(2, 3, 5)}, ValueError, "hidden must have 4 features"),
        ({"hidden": torch.zeros(2, 3, 4).long()}, TypeError, "hidden must be bfloat16"),
        ({"head": torch.zeros(9)}, ValueError, "head must have 2 dimensions"),
        ({"head": "lm_head"}, TypeError, "head must be a Tensor or Head"),
        ({"ids": torch.zeros(2, 2).long()}, ValueError, "ids must have shape"),
        ({"ids": torch.zeros(2, 3)}, TypeError, "ids must be integers"),
        ({"ids": [[1, 2, 3]] * 2}, TypeError, "ids must be a Tensor"),
        ({"ids": torch.full((2, 3), 9)}, ValueError, "ids must be token ids 0 to 8, got 9"),
        ({"ids": torch.full((2, 3), -1)}, ValueError, "ids must be token ids 0 to 8, got -1"),
        ({"temperature": 0.0}, ValueError, "temperature must be greater than 0"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    right = {
        "hidden": torch.zeros(2, 3, 4),
        "head": torch.zeros(9, 4),
        "ids": torch.ones(2, 3).long(),
    }
    with pytest.raises(error, match=message):
        log_probs(**(right | change))


def test_wrong_arguments_of_top_k_are_named():
    hidden, weight, _ = case()
    with pytest.raises(ValueError, match="k must be at most the head's 20 tokens, got 21"):
        TopK.of(hidden, weight, 21)
    with pytest.raises(ValueError, match="k must be at least 1"):
        TopK.of(hidden, weight, 0)
    with pytest.raises(ValueError, match="hidden requires grad"):
        TopK.of(hidden.requires_grad_(), weight, 2)
    with pytest.raises(ValueError, match="tail must be one of"):
        TopK.of(hidden.detach(), weight, 2, tail="rest")
