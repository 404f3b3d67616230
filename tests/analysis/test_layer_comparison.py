"""Layer similarity of models against direct float64 computation on all activations at once."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModel,
    BertForSequenceClassification,
    BertModel,
    DistilBertModel,
    FalconMambaConfig,
    GPT2Model,
    Mamba2Config,
    MambaConfig,
)

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


def bert(cls=BertModel, layers=3, hidden=12):
    torch.manual_seed(1)
    return model_of(cls, "bert", layers, hidden_size=hidden)


def padded_batch(rows=24, tokens=10):
    ids = torch.randint(1, 60, (rows, tokens))
    lengths = torch.randint(2, tokens + 1, (rows, 1))
    return {"input_ids": ids, "attention_mask": (torch.arange(tokens) < lengths).long()}


def hidden_states(model, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**inputs, output_hidden_states=True).hidden_states


def activations(model, batch):
    real = batch["attention_mask"].bool()
    return [x[real] for x in hidden_states(model, batch)]


def test_adjacent_reads_the_superdiagonal():
    model, batch = bert(BertForSequenceClassification), padded_batch()
    adjacent = adjacent_layer_cca(model, [batch], variance=0.5)
    matrix = svcca_matrix(model, [batch], variance=0.5)
    torch.testing.assert_close(adjacent, matrix.diagonal(1))


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
    """Each entry equals the similarity of the two layers' features."""
    teacher, student, batch = bert(), bert(layers=1, hidden=8), padded_batch(rows=40)
    pieces = [{k: v[i : i + 9] for k, v in batch.items()} for i in range(0, 40, 9)]
    found = layer_similarity(teacher, pieces, [measure], other=student)[measure]
    assert found.shape == (4, 2)
    # The same features: those of another padding differ in float32's last bits.
    layers, others = (
        [torch.cat(parts) for parts in zip(*(activations(m, p) for p in pieces), strict=True)]
        for m in (teacher, student)
    )
    assert_matrix(found, layers, others, measure)
    alone = layer_similarity(teacher, pieces, [measure])[measure]
    assert_matrix(alone, layers, layers, measure)
    assert torch.equal(alone.diagonal(), torch.ones(4, dtype=torch.float64)) or "cka" in measure


def test_matrices_of_one_measure():
    teacher, student, pieces = bert(), bert(layers=1, hidden=8), [padded_batch()]
    names = ("svcca", "cka", "unbiased_cka")
    found = layer_similarity(teacher, pieces, names, other=student)
    assert torch.equal(svcca_matrix(teacher, pieces, other=student), found["svcca"])
    for name in names[1:]:
        unbiased = name == "unbiased_cka"
        other = cka_matrix(teacher, pieces, unbiased=unbiased, other=student)
        assert torch.equal(other, found[name])


def test_student_that_accepts_fewer_inputs():
    batch = {**padded_batch(), "token_type_ids": torch.zeros(24, 10, dtype=torch.long)}
    student = model_of(DistilBertModel, "distilbert", 1)
    assert svcca_matrix(bert(), [batch], other=student).shape == (4, 2)


def labelled(batch):
    return {**batch, "labels": torch.arange(len(batch["input_ids"])) % 3}


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_intra_class_similarity_of_every_layer(pool):
    model, batch = bert(), labelled(padded_batch())
    pieces = [{k: v[i : i + 5] for k, v in batch.items()} for i in range(0, 24, 5)]
    found = layer_intra_class_similarity(model, iter(pieces), pool=pool)
    real = batch["attention_mask"][..., None]
    for i, x in enumerate(hidden_states(model, batch)):
        pooled = x[:, 0] if pool == "cls" else (x * real).sum(1) / real.sum(1)
        expected = fastkd.intra_class_similarity(pooled.double(), batch["labels"])
        torch.testing.assert_close(found[i], expected, rtol=1e-6, atol=1e-6)
    unlabelled = {**batch, "labels": torch.full((24,), -100)}
    assert torch.equal(layer_intra_class_similarity(model, [*pieces, unlabelled], pool=pool), found)
    raises("labelled samples", layer_intra_class_similarity, model, [padded_batch()])
    with pytest.raises(ValueError, match="labels must be integers"):
        layer_intra_class_similarity(model, [{**batch, "labels": torch.rand(24)}])


