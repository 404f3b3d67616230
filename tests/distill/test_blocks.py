"""Models that aren't from transformers, against what their blocks gave."""

import copy

import pytest
import torch
from torch import nn

from fastkd.distill import METHODS, Blocks, Distiller, method_by_name
from fastkd.distill.verify import verify
from tests.distill.models import ready
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")


class Patches(nn.Module):
    """An image model as timm writes them: blocks in a Sequential, a norm, a head."""

    def __init__(self, layers, D=16, batch_first=True):
        super().__init__()
        self.patches = nn.Conv2d(3, D, 4, 4)
        self.start = nn.Parameter(torch.randn(1, 1, D))
        self.embed = nn.Identity()
        layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=batch_first)
        self.blocks = nn.Sequential(*(copy.deepcopy(layer) for _ in range(layers)))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 3)
        self.batch_first = batch_first

    def forward(self, image):
        x = self.patches(image).flatten(2).mT
        x = self.embed(torch.cat([self.start.expand(len(x), -1, -1), x], 1))
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0] if self.batch_first else x[0])


def side(layers, D=16, **options):
    model, names = Patches(layers, D, **options), {"final": "norm", "embeddings": "embed"}
    return Blocks(model, "blocks", hidden_size=D, output_size=3, **names, **options)


def pair(**options):
    torch.manual_seed(0)
    return side(4, 24, **options), side(2, **options)


def data(rows=6):
    torch.manual_seed(1)
    return {"image": torch.randn(rows, 3, 12, 12), "labels": torch.arange(rows) % 3}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_reaches_every_block(name):
    distiller = ready(*pair(), name)
    out = distiller(**data())
    out.loss.backward()
    for block in distiller.student.model.blocks:
        assert all(p.grad.any() for p in block.parameters())
    assert out.logits.shape == (6, 3)


def test_a_compiled_step_is_one_graph():
    distiller = Distiller(*pair(), method_by_name("fcd"))
    compiled = torch.compile(distiller, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**data()).loss, distiller(**data()).loss)


@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_are_the_blocks_inputs_and_outputs(batch_first):
    distiller = Distiller(*pair(batch_first=batch_first), method_by_name("fcd")).eval()
    seen = {}
    distiller.method.register_forward_pre_hook(lambda module, args: seen.update(step=args[0]))
    model, found = distiller.student.model, []
    model.blocks[1].register_forward_pre_hook(lambda module, args: found.append(args[0]))
    model.norm.register_forward_hook(lambda module, args, output: found.append(output))
    distiller(**data())
    for layer, expected in enumerate(found, 1):
        expected = expected if batch_first else expected.transpose(0, 1)
        assert torch.equal(seen["step"].student.hidden[layer], expected)


class Mean(nn.Sequential):
    def forward(self, input):
        return super().forward(input).mean(1).squeeze(-1)


def regression(layers, kind=nn.Sequential, outputs=2, **options):
    blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    model = kind(nn.Embedding(50, 16), blocks, nn.Linear(16, outputs))
    return Blocks(model, "1", hidden_size=16, output_size=outputs, regression=True, **options)


@pytest.mark.parametrize("name", ["fcd", "soft_targets"])
def test_padding_changes_no_term_of_a_model_without_a_mask(name):
    torch.manual_seed(0)
    models = (regression(layers, per_token=True) for layers in (4, 2))
    distiller = Distiller(*models, method_by_name(name))
    ids, labels, mask = torch.randint(50, (4, 9)), torch.randn(4, 9, 2), torch.ones(4, 9)
    mask[:, 6:] = 0
    found = distiller(input=ids, attention_mask=mask, labels=labels).terms
    torch.testing.assert_close(found, distiller(input=ids[:, :6], labels=labels[:, :6]).terms)


def test_regression_logits_may_have_one_dimension():
    ids, labels = torch.randint(50, (4, 9)), torch.randn(4)
    models = (regression(2, Mean, outputs=1) for _ in range(2))
    distiller = Distiller(*models, method_by_name("soft_targets"))
    student, teacher = (x.model(ids).double() for x in (distiller.student, distiller.teacher))
    terms = distiller(input=ids, labels=labels).terms
    torch.testing.assert_close(terms["task"].double(), (student - labels).square().mean())
    torch.testing.assert_close(terms["soft"].double(), (student - teacher).square().mean())


class HeadInputs(nn.Module):
    """A model without a mask that predicts a class for each token."""

    def __init__(self, layers):
        super().__init__()
        self.embed, self.positions = nn.Embedding(50, 16), nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.head, self.activation = nn.Linear(16, 50), torch.tanh

    def forward(self, input_ids, position_ids=None):
        places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        x = self.embed(input_ids) + self.positions(places)
        for block in self.blocks:
            x = self.activation(block(x))
        return self.head(x)


def test_the_same_step_in_every_way():
    torch.manual_seed(0)
    options = {"hidden_size": 16, "output_size": 50, "per_token": True}
    models = (Blocks(HeadInputs(layers), "blocks", **options) for layers in (4, 2))
    ids, mask = torch.randint(50, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[1:, 6:] = 0
    data = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    distiller = Distiller(*models, method_by_name("lrkd"))
    checks = verify(distiller, data, ranks=0, compile_backend=None)
    found = {check.name: check.verdict for check in checks}
    assert found.pop("checkpointed activations") == "not here"
    assert set(found.values()) == {"equal"}, checks


def test_wrong_arguments_are_errors():
    for options, words in (
        ({"blocks": "layers"}, "blocks"),
        ({"blocks": "blocks", "final": "nrm"}, "final"),
        ({"blocks": "blocks", "embeddings": "emb"}, "embeddings"),
        ({"blocks": "norm"}, "pass the name of a filled ModuleList or Sequential"),
    ):
        raises(words, Blocks, Patches(2), hidden_size=16, **options)
