"""Blocks of models that are no plain stack, and the errors for models without blocks."""

import copy

import pytest
import torch
import transformers as t
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperDecoder, WhisperEncoder

from fastkd.distill import FCD, LRKD, Distiller, SoftTargets, method_by_name, student_from_teacher
from fastkd.models.backbone import Backbone
from fastkd.models.inputs import NoLayers, find_stack
from fastkd.models.outputs import LayerRequest, model_outputs
from tests.distill.models import BERT, recipe
from tests.distill.support import FAMILIES as SUPPORTED
from tests.distill.support import data_of, model_of
from tests.distill.test_student import GEMMA_3N, PER_LAYER
from tests.support.compare import raises

SOUND = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8,) * 7,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12,
    "apply_spec_augment": False, "classifier_proj_size": 8,
}  # fmt: skip
TOWER = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 4,
}  # fmt: skip
SEEN = {**TOWER, "image_size": 16, "patch_size": 8}
SAID = {**TOWER, "vocab_size": 60, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
LABELS = torch.tensor([0, 1, 2, 0])


def resnet():
    config = t.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return t.ResNetForImageClassification(config)


@pytest.mark.parametrize("sounds", ["Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "Data2VecAudio"])
def test_convolutions_are_not_taken_for_blocks(sounds):
    """The model of 8 blocks has 7 convolutions, as many as its student has blocks."""
    config = getattr(t, f"{sounds}Config")(**SOUND, num_hidden_layers=8, layerdrop=0.0)
    teacher = getattr(t, f"{sounds}Model")(config).eval()
    student = student_from_teacher(teacher, 7)
    assert Backbone(student).blocks_name == Backbone(teacher).blocks_name == "encoder.layers"
    sound = torch.randn(2, 2000)
    layers = range(1, 8)
    with torch.no_grad():
        expected = student.eval()(sound, output_hidden_states=True).hidden_states
        inputs = {"input_values": sound}
        kept = model_outputs(Backbone(student), inputs, LayerRequest(tuple(layers)))
    for layer in layers:
        torch.testing.assert_close(kept.hidden[layer], expected[layer])


class Twice(t.PreTrainedModel):
    """Two stacks of equal depth, neither of them attention."""

    config_class = t.BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.first, self.second = (
            nn.ModuleList(nn.Linear(16, 16) for _ in range(config.num_hidden_layers))
            for _ in range(2)
        )


def test_two_possible_lists_of_blocks_are_named():
    model = Twice(t.BertConfig(**BERT, num_hidden_layers=3))
    raises(r"of 3 modules .* \(first, second\); say which", find_stack, model, error=NoLayers)
    raises("teacher: Twice has several lists", student_from_teacher, model, [1])


@pytest.mark.parametrize("name", ["fcd", "mc3kd", "lrkd", "lrc_bert", "knn"])
def test_padding_of_sounds_is_not_compared(name):
    """A mask of samples, of which 320 make a frame."""
    config = t.Wav2Vec2Config(
        **SOUND, num_hidden_layers=2, num_labels=3, layerdrop=0.0, feat_extract_norm="layer",
        initializer_range=0.2,
    )  # fmt: skip
    teacher = t.Wav2Vec2ForSequenceClassification(config).double()
    student = student_from_teacher(teacher, 1)
    method = method_by_name(name, **({"perturb": False} if name == "lrc_bert" else {}))
    distiller = Distiller(teacher, student, method)
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
    "HYV4": (dict(num_key_value_heads=1, num_experts=4, intermediate_size=16), lambda x: x.mean(2)),
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
    teacher, student = resnet(), resnet()
    data = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": LABELS}
    out = Distiller(teacher, student, recipe(method))(**data)
    out.loss.backward()
    assert out.loss.isfinite() and student.classifier[1].weight.grad.any()
    words = r"student: the configuration of ResNetFor.* compares none"
    raises(words, Distiller, teacher, student, FCD())


def test_a_model_of_two_towers_is_an_error_with_its_parts():
    text = {**TOWER, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    config = t.CLIPConfig(text_config=text, vision_config=SEEN, projection_dim=8)
    teacher, student = t.CLIPModel(config), t.CLIPModel(config)
    with pytest.raises(ValueError, match=r"student: CLIPModel has several parts .*vision_config"):
        Distiller(teacher, student, LRKD(alpha=None))
    raises(r"CLIPModel.* has no head", Distiller, teacher, student, SoftTargets())
    assert Backbone(teacher.text_model).num_layers == 4


def test_the_language_model_of_a_vision_model_is_compared():
    config = t.LlavaConfig(
        text_config={"model_type": "llama", **SAID, "initializer_range": 0.2},
        vision_config={"model_type": "clip_vision_model", **SEEN, "projection_dim": 8},
        image_token_index=59,
        image_seq_length=4,
    )
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
    expected = student.train()(**data, labels=ids.masked_fill(ids == 59, -100)).loss
    torch.testing.assert_close(out.terms["task"], expected.detach())


def test_half_of_an_encoder_decoder_is_a_separate_model():
    config, data = copy.deepcopy(SUPPORTED["whisper"]), {"input_features": torch.randn(4, 8, 40)}
    config.update({"encoder_layers": 4, "num_labels": 3})
    encoder, decoder = WhisperEncoder(config), WhisperDecoder(config)
    assert (Backbone(encoder).num_layers, Backbone(decoder).num_layers) == (4, 3)
    student = student_from_teacher(encoder, [2, 4])
    assert Distiller(encoder, student, FCD(task_weight=0))(**data).loss.isfinite()
    teacher = t.WhisperForAudioClassification(config)
    student = student_from_teacher(teacher, 2)
    out = Distiller(teacher, student, SoftTargets())(**data, labels=LABELS)
    assert out.logits.shape == (4, 3) and out.loss.isfinite()


def test_an_audio_decoder_predicts_the_next_token():
    text = {**SAID, "model_type": "qwen2"}
    sound = {
        "model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_ffn_dim": 32,
        "encoder_layers": 1, "encoder_attention_heads": 2, "max_source_positions": 8,
    }  # fmt: skip
    config = t.Qwen2AudioConfig(audio_config=sound, text_config=text, audio_token_index=59)
    torch.manual_seed(0)
    teacher, student = (t.Qwen2AudioForConditionalGeneration(config) for _ in range(2))
    ids = torch.randint(0, 50, (2, 7))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    out = Distiller(teacher, student, SoftTargets()).eval()(**data)
    torch.testing.assert_close(out.terms["task"], student(**data).loss.detach())
