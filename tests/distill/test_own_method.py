"""A user's method: the outputs that it may request, and its import by name."""

import pytest
import torch
import transformers as t

from fastkd.distill import FCD, Distiller, method_by_name, resolve
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import capture_qkv
from fastkd.models.outputs import LayerRequest, model_outputs
from tests.distill.models import CONFIGS, batch, pair
from tests.distill.own_method import HiddenAndAttention, Unfinished
from tests.distill.support import model_of
from tests.support.compare import raises


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_queries_of_self_attention_are_captured(family):
    """A block with cross-attention has two of each name."""
    config = CONFIGS[family](2)
    config.is_decoder = config.add_cross_attention = True
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    backbone, states = Backbone(model), {"encoder_hidden_states": torch.randn(1, 4, 16)}
    with torch.no_grad(), capture_qkv(backbone, [2]) as kept:
        maps = backbone.run(
            {"input_ids": torch.arange(6)[None], "output_attentions": True, **states}
        )
    queries, keys, _ = kept[2]
    scores = (queries @ keys.mT / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e30)
    torch.testing.assert_close(maps.attentions[1], scores.softmax(-1))


def test_models_that_do_not_show_what_a_method_asks_for_are_errors():
    sizes = {"vocab_size": 60, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64}
    interleaved = t.GPTBigCodeModel(t.GPTBigCodeConfig(**sizes, multi_query=False))
    with (
        pytest.raises(ValueError, match="doesn't show its queries"),
        capture_qkv(Backbone(interleaved), [1]),
    ):
        pass
    squeezed = Backbone(model_of("squeezebert", "none"))  # (B, D, N), which would pass for others
    inputs = {"input_ids": batch()["input_ids"]}
    raises("SqueezeBertModel doesn't show", model_outputs, squeezed, inputs, LayerRequest(qkv=(1,)))


def test_unfinished_methods_are_errors():
    words = r"'nothing' is not a term; define the method nothing\(step\)"
    raises(words, Distiller, *pair(), Unfinished(), error=TypeError)
    words = "arguments alpha are not attributes"
    raises(words, Unfinished().hyperparameters, error=TypeError)
    assert "alpha" in repr(Unfinished())


def test_methods_are_found_by_name():
    path = "tests.distill.own_method:HiddenAndAttention"
    assert (resolve("fcd"), resolve(path)) == (FCD, HiddenAndAttention)
    method = method_by_name(path, attention=0.5)
    assert method.hyperparameters() == {"hidden": 1.0, "attention": 0.5, "relations": 1.0}
    raises("did you mean 'attention'", method_by_name, path, atention=1.0)
    raises("No module named 'nowhere'", resolve, "nowhere.at_all:Class")
    raises("has no attribute 'Class'", resolve, "tests.distill.own_method:Class")
    raises("did you mean 'fcd'", resolve, "fdc")
    words, path = r"must be a subclass of fastkd\.distill\.Method", "tests.distill.own_method:"
    raises(words, resolve, path + "not_a_method", error=TypeError)
