"""Outputs captured by hooks equal transformers' own hidden states."""

import pytest
import torch
import transformers as t

from fastkd.distill import Distiller, IntraClassKNN
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import capture, replaced_embeddings
from fastkd.models.inputs import reads_last_token
from fastkd.models.outputs import LayerRequest, model_outputs
from tests.distill import support
from tests.distill.models import CONFIGS, batch, classifier
from tests.distill.models import model as model_of

# Models that test_by_hand.py doesn't run. SqueezeBERT doesn't call its blocks as modules,
# Longformer pads to whole windows, ProphetNet adds streams of predictions.
STATES = [
    ("whisper", "transcripts"), ("squeezebert", "sequence"), ("longformer", "none"),
    ("prophetnet", "none"), ("t5", "sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "head"), STATES)
def test_layers_are_transformers_hidden_states(family, head):
    model, data = support.model_of(family, head).eval(), support.data_of(family, head)
    backbone = Backbone(model)
    data = backbone.with_decoder_inputs(data, data.pop("labels"))
    with torch.no_grad():
        output = model(**data, output_hidden_states=True)
        found = model_outputs(backbone, data, LayerRequest((0, 1, 2, 3))).hidden
        some = model_outputs(backbone, data, LayerRequest((2,))).hidden
    expected = getattr(output, "decoder_hidden_states", None) or output.hidden_states
    assert sorted(found) == [0, 1, 2, 3] and sorted(some) == [2]
    for layer, hidden in found.items():
        torch.testing.assert_close(hidden, expected[layer])
    torch.testing.assert_close(some[2], expected[2])
    assert backbone.hidden_size == expected[3].shape[-1] and backbone.num_layers == 3


def test_a_head_without_ids_reads_the_last_position():
    models, seen = [classifier("gpt2", layers).double() for layers in (4, 2)], []
    method = IntraClassKNN(alpha2=0, alpha3=0)
    method.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    embeds = torch.randn(4, 6, 16, dtype=torch.float64)
    Distiller(*models, method).eval()(inputs_embeds=embeds, labels=torch.arange(4) % 2)
    tokens, _ = seen[0].pooled("cls", *seen[0].last())
    for model, token in zip(models[::-1], tokens, strict=True):
        torch.testing.assert_close(model.score(token), model(inputs_embeds=embeds).logits)


def test_no_hook_stays():
    """That replaced embeddings reach the first block: LRC-BERT among the random steps."""
    model, inputs = classifier("bert"), batch()
    backbone = Backbone(model)
    with pytest.raises(RuntimeError, match="stop"), capture(backbone, [1, 4]):
        raise RuntimeError("stop")
    with torch.no_grad(), replaced_embeddings(backbone, lambda emb: emb + 0) as same:
        backbone.run({name: x for name, x in inputs.items() if name != "labels"})
    assert len(same) == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_unknown_inputs_of_a_model_are_dropped():
    ids = torch.randint(5, 60, (1, 4))
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    assert Backbone(classifier("distilbert")).run(inputs).logits.shape == (1, 3)
    cached = Backbone(classifier("llama")).run({"input_ids": ids})
    assert cached.past_key_values is None


def test_backbones_of_few_models():
    """XLM predicts tokens at their own positions; without a mask the last position is the last."""
    config = t.XLMConfig(vocab_size=60, emb_dim=16, n_layers=2, n_heads=2)
    assert not Backbone(t.XLMWithLMHeadModel(config)).causal
    model, hidden = classifier("bert"), torch.randn(2, 5, 16)
    assert Backbone(torch.compile(model, backend="eager")).base is model.bert
    last = Backbone(classifier("gpt2")).sentence_token(hidden, None)
    assert torch.equal(last, hidden[:, -1])


@pytest.mark.parametrize("family, model_class, causal", [
    ("bert", t.BertForMaskedLM, False),
    ("gpt2", t.GPT2LMHeadModel, True),
    ("llama", t.LlamaForCausalLM, True),
    ("xlnet", t.XLNetLMHeadModel, False),
])  # fmt: skip
def test_kinds_of_head(family, model_class, causal):
    head = Backbone(model_class(CONFIGS[family](2)))
    assert head.causal is causal and head.per_token and head.has_head
    base = Backbone(head.base)
    assert not base.has_head and not base.per_token and base.problem is None
    one_label = Backbone(classifier(family, num_labels=1))
    assert one_label.problem == "regression" and not one_label.per_token


def test_custom_classes_keep_their_heads():
    class HeadInputs(t.GPT2LMHeadModel):
        pass

    class Tags(t.BertForTokenClassification):
        pass

    words = Backbone(model_of(HeadInputs, "gpt2", num_labels=1))
    assert words.causal and words.per_token
    tags = Backbone(model_of(Tags, "bert", problem_type="regression"))
    assert tags.per_token and not tags.causal
    answers = Backbone(model_of(t.BertForQuestionAnswering, "bert", problem_type="regression"))
    choices = Backbone(model_of(t.BertForMultipleChoice, "bert", num_labels=1))
    # transformers' losses of these heads ignore the configuration.
    assert all(head.problem is None for head in (words, tags, answers, choices))


def test_models_with_remote_code_declare_their_properties():
    config = CONFIGS["llama"](2)
    config.model_type = "mine"
    assert not reads_last_token(config)
    config.auto_map = {"AutoModelForCausalLM": "mine.Mine"}
    assert reads_last_token(config)
    config.auto_map["AutoModelForMaskedLM"] = "mine.Mine"
    assert not reads_last_token(config)
