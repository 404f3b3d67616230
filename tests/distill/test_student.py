"""Students made of a teacher's layers, for every family, and the choice of layers."""

import copy
import inspect

import pytest
import torch
import transformers as t
from torch import nn

from fastkd.distill import layer_map, select_layers, student_from_teacher
from fastkd.models.backbone import Backbone
from fastkd.models.student import check_layers, kinds_of, resolve_layers, spread_layers
from tests.distill.models import BERT, FAMILIES, SMALL, batch, batch_for, classifier, pair
from tests.distill.support import FAMILIES as SUPPORTED
from tests.distill.support import data_of, model_of
from tests.support.compare import raises


def logits(model, family):
    torch.manual_seed(1)
    inputs = batch_for(family)
    inputs.pop("labels")
    with torch.no_grad():
        return model.eval()(**inputs).logits


def saved(student, path):
    """The model that a user reads again."""
    student.save_pretrained(path)
    return type(student).from_pretrained(path).eval()


def cut_by_hand(teacher, family, layers):
    """The teacher with the other blocks taken out of its list."""
    model = copy.deepcopy(teacher)
    backbone = Backbone(model)
    if family != "albert":
        kept = [backbone.blocks[i - 1] for i in layers]
        parent = model.get_submodule(backbone.blocks_name.rpartition(".")[0])
        setattr(parent, backbone.blocks_name.rpartition(".")[2], nn.ModuleList(kept))
    model.config.num_hidden_layers, model.config.use_cache = len(layers), False
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_student_equals_the_teacher_without_the_dropped_blocks(family, tmp_path):
    teacher = classifier(family)
    before = copy.deepcopy(teacher.state_dict())
    student = student_from_teacher(teacher, [2, 4])
    assert student.config.num_hidden_layers == 2 and teacher.config.num_hidden_layers == 4
    expected = logits(cut_by_hand(teacher, family, [2, 4]), family)
    torch.testing.assert_close(logits(student, family), expected)
    assert not torch.equal(logits(teacher, family), expected)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())

    torch.testing.assert_close(logits(saved(student, tmp_path), family), logits(student, family))


WRITES = {"t5": "written words", "bart": "written words", "whisper": "transcripts"}


@pytest.mark.parametrize("family", WRITES)
def test_only_the_decoder_of_an_encoder_decoder_is_cut(family, tmp_path):
    teacher, data = model_of(family, WRITES[family]).eval(), data_of(family, WRITES[family])
    student = student_from_teacher(teacher, (1, 3)).eval()
    ours, theirs = Backbone(student), Backbone(teacher)
    assert (ours.num_layers, theirs.num_layers) == (2, 3)
    assert "decoder" in ours.blocks_name and ours.blocks_name == theirs.blocks_name
    encoders = [x.get_encoder() for x in (student, teacher)]
    for new, old in ((ours.blocks[1], theirs.blocks[2]), encoders):
        assert all(map(torch.equal, new.state_dict().values(), old.state_dict().values()))
    torch.testing.assert_close(saved(student, tmp_path)(**data).loss, student(**data).loss)


