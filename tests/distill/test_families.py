"""Blocks and outputs of model families, and docs/support.md, which equals the code's results."""

import copy
import random

import pytest
import torch
import transformers as t
from torch import nn

from fastkd import distill
from fastkd.distill import FCD, LRKD, Distiller, SoftTargets, student_from_teacher
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import capture, replaced_embeddings
from fastkd.models.inputs import NoLayers, find_stack, reads_last_token
from fastkd.models.outputs import LayerRequest, model_outputs
from tests.distill import support
from tests.distill.models import FAMILIES, batch, classifier, config_of, model, recipe
from tests.distill.support import ALL, data_of, model_of
from tests.distill.test_student import GEMMA_3N, PER_LAYER
from tests.support.compare import raises
from tests.support.draw import FIRST

# Models that test_by_hand.py doesn't run. SqueezeBERT doesn't call its blocks as modules,
# Longformer pads to whole windows, ProphetNet adds streams of predictions.
STATES = [
    ("whisper", "transcripts"), ("squeezebert", "sequence"), ("longformer", "none"),
    ("prophetnet", "none"), ("t5", "sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "head"), STATES)
def test_layers_are_transformers_hidden_states(family, head):
    whole, data = model_of(family, head).eval(), data_of(family, head)
    backbone = Backbone(whole)
    data = backbone.with_decoder_inputs(data, data.pop("labels"))
    with torch.no_grad():
        output = whole(**data, output_hidden_states=True)
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
    method = distill.IntraClassKNN(alpha2=0, alpha3=0)
    method.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    embeds = torch.randn(4, 6, 16, dtype=torch.float64)
    Distiller(*models, method).eval()(inputs_embeds=embeds, labels=torch.arange(4) % 2)
    tokens, _ = seen[0].pooled("cls", *seen[0].last())
    for one, token in zip(models[::-1], tokens, strict=True):
        torch.testing.assert_close(one.score(token), one(inputs_embeds=embeds).logits)


def test_no_hook_stays():
    """That replaced embeddings reach the first block: LRC-BERT among the random steps."""
    bert, inputs = classifier("bert"), batch()
    backbone = Backbone(bert)
    with pytest.raises(RuntimeError, match="stop"), capture(backbone, [1, 4]):
        raise RuntimeError("stop")
    with torch.no_grad(), replaced_embeddings(backbone, lambda emb: emb + 0) as same:
        backbone.run({name: x for name, x in inputs.items() if name != "labels"})
    assert len(same) == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bert.modules())


def test_backbones_of_few_models():
    """XLM and XLNet predict tokens at their own positions; without a mask the last is the last."""
    config = t.XLMConfig(vocab_size=60, emb_dim=16, n_layers=2, n_heads=2)
    for head in (t.XLMWithLMHeadModel(config), t.XLNetLMHeadModel(config_of("xlnet", 2))):
        base = Backbone(Backbone(head).base)
        assert Backbone(head).per_token and Backbone(head).has_head and not Backbone(head).causal
        assert not base.has_head and not base.per_token and base.problem is None
    bert, hidden = classifier("bert"), torch.randn(2, 5, 16)
    assert Backbone(torch.compile(bert, backend="eager")).base is bert.bert
    last = Backbone(classifier("gpt2")).sentence_token(hidden, None)
    assert torch.equal(last, hidden[:, -1])
    ids = torch.randint(5, 60, (1, 4))
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    assert Backbone(classifier("distilbert")).run(inputs).logits.shape == (1, 3)  # unknown: dropped
    assert Backbone(classifier("llama")).run({"input_ids": ids}).past_key_values is None


def test_custom_classes_keep_their_heads():
    """Models with remote code declare their properties."""
    HeadInputs = type("HeadInputs", (t.GPT2LMHeadModel,), {})
    Tags = type("Tags", (t.BertForTokenClassification,), {})
    for head, family, per_token, causal in (
        (HeadInputs, "gpt2", True, True), (Tags, "bert", True, False),
        (t.BertForQuestionAnswering, "bert", False, False),
        (t.BertForMultipleChoice, "bert", False, False),
    ):  # fmt: skip
        found = Backbone(model(head, family, num_labels=1, problem_type="regression"))
        assert (found.per_token, found.causal) == (per_token, causal)
        assert found.problem is None  # transformers' losses of these heads ignore it
    config = config_of("llama", 2)
    config.model_type = "mine"
    for heads, last in (([], False), (["CausalLM"], True), (["CausalLM", "MaskedLM"], False)):
        config.auto_map = {f"AutoModelFor{head}": "mine.Mine" for head in heads}
        assert reads_last_token(config) is last


SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
SOUND = {
    **SIZES, "conv_dim": (8,) * 7, "num_conv_pos_embeddings": 4, "vocab_size": 12,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "classifier_proj_size": 8,
}  # fmt: skip
TOWER = {**SIZES, "num_hidden_layers": 4}
SEEN = {**TOWER, "image_size": 16, "patch_size": 8}
SAID = {**TOWER, "vocab_size": 60, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
LABELS = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("sounds", ["Wav2Vec2", "WavLM", "Data2VecAudio"])
def test_convolutions_are_not_taken_for_blocks(sounds):
    """The model of 8 blocks has 7 convolutions, as many as its student has blocks."""
    config = getattr(t, f"{sounds}Config")(**SOUND, num_hidden_layers=8, layerdrop=0.0)
    teacher = getattr(t, f"{sounds}Model")(config).eval()
    student = student_from_teacher(teacher, 7)
    assert Backbone(student).blocks_name == Backbone(teacher).blocks_name == "encoder.layers"
    sound = torch.randn(2, 2000)
    with torch.no_grad():
        expected = student.eval()(sound, output_hidden_states=True).hidden_states
        request = LayerRequest(tuple(range(1, 8)))
        kept = model_outputs(Backbone(student), {"input_values": sound}, request)
    for layer, states in kept.hidden.items():
        torch.testing.assert_close(states, expected[layer])


class Twice(t.PreTrainedModel):
    config_class = t.BertConfig


def test_two_possible_lists_of_blocks_are_named():
    """Of equal depth, neither of them attention."""
    twice = Twice(config_of("bert"))
    twice.first, twice.second = (nn.ModuleList([nn.Linear(16, 16)] * 3) for _ in range(2))
    raises(r"of 3 modules .* \(first, second\); say which", find_stack, twice, error=NoLayers)
    raises("teacher: Twice has several lists", student_from_teacher, twice, [1])


@pytest.mark.filterwarnings("ignore:CCALoss", "ignore:LRCBERT")
def test_padding_of_sounds_is_not_compared():
    """A mask of samples, of which 320 make a frame, by any method."""
    config = t.Wav2Vec2Config(
        **SOUND, num_hidden_layers=2, num_labels=3, layerdrop=0.0, feat_extract_norm="layer",
        initializer_range=0.2,
    )  # fmt: skip
    teacher = t.Wav2Vec2ForSequenceClassification(config).double()
    student = student_from_teacher(teacher, 1)
    methods = [distill.method_by_name(name) for name in ("fcd", "mc3kd", "lrkd", "lrc_bert", "knn")]
    distiller = Distiller(teacher, student, distill.Several(*methods))
    lengths = torch.tensor([4000, 2500, 3300, 4000])
    losses = []
    for width in (4000, 5000):
        mask = torch.arange(width) < lengths[:, None]
        torch.manual_seed(0)
        sound = torch.nn.functional.pad(torch.randn(4, 4000).double(), (0, width - 4000)) * mask
        data = {"input_values": sound, "attention_mask": mask.long(), "labels": LABELS}
        distiller.prepare([data])
        losses.append(distiller.eval()(**data).terms)
    torch.testing.assert_close(losses[0], losses[1])


def test_the_last_layer_has_the_hidden_size():
    teacher = model_of("opt, narrow embeddings", "next word").eval()
    data = data_of("opt, narrow embeddings", "next word")
    with torch.no_grad():
        kept = model_outputs(Backbone(teacher), data, LayerRequest((3,)))
        narrow = teacher.model.decoder.project_out(kept.hidden[3])
    torch.testing.assert_close(teacher.lm_head(narrow), kept.logits)


STREAMS = dict(
    vocab_size=60, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
    moe_intermediate_size=16, pad_token_id=0, num_experts_per_tok=2,
)  # fmt: skip
# Models whose blocks have several residual streams: options, and the stream that is compared.
STREAMED = {
    "DeepseekV4": (
        dict(n_routed_experts=4, q_lora_rank=8, o_lora_rank=8, qk_rope_head_dim=4),
        lambda x: x.mean(2),
    ),
    "Qwen4Exp": (
        dict(
            num_key_value_heads=1, layer_types=["linear_attention"] * 4, num_experts=4,
            shared_expert_intermediate_size=16, linear_num_key_heads=1, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, hc_lowrank=8,
        ),
        lambda x: x.view(*x.shape[:2], 4, 16).mean(2),
    ),
    "Gemma3n": ({**PER_LAYER, **GEMMA_3N}, lambda x: x[0]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:CCALoss", "ignore:LRCBERT")
@pytest.mark.parametrize("family", STREAMED)
def test_one_stream_of_each_token_is_compared(family, tmp_path):
    if not hasattr(t, f"{family}ForCausalLM"):
        pytest.skip(f"this transformers has no {family}")
    options, one = STREAMED[family]
    config = getattr(t, f"{family}TextConfig", None) or getattr(t, f"{family}Config")
    torch.manual_seed(0)
    teacher = getattr(t, f"{family}ForCausalLM")(config(**{**STREAMS, **options})).eval()
    ids = torch.randint(5, 60, (3, 8))
    data = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}
    depth = teacher.config.num_hidden_layers
    with torch.no_grad():
        run = {"input_ids": ids, "output_hidden_states": True, "use_cache": False}
        *shown, _ = teacher(**run).hidden_states
        last = teacher.base_model(ids, use_cache=False).last_hidden_state
        request = LayerRequest(tuple(range(depth + 1)))
        kept = model_outputs(Backbone(teacher), {"input_ids": ids}, request)
    for layer, states in enumerate(shown):
        torch.testing.assert_close(kept.hidden[layer], one(states))
    torch.testing.assert_close(kept.hidden[depth], last)
    student = copy.deepcopy(teacher)
    assert Distiller(teacher, student, recipe("mc3kd"))(**data).loss.isfinite()
    distiller = Distiller(teacher, student, FCD()).eval()
    cache = distiller.cache_teacher([data], tmp_path / "cache")
    stored = Distiller(cache, student, FCD()).eval()(**data).terms
    torch.testing.assert_close(stored, distiller(**data).terms)


def test_what_sounds_do_not_support():
    """Perturbation without embeddings, layers that are dropped at random, and CTC."""
    data = {"input_values": torch.randn(4, 2000), "labels": LABELS}
    config = t.Wav2Vec2Config(**SOUND, num_hidden_layers=2, num_labels=3, layerdrop=0.0)
    teacher = t.Wav2Vec2ForSequenceClassification(config)
    distiller = Distiller(teacher, student_from_teacher(teacher, 1), recipe("lrc_bert"))
    raises(r"student \(Wav2Vec2For.*no embeddings.*perturb=False", distiller, **data)
    teacher = t.Wav2Vec2ForCTC(config)
    student, words = student_from_teacher(teacher, 1), r"student \(Wav2Vec2ForCTC\) has a CTC-like"
    raises(words + " head.* support", Distiller, teacher, student, SoftTargets())
    distiller = Distiller(teacher, student, FCD(task_weight=0))
    assert distiller(input_values=data["input_values"]).loss.isfinite()
    config.layerdrop = 0.1
    teacher = t.Wav2Vec2ForSequenceClassification(config)
    student = student_from_teacher(teacher, 2)
    words = r"skips layers .* \(layerdrop=0.1\).*layerdrop=0"
    raises(words, Distiller(teacher, student, FCD()), **data)
    assert Distiller(teacher, student, LRKD())(**data).loss.isfinite()  # the last state is there


@pytest.mark.parametrize("method", ["labels", "soft_targets"])
def test_a_model_without_layers_learns_from_outputs(method):
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    config = t.ResNetConfig(layer_type="basic", **sizes)
    teacher, student = (t.ResNetForImageClassification(config) for _ in range(2))
    data = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": LABELS}
    out = Distiller(teacher, student, recipe(method))(**data)
    out.loss.backward()
    assert out.loss.isfinite() and student.classifier[1].weight.grad.any()
    words = r"student: the configuration of ResNetFor.* compares none"
    raises(words, Distiller, teacher, student, FCD())


def test_a_model_of_two_towers_is_an_error_with_its_parts():
    config = t.CLIPConfig(text_config=SAID, vision_config=SEEN, projection_dim=8)
    teacher, student = t.CLIPModel(config), t.CLIPModel(config)
    words = r"student: CLIPModel has several parts .*vision_config"
    raises(words, Distiller, teacher, student, LRKD(alpha=None))
    raises(r"CLIPModel.* has no head", Distiller, teacher, student, SoftTargets())
    assert Backbone(teacher.text_model).num_layers == 4


def test_the_language_model_of_a_vision_model_is_compared():
    config = t.LlavaConfig(
        text_config={"model_type": "llama", **SAID, "initializer_range": 0.2},
        vision_config={"model_type": "clip_vision_model", **SEEN, "projection_dim": 8},
        image_token_index=59, image_seq_length=4,
    )  # fmt: skip
    teacher = t.LlavaForConditionalGeneration(config)
    student = student_from_teacher(teacher, 2)
    assert student.config.text_config.num_hidden_layers == 2
    assert student.config.vision_config.num_hidden_layers == 4
    ids = torch.randint(3, 50, (2, 10))
    ids[:, 1:5] = 59
    data = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    distiller = Distiller(teacher, student, FCD(soft_weight=0.0))
    out = distiller(**data, labels=ids.masked_fill(ids == 59, -100))
    out.loss.backward()
    assert set(out.terms) == {"task", "tokens", "samples", "total"} and out.loss.isfinite()
    # Position n is about word n + 1, as in any decoder.
    expected = student(**data, labels=ids.masked_fill(ids == 59, -100)).loss
    torch.testing.assert_close(out.terms["task"], expected.detach())


# docs/support.md

BEFORE, LINES = support.written()


# A step of every head and method takes a minute: `python -m tests.distill.support`.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_lists_the_familys_support(family):
    """Every head; some with a method that is drawn."""
    lines = [(heads, marks) for name, heads, *marks in LINES if name == family]
    listed = {
        head: dict(zip(ALL, marks, strict=False)) for heads, marks in lines
        for head in heads.split(", ")
    }  # fmt: skip
    assert {*support.heads(family)} == listed.keys()
    draw = random.Random(f"{FIRST} {family}")
    drawn = {x: draw.sample(ALL, int(draw.random() < 0.15)) for x in listed}
    for head, found in support.rows_of(family, drawn.get):
        for name, why in found.items():
            assert support.mark(why) == listed[head][name], (head, name, why)


def test_the_page_lists_no_other_family_and_every_method():
    assert BEFORE.splitlines()[-2] == f"| family | head | {' | '.join(ALL)} | |"
    assert {name for name, *_ in LINES} == set(FAMILIES)
