"""Layer similarity against direct float64 computation on all activations at once."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, GPT2Config, GPT2Model

from fastkd.analysis import adjacent_layer_cca, cka_matrix, rccc, svcca_matrix
from fastkd.analysis.layers import LayerMoments


def bert(cls=BertModel, layers=3, hidden=12):
    torch.manual_seed(1)
    return cls(
        BertConfig(
            vocab_size=60,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=24,
        )
    )


def padded_batch(rows=24, tokens=10):
    ids = torch.randint(1, 60, (rows, tokens))
    lengths = torch.randint(2, tokens + 1, (rows, 1))
    return {"input_ids": ids, "attention_mask": (torch.arange(tokens) < lengths).long()}


def activations(model, batch):
    with torch.no_grad():
        hidden = model.eval()(**batch, output_hidden_states=True).hidden_states
    return [x[batch["attention_mask"].bool()].double() for x in hidden]


def svcca_direct(x, y, variance=0.99):
    """Mean cosine of the principal angles between the leading singular subspaces (QR, SVD)."""
    bases = []
    for a in (x, y):
        u, s, _ = torch.linalg.svd(a - a.mean(0), full_matrices=False)
        held = s.square().cumsum(0) / s.square().sum()
        kept = int((held < variance).sum()) + 1
        bases.append(torch.linalg.qr(u[:, :kept] * s[:kept])[0])
    return torch.linalg.svdvals(bases[0].T @ bases[1]).mean()


def cka_direct(x, y):
    """Kornblith et al.: HSIC of centred Gram matrices of the observations."""
    n = len(x)
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    k, m = (centre @ a @ a.T @ centre for a in (x, y))
    return (k * m).sum() / ((k * k).sum() * (m * m).sum()).sqrt()


def test_svcca_and_cka_match_direct_formulas():
    model, batch = bert(), padded_batch()
    layers = activations(model, batch)
    svcca, cka = svcca_matrix(model, [batch]), cka_matrix(model, [batch])
    assert svcca.shape == cka.shape == (4, 4)
    for i, x in enumerate(layers):
        for j, y in enumerate(layers):
            torch.testing.assert_close(svcca[i, j], svcca_direct(x, y), rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(cka[i, j], cka_direct(x, y), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variance", [0.5, 0.99, 1.0])
def test_adjacent_is_beside_the_diagonal(variance):
    model, batch = bert(BertForSequenceClassification), padded_batch()
    adjacent = adjacent_layer_cca(model, [batch], variance=variance)
    matrix = svcca_matrix(model, [batch], variance=variance)
    torch.testing.assert_close(adjacent, matrix.diagonal(1))


def test_split_order_padding_and_labels_change_nothing():
    model, batch = bert(), padded_batch()
    whole = svcca_matrix(model, [batch])
    pieces = [{k: v[i : i + 5] for k, v in batch.items()} for i in range(0, 24, 5)]
    torch.testing.assert_close(svcca_matrix(model, iter(pieces[::-1])), whole, rtol=1e-6, atol=1e-6)
    longer = {k: torch.nn.functional.pad(v, (0, 7)) for k, v in batch.items()}
    longer["labels"] = torch.zeros(24, dtype=torch.long)
    torch.testing.assert_close(svcca_matrix(model, [longer]), whole, rtol=1e-5, atol=1e-5)


def test_moments_keep_digits_far_from_zero():
    x = torch.randn(3000, 5, dtype=torch.float64) * torch.tensor([1, 2, 3, 4, 5.0])
    far = x + 1e8
    moments = LayerMoments([(0, 0)])
    for piece in far.split([1, 7, 992, 0, 2000]):
        moments.update([piece])
    torch.testing.assert_close(moments.covariance(0, 0), (far - 1e8).T.cov(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moments.means[0], far.mean(0))
    assert moments.count == 3000


def test_memory_does_not_grow_with_batches():
    moments = LayerMoments([(0, 0), (0, 1), (1, 1)])
    for _ in range(5):
        moments.update([torch.randn(50, 4), torch.randn(50, 6)])
    assert sum(t.numel() for t in moments._sums.values()) == 4 * 4 + 4 * 6 + 6 * 6


def test_modes_and_gradients_are_left_alone():
    model = bert().train()
    model.encoder.layer[0].eval()
    before = [m.training for m in model.modules()]
    svcca_matrix(model, [padded_batch()])
    assert [m.training for m in model.modules()] == before
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError):
        svcca_matrix(model, [{"no_such_input": torch.ones(1)}])
    assert [m.training for m in model.modules()] == before


def test_decoder_without_mask_and_rank_deficient():
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    batch = {"input_ids": torch.randint(40, (1, 6))}
    matrix = svcca_matrix(model, [batch], variance=1.0)
    # 6 observations of 16 features: every direction of one layer is seen in the other.
    torch.testing.assert_close(matrix, torch.ones(3, 3, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_constant_layer_correlates_with_nothing():
    model = bert()
    torch.nn.init.zeros_(model.encoder.layer[1].output.LayerNorm.weight)
    svcca, cka = svcca_matrix(model, [padded_batch()]), cka_matrix(model, [padded_batch()])
    assert (svcca[2] == 0).all() and (cka[2] == 0).all()
    assert svcca.isfinite().all() and svcca[0, 1] > 0


def test_mistakes_are_named():
    model, batch = bert(), padded_batch()
    with pytest.raises(ValueError, match="two real tokens"):
        svcca_matrix(model, [])
    with pytest.raises(ValueError, match="two real tokens"):
        cka_matrix(model, [{**batch, "attention_mask": torch.zeros(24, 10)}])
    with pytest.raises(ValueError, match="variance"):
        svcca_matrix(model, [batch], variance=1.5)
    torch.nn.init.constant_(model.encoder.layer[2].output.LayerNorm.weight, float("nan"))
    with pytest.raises(ValueError, match="layer 3 of the model gave values that are not finite"):
        svcca_matrix(model, [batch])


def test_rccc_is_first_against_last():
    matrix = torch.tensor([[1.0, 0.8, 0.3], [0.8, 1.0, 0.9], [0.3, 0.9, 1.0]])
    assert rccc(matrix) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="square"):
        rccc(torch.ones(2, 3))