@pytest.mark.parametrize("layers, groups", [([1, 2, 3, 4], 2), ([1, 4], 2), ([2, 3, 4], 3)])
def test_albert_layers_keep_their_group(layers, groups):
    teacher = classifier("albert", num_hidden_groups=2)
    nn.init.normal_(teacher.albert.encoder.albert_layer_groups[1].albert_layers[0].ffn.weight)
    student = student_from_teacher(teacher, layers)
    assert student.config.num_hidden_groups == groups
    per_group = len(layers) / groups
    for i, layer in enumerate(layers):
        new = student.albert.encoder.albert_layer_groups[int(i / per_group)]
        old = teacher.albert.encoder.albert_layer_groups[(layer - 1) // 2]
        assert torch.equal(new.albert_layers[0].ffn.weight, old.albert_layers[0].ffn.weight)


def test_dtype_mode_ties_and_training_state():
    teacher = classifier("bert").requires_grad_(False).to(torch.bfloat16).train()
    student = student_from_teacher(teacher, [1])
    assert student.dtype == torch.bfloat16 and student.training
    assert all(p.requires_grad for p in student.parameters())
    teacher, student = pair("bert", [3], t.BertForMaskedLM)
    head, embeddings = student.get_output_embeddings(), student.get_input_embeddings()
    assert head.weight is embeddings.weight
    assert torch.equal(head.weight, teacher.get_input_embeddings().weight)


def test_a_number_of_layers_is_a_uniform_map():
    teacher = classifier("bert")
    kept = student_from_teacher(teacher, 2).bert.encoder.layer
    for block, number in zip(kept, [2, 4], strict=True):
        expected = teacher.bert.encoder.layer[number - 1].state_dict()
        assert all(torch.equal(block.state_dict()[name], x) for name, x in expected.items())
    for layers, words, error in (
        (0, "at least 1, got 0", ValueError),
        (5, "student has 5 layers", ValueError),
        ("uniform", r"got 'uniform'; .*layer_map\(.uniform., 4, count\)", TypeError),
        (True, r"increasing numbers from 1 to 4.*got True", ValueError),
        ([2, 5], "increasing numbers from 1 to 4", ValueError),
    ):
        raises(words, student_from_teacher, teacher, layers, error=error)


@pytest.mark.parametrize("family, head", [("modernbert", "sequence"), ("t5", "written words")])
@pytest.mark.parametrize("count, kept", [(1, [1]), (2, [1, 3])])
def test_a_number_of_layers_keeps_a_first_block_of_another_kind(family, head, count, kept):
    teacher = model_of(family, head)
    student, wanted = (student_from_teacher(teacher, layers) for layers in (count, kept))
    assert all(map(torch.equal, student.state_dict().values(), wanted.state_dict().values()))


def test_blocks_that_differ_are_an_error():
    config = t.JambaConfig(
        **SMALL, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
        mamba_d_state=4, mamba_dt_rank=4,
    )  # fmt: skip
    jamba = t.JambaForCausalLM(config)
    scaled = classifier("gpt2", scale_attn_by_inverse_layer_idx=True)
    uneven = t.BertModel(t.BertConfig(**BERT, num_hidden_layers=2))
    uneven.encoder.layer[1].intermediate.dense = nn.Linear(16, 33)
    uneven.encoder.layer[1].output.dense = nn.Linear(33, 16)
    for teacher, layers, words in (
        (jamba, [2, 4], r"layers \[2, 4\]: .*keep layers 1 to 2$"),
        # Only its first block has no norm.
        (t.ModernBertModel(SUPPORTED["modernbert"]), [2, 3], "keep layer 1"),
        (scaled, [2, 4], "attention by the layer's number"),
        (uneven, [2], "blocks differ"),
    ):
        raises(words, student_from_teacher, teacher, layers)
    for teacher in (jamba, scaled):
        assert student_from_teacher(teacher, [1, 2]).config.num_hidden_layers == 2
    words = "teacher must be a transformers model, got Linear"
    raises(words, student_from_teacher, nn.Linear(2, 2), [1], error=TypeError)


@pytest.mark.parametrize("config", [None, {"hidden_size": 8}])
def test_weights_of_a_float64_teacher_stay_float64(config):
    teacher = classifier("bert").double()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 1e-12 * torch.rand_like(parameter)
    student = student_from_teacher(teacher, [1, 4], config=config)
    kept = teacher.state_dict()["classifier.bias"]
    assert student.dtype == torch.float64
    assert torch.equal(student.state_dict()["classifier.bias"], kept)
    rounded = [p for p in student.parameters() if torch.equal(p, p.float().double())]
    # Ones and zeros of fresh norms and biases are cut without a rounding too.
    assert not [p for p in rounded if p.dim() > 1]


def _per_layer_inputs(model, ids):
    states = model.embed_tokens(ids)
    given = (ids, states)[: len(inspect.signature(model.get_per_layer_inputs).parameters)]
    return model.project_per_layer_inputs(states, model.get_per_layer_inputs(*given))


PER_LAYER = dict(
    vocab_size=60, hidden_size=16, num_hidden_layers=6, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, intermediate_size=32, hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=60,
    num_kv_shared_layers=2, pad_token_id=0, layer_types=["sliding_attention", "full_attention"] * 3,
)  # fmt: skip
GEMMA_3N = dict(laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 6)


@pytest.mark.parametrize(
    ("family", "options"),
    [("Gemma3n", GEMMA_3N), ("Gemma4", dict(global_head_dim=16, use_double_wide_mlp=True))],
)
@pytest.mark.parametrize("layers", [[1, 2, 5, 6], [2, 3, 5, 6]])
def test_embeddings_for_each_layer_are_cut_with_the_layers(family, options, layers, tmp_path):
    """Block i of the student reads the per-layer inputs of its own teacher layer."""
    if not hasattr(t, f"{family}ForCausalLM"):
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(0)
    config = getattr(t, f"{family}TextConfig")(**PER_LAYER, **options)
    teacher = getattr(t, f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(1, 60, (2, 7))
    student = student_from_teacher(teacher, layers).eval()
    assert student.config.num_kv_shared_layers == 2
    assert teacher.config.layer_types == PER_LAYER["layer_types"]
    with torch.no_grad():
        ours, theirs = (_per_layer_inputs(x.model, ids) for x in (student, teacher))
        whole = student_from_teacher(teacher, [1, 2, 3, 4, 5, 6]).eval()
        torch.testing.assert_close(whole(ids).logits, teacher(ids).logits)
    torch.testing.assert_close(ours, theirs[:, :, [i - 1 for i in layers]])
    read = saved(student, tmp_path)
    torch.testing.assert_close(read(ids).logits, student(ids).logits)
    raises("has no such full_attention layer; add one", student_from_teacher, teacher, [1, 3, 6])


HYBRID = dict(
    **SMALL, hidden_size=32, intermediate_size=32, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
MAMBA = dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=8)
BAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)  # fmt: skip
LETTERS = {"c": "conv", "a": "full_attention", "l": "linear_attention", "m": "mlp"}
# A number of layers by which an even choice keeps no attention, and the kinds kept now.
HYBRIDS = {
    "Lfm2": ("ccaccaca", 4, "ccac", {}),
    "NemotronH": ("lmlmalmm", 4, "mlam", MAMBA),
    "Bamba": ("llallall", 2, "la", {**BAMBA, "attn_layer_indices": [2, 5]}),
    "Qwen3Next": ("lllallla", 2, "la", LINEAR),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_number_of_layers_keeps_every_kind_of_a_hybrid(family, tmp_path):
    if not hasattr(t, f"{family}Config"):
        pytest.skip(f"this transformers has no {family}")
    kinds, count, kept, options = HYBRIDS[family]
    types = {} if family == "Bamba" else {"layer_types": [LETTERS[x] for x in kinds]}
    torch.manual_seed(0)
    config = getattr(t, f"{family}Config")(**HYBRID, **options, **types)
    teacher = getattr(t, f"{family}ForCausalLM")(config).eval()
    student = student_from_teacher(teacher, count).eval()
    assert kinds_of(Backbone(student)) == [LETTERS[x] for x in kept]
    ids, plan = torch.randint(5, 60, (1, 6)), dict(max_new_tokens=4, do_sample=False)
    with_cache, without = (student.generate(ids, use_cache=x, **plan) for x in (True, False))
    assert torch.equal(with_cache, without)
    again = saved(student, tmp_path)
    torch.testing.assert_close(again(ids).logits, student(ids).logits)
    attending = [i for i, kind in enumerate(kinds, 1) if kind == "a"]
    words = f"have no attention.* include one of \\{attending}"
    raises(words, student_from_teacher, teacher, [1, 2])
    raises(f"has {len(set(kinds))} kinds of layers .* name", student_from_teacher, teacher, 1)


def test_spread_layers_keep_about_the_share_of_each_kind():
    lfm2, nemotron = "ccaccaccacacacac", "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    assert spread_layers(lfm2, 4) == [4, 8, 11, 16] and spread_layers(lfm2, 2) == [8, 15]
    assert [nemotron[i - 1] for i in spread_layers(nemotron, 4)] == [*"M-*M"]
    assert spread_layers("sf" * 6, 6) == [1, 4, 5, 8, 9, 12]
    for count in range(1, 13):
        assert spread_layers("x" * 12, count) == layer_map("uniform", 12, count)


def test_layer_map_is_table_3():
    assert layer_map("uniform", 12, 6) == [2, 4, 6, 8, 10, 12]
    assert layer_map("top", 12, 6) == [7, 8, 9, 10, 11, 12]
    assert layer_map("bottom", 12, 6) == [1, 2, 3, 4, 5, 6]
    for teacher, student in ((12, 4), (12, 5), (7, 7), (24, 6), (3, 1)):
        layers = layer_map("uniform", teacher, student)
        assert len(set(layers)) == student and layers == sorted(layers)
        assert layers[-1] == teacher and layers[0] >= 1


def test_wrong_maps_are_errors():
    raises("did you mean 'uniform'", layer_map, "uniforn", 12, 6)
    raises("student has 6 layers but the teacher only 4", layer_map, "top", 4, 6)
    raises("student_layers must be at least 1", layer_map, "top", 4, 0)
    raises("increasing numbers from 1 to 4", check_layers, [0, 2], 4)
    for layers in ([2, 2], []):
        raises("increasing", check_layers, layers, 4)
    raises("2 teacher layers for 3 student layers", resolve_layers, [1, 2], 4, 3)
    teacher = classifier("bert", layers=2)
    raises("student has 3 layers", select_layers, teacher, [batch()], 3)
    raises("at least two real tokens", select_layers, teacher, [], 1)
    raises("transformers model", select_layers, nn.Linear(2, 2), [batch()], 1, error=TypeError)
