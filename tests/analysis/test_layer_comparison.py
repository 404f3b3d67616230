"""Layer similarity of models against direct float64 computation on all activations at once."""

import pytest
import torch
import torch.distributed as dist
import transformers as t
from torch import nn

import fastkd
from fastkd.analysis import (
    adjacent_layer_cca,
    cka_matrix,
    layer_intra_class_similarity,
    layer_similarity,
    rccc,
    similarity,
    svcca_matrix,
)
from fastkd.analysis.similarity_measures import MEASURES
from fastkd.distill import Blocks
from fastkd.models.batch import MixedDocuments
from fastkd.study.run_measurements import PeakMemory
from tests.distill.models import SMALL
from tests.distill.models import model as model_of
from tests.distill.processes import run_ranks
from tests.distill.test_distiller import documents, packed
from tests.support.compare import raises


def bert(cls=t.BertModel, layers=3):
    torch.manual_seed(1)
    return model_of(cls, "bert", layers, hidden_size=12)


def padded_batch(rows=24, tokens=10):
    ids = torch.randint(1, 60, (rows, tokens))
    lengths = torch.randint(2, tokens + 1, (rows, 1))
    mask = (torch.arange(tokens) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(rows) % 3}


def split(batch, *sizes):
    pieces = zip(*(x.split(*sizes) for x in batch.values()), strict=True)
    return [dict(zip(batch, piece, strict=True)) for piece in pieces]


def hidden_states(model, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**inputs, output_hidden_states=True).hidden_states


def activations(model, pieces):
    """Features of the real tokens in all pieces, by layer."""
    parts = ([x[p["attention_mask"].bool()] for x in hidden_states(model, p)] for p in pieces)
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


class Fast(nn.Module):
    """A model with a block of 32 features."""

    def __init__(self, tokens=64):
        super().__init__()
        self.tokens, self.blocks = tokens, nn.ModuleList([nn.Tanh()])

    def forward(self, input_ids):
        return self.blocks[0](torch.randn(len(input_ids), self.tokens, 32))


def fast(**options):
    return Blocks(Fast(**options), "blocks", hidden_size=32)


def test_memory_does_not_grow_with_batches():
    """The features of 400 batches would take 25 MiB."""
    batch, peaks = {"input_ids": torch.zeros(4, 64).long()}, []
    for measures in (["cka"], ["cca"]):
        for number in (10, 400):
            memory = PeakMemory(torch.device("cpu"))
            layer_similarity(fast(), (batch for _ in range(number)), measures)
            peaks.append(memory.read())
    if None in peaks:
        pytest.skip("this system doesn't tell peaks of memory")
    assert max(peaks) < 15 * 2**20, peaks


def assert_matrix(found, layers, others, measure, atol=1e-9):
    wanted = torch.stack([torch.stack([similarity(x, y, measure) for y in others]) for x in layers])
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("measure", MEASURES)
def test_teacher_against_student(measure):
    """Each entry equals the similarity of the two layers' features; the student takes no types."""
    teacher, student = bert(), model_of(t.DistilBertModel, "distilbert", 1)
    batch = {**padded_batch(rows=40), "token_type_ids": torch.zeros(40, 10, dtype=torch.long)}
    pieces = split(batch, 9)
    # The same features: those of another padding differ in float32's last bits.
    layers, others = (activations(model, pieces) for model in (teacher, student))
    found = layer_similarity(teacher, pieces, [measure], other=student)[measure]
    assert found.shape == (4, 2)
    assert_matrix(found, layers, others, measure)
    alone = layer_similarity(teacher, pieces, [measure])[measure]
    assert_matrix(alone, layers, layers, measure)
    assert torch.equal(alone.diagonal(), torch.ones(4, dtype=torch.float64)) or "cka" in measure
    if measure == "svcca":
        assert torch.equal(svcca_matrix(teacher, pieces, other=student), found)
        model = bert(t.BertForSequenceClassification)
        adjacent = adjacent_layer_cca(model, pieces, variance=0.5)
        torch.testing.assert_close(adjacent, svcca_matrix(model, pieces, variance=0.5).diagonal(1))
    if "cka" in measure:
        unbiased = measure == "unbiased_cka"
        assert torch.equal(cka_matrix(teacher, pieces, unbiased=unbiased, other=student), found)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_intra_class_similarity_of_every_layer(pool):
    """The token of a sentence is a decoder's last."""
    batch = padded_batch()
    real, last = batch["attention_mask"][..., None], batch["attention_mask"].sum(1) - 1
    for model, token in ((bert(), 0), (model_of(t.GPT2Model, "gpt2", 1), last)):
        found = layer_intra_class_similarity(model, iter(split(batch, 5)), pool=pool)
        for i, x in enumerate(hidden_states(model, batch)):
            one = x[torch.arange(24), token]
            pooled = one if pool == "cls" else (x * real).sum(1) / real.sum(1)
            expected = fastkd.intra_class_similarity(pooled.double(), batch["labels"])
            torch.testing.assert_close(found[i], expected, rtol=1e-6, atol=1e-6)
        none = {**batch, "labels": torch.full((24,), -100)}
        more = layer_intra_class_similarity(model, [*split(batch, 5), none], pool=pool)
        assert torch.equal(more, found)
    raises("labelled samples", layer_intra_class_similarity, model, [none])
    with pytest.raises(ValueError, match="labels must be integers"):
        layer_intra_class_similarity(model, [{**batch, "labels": torch.rand(24)}])


