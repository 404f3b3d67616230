"""Log-probabilities of tokens and top k, without all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastkd import Head, TopK, linear_soft_target_loss
from fastkd.lm.log_probs import log_probs
from tests.support.compare import DTYPES, counted, values_and_grads


def case(R=7, D=6, V=20, K=3, dtype=torch.float32):
    ids = torch.randint(V, (R, K) if K else (R,))
    return torch.randn(R, D).to(dtype), torch.randn(V, D).to(dtype), ids


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


def test_top_k_of_few_tokens():
    hidden, head = torch.randn(3, 5), Head(torch.randn(4, 5), torch.tensor([-torch.inf, 0, 0, 0]))
    ties = TopK.of(torch.zeros(2, 5), torch.randn(4, 5), 4)
    assert (ties.ids.sort(-1)[0] == torch.arange(4)).all()
    torch.testing.assert_close(ties.log_probs.exp(), torch.full((2, 4), 0.25))
    one = TopK.of(hidden, torch.randn(1, 5), 1)
    assert (one.ids == 0).all() and (one.log_probs == 0).all()
    assert TopK.of(hidden[:0], head, 2).ids.shape == (0, 2)
    assert TopK.of(hidden[0], head, 2).ids.shape == (2,)
    whole = TopK.of(hidden, head, 4)
    assert whole.log_probs[:, -1].tolist() == [-torch.inf] * 3  # padding of a TopK
    compiled, _ = counted(lambda h: TopK.of(h, head, 2).log_probs)
    torch.testing.assert_close(compiled(hidden), whole.log_probs[:, :2])
    itself = linear_soft_target_loss(hidden, head, whole)
    torch.testing.assert_close(itself, torch.tensor(0.0), atol=1e-6, rtol=0)