def test_sentence_token_of_a_decoder_is_the_last():
    torch.manual_seed(0)
    model = model_of(GPT2Model, "gpt2", 1)
    batch = labelled(padded_batch())
    found = layer_intra_class_similarity(model, [batch])
    rows = hidden_states(model, batch)[-1][torch.arange(24), batch["attention_mask"].sum(1) - 1]
    expected = fastkd.intra_class_similarity(rows.double(), batch["labels"])
    torch.testing.assert_close(found[-1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["position_ids", "segments"])
def test_documents_of_packed_rows_are_read_as_those_of_own_rows(how):
    """Each document has a label. Other layouts, and similarities: tests/distill/draws.py."""
    torch.manual_seed(0)
    model, labels = model_of(GPT2Model, "gpt2", 3).double(), torch.tensor([0, 1, 0, 1, 1])
    texts = documents()
    alone = [{"input_ids": x[None], "labels": y[None]} for x, y in zip(texts, labels, strict=True)]
    batch = {**packed(texts, how, labels=False), "labels": labels}
    found, expected = (layer_intra_class_similarity(model, x) for x in ([batch], alone))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_packed_rows_that_a_model_reads_as_one_document_are_refused():
    batch = packed(documents(), "segments", labels=False)
    words = r"which the model \(BertModel\) reads as one"
    raises(words, svcca_matrix, bert(), [batch], error=MixedDocuments)
    batch["labels"] = torch.zeros(2, dtype=torch.long)
    gpt2, words = model_of(GPT2Model, "gpt2", 1), r"got 2 for 5 samples \(packed documents"
    raises(words, layer_intra_class_similarity, gpt2, [batch])


MAMBA = {**SMALL, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind, options", [
    (MambaConfig, {}), (FalconMambaConfig, {}),
    (Mamba2Config, {"num_heads": 4, "head_dim": 8, "n_groups": 1}),
])  # fmt: skip
def test_layer_0_is_the_input_of_the_first_block(kind, options):
    """transformers' hidden_states of Mamba begin with the output of block 1."""
    torch.manual_seed(0)
    model, entered = AutoModel.from_config(kind(**MAMBA, **options)).eval(), []
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


def measured(ends, **options):
    """All results that are reduced over processes, for these parts of one batch."""
    torch.manual_seed(3)
    batch = labelled(padded_batch())
    batches = [{k: v[a:b] for k, v in batch.items()} for a, b in ends]
    model = bert().double()  # two processes' float32 products may differ in the last bits
    return (
        layer_similarity(model, batches, ["svcca", "cka"], **options),
        layer_similarity(model, batches, MEASURES, **options),
        adjacent_layer_cca(model, batches, **options),
        layer_intra_class_similarity(model, batches, **options),
    )


def on_ranks(rank, ends):
    two = dist.new_group([1, 2])
    whole = measured(ends[rank], gather=True)
    return whole, measured(ends[rank], gather=True, group=two) if rank else whole


def test_ranks_equal_one_process(tmp_path):
    """Two uneven parts, without and with a process that has no batch."""
    ends = [[], [(0, 5), (5, 7)], [(7, 24)]]
    alone = measured(ends[1] + ends[2])
    ranks = run_ranks(on_ranks, 3, tmp_path, ends)
    for of_all, of_two in ranks:
        for found in (of_all, of_two):
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)
        torch.testing.assert_close(of_all, ranks[0][0], rtol=0, atol=0)


def test_training_mode_and_gradients_are_unchanged():
    model = bert().train()
    model.encoder.layer[0].eval()
    before = [m.training for m in model.modules()]
    svcca_matrix(model, [padded_batch()])
    assert [m.training for m in model.modules()] == before
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with pytest.raises(TypeError, match="no input 'no_such_input'"):
        svcca_matrix(model, [{"no_such_input": torch.ones(1)}])
    assert [m.training for m in model.modules()] == before


def test_result_is_equal_under_another_default_device():
    model, batch = bert(), padded_batch()
    batch["labels"] = torch.arange(24) % 3

    def found():
        return [
            layer_similarity(model, [batch], ["cka"])["cka"],
            layer_intra_class_similarity(model, [batch]),
            layer_intra_class_similarity(model, [batch], pool="mean"),
        ]

    expected = found()
    with torch.device("meta"):
        for got, value in zip(found(), expected, strict=True):
            assert torch.equal(got, value)


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