@pytest.mark.parametrize("how", ["position_ids", "segments"])
def test_documents_of_packed_rows_are_read_as_those_of_own_rows(how):
    """Each document has a label. Other layouts, and similarities: tests/distill/draws.py."""
    torch.manual_seed(0)
    model, labels = model_of(t.GPT2Model, "gpt2", 3).double(), torch.tensor([0, 1, 0, 1, 1])
    texts = documents()
    alone = [{"input_ids": x[None], "labels": y[None]} for x, y in zip(texts, labels, strict=True)]
    batch = {**packed(texts, how, labels=False), "labels": labels}
    found, expected = (layer_intra_class_similarity(model, x) for x in ([batch], alone))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if how == "segments":
        words = r"which the model \(BertModel\) reads as one"
        raises(words, svcca_matrix, bert(), [batch], error=MixedDocuments)
        batch, words = {**batch, "labels": labels[:2]}, r"got 2 for 5 samples \(packed documents"
        raises(words, layer_intra_class_similarity, model, [batch])


MAMBA = {**SMALL, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("config", [
    t.MambaConfig(**MAMBA), t.FalconMambaConfig(**MAMBA),
    t.Mamba2Config(**MAMBA, num_heads=4, head_dim=8, n_groups=1),
])  # fmt: skip
def test_layer_0_is_the_input_of_the_first_block(config):
    """transformers' hidden_states of Mamba begin with the output of block 1."""
    torch.manual_seed(0)
    model, entered = t.AutoModel.from_config(config).eval(), []
    for block in model.layers:
        block.register_forward_pre_hook(
            lambda module, args, kwargs: entered.append(args[0]), with_kwargs=True
        )
    ids = torch.randint(1, 60, (8, 12))
    with torch.no_grad():
        last = model(input_ids=ids).last_hidden_state
    layers = [x.flatten(0, 1) for x in (*entered, last)]
    matrix = cka_matrix(model, [{"input_ids": ids}])
    assert len(matrix) == 3
    assert_matrix(matrix, layers, layers, "cka", atol=1e-6)


def measured(batches, **options):
    """All results that are reduced over processes."""
    model = bert().double()  # two processes' float32 products may differ in the last bits
    return (
        layer_similarity(model, batches, ["svcca", "cka"], **options),
        layer_similarity(model, batches, MEASURES, **options),
        adjacent_layer_cca(model, batches, **options),
        layer_intra_class_similarity(model, batches, **options),
    )


def on_ranks(rank, batches):
    two = dist.new_group([1, 2])
    whole = measured(batches[rank], gather=True)
    return whole, measured(batches[rank], gather=True, group=two) if rank else whole


def test_ranks_equal_one_process(tmp_path):
    """Two uneven parts, without and with a process that has no batch."""
    first, second, third = split(padded_batch(), [5, 2, 17])
    alone = measured([first, second, third])
    ranks = run_ranks(on_ranks, 3, tmp_path, [[], [first, second], [third]])
    for of_all, of_two in ranks:
        for found in (of_all, of_two):
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)
        torch.testing.assert_close(of_all, ranks[0][0], rtol=0, atol=0)


def test_a_model_keeps_its_mode_and_gradients_on_any_default_device():
    model, batch = bert().train(), padded_batch()
    model.encoder.layer[0].eval()
    before = [m.training for m in model.modules()]

    def found():
        yield from (svcca_matrix(model, [batch]), cka_matrix(model, [batch]))
        for pool in ("cls", "mean"):
            yield layer_intra_class_similarity(model, [batch], pool=pool)

    expected = [*found()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with torch.device("meta"):
        assert all(map(torch.equal, found(), expected))
    with pytest.raises(TypeError, match="no input 'no_such_input'"):
        svcca_matrix(model, [{"no_such_input": torch.ones(1)}])
    assert [m.training for m in model.modules()] == before


def test_errors_name_the_argument():
    model, batch = bert(), padded_batch()
    raises("two real tokens", svcca_matrix, model, [])
    raises("two real tokens", cka_matrix, model, [{**batch, "attention_mask": torch.zeros(24, 10)}])
    raises("variance", svcca_matrix, model, [batch], variance=1.5)
    torch.nn.init.constant_(model.encoder.layer[2].output.LayerNorm.weight, float("nan"))
    raises("layer 3 of the model gave values that are not finite", svcca_matrix, model, [batch])
    raises("layer 3 of the other model gave values", svcca_matrix, bert(), [batch], other=model)
    with pytest.raises(ValueError, match="it reads 216 tokens where model reads 240"):
        cka_matrix(bert(), [{"input_ids": batch["input_ids"]}], other=fast(tokens=9))


def test_rccc_compares_the_first_with_the_last_layer():
    matrix = torch.tensor([[1.0, 0.8, 0.3], [0.8, 1.0, 0.9], [0.3, 0.9, 1.0]])
    assert rccc(matrix) == pytest.approx(0.3) and rccc(matrix, first=1) == pytest.approx(0.9)
    raises("square", rccc, torch.ones(2, 3))
