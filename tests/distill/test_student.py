"""Students made of a teacher's layers, for every family, the choice of layers, and other widths."""

import copy
import inspect
import random

import pytest
import torch
import transformers as t
from torch import nn

from fastkd.distill import layer_map, select_layers, student_from_teacher
from fastkd.models.backbone import Backbone
from fastkd.models.student import check_layers, kinds_of, resolve_layers, spread_layers
from tests.distill.models import SMALL, batch, classifier, config_of, model, pair, with_noise
from tests.distill.support import data_of, model_of
from tests.support.compare import raises
from tests.support.draw import FIRST


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
    model.config.num_hidden_layers = model.config.decoder_layers = len(layers)
    model.config.use_cache = False
    return model


@pytest.mark.parametrize(("family", "head", "layers"), [
    *((x, "sequence", [1, 3]) for x in (
        "roberta", "distilbert", "electra", "albert", "deberta_v2", "xlnet", "gpt2", "llama",
    )),
    # A number of layers is a uniform map; ModernBERT's first block is of another kind.
    ("bert", "sequence", 2), ("bert", "sequence", 1), ("modernbert", "sequence", 1),
    # Of these the decoder is cut.
    ("t5", "written words", 2), ("bart", "written words", [1, 3]), ("whisper", "transcripts", 2),
])  # fmt: skip
def test_student_equals_the_teacher_without_the_dropped_blocks(family, head, layers, tmp_path):
    """In float64, of weights that float32 would round."""
    teacher, data = with_noise(model_of(family, head).double().eval(), 0.01), data_of(family, head)
    data = {n: x.double() if x.is_floating_point() else x for n, x in data.items()}
    before = copy.deepcopy(teacher.state_dict())
    student = student_from_teacher(teacher, layers).eval()
    kept = [1, 3] if layers in (2, [1, 3]) else [1] if family == "modernbert" else [3]
    assert (Backbone(student).num_layers, Backbone(teacher).num_layers) == (len(kept), 3)
    with torch.no_grad():
        expected = cut_by_hand(teacher, family, kept)(**data).logits
        assert torch.equal(student(**data).logits, expected)
        assert not torch.equal(teacher(**data).logits, expected)
        again = saved(student, tmp_path).double()  # transformers reads parts of XLNet in float32
        torch.testing.assert_close(again(**data).logits, expected, rtol=1e-4, atol=1e-5)
        for parameter in student.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_dtype_mode_ties_and_training_state():
    teacher = classifier("bert").requires_grad_(False).to(torch.bfloat16).train()
    student = student_from_teacher(teacher, [1])
    assert student.dtype == torch.bfloat16 and student.training
    assert all(p.requires_grad for p in student.parameters())
    teacher, student = pair("bert", [3], t.BertForMaskedLM)
    words = student.get_input_embeddings().weight
    assert torch.equal(words, teacher.get_input_embeddings().weight)
    narrow = student_from_teacher(teacher, config={"hidden_size": 8})
    for made in (student, narrow):
        assert made.get_output_embeddings().weight is made.get_input_embeddings().weight


def test_blocks_that_differ_are_an_error():
    config = t.JambaConfig(
        **SMALL, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
        mamba_d_state=4, mamba_dt_rank=4,
    )  # fmt: skip
    jamba = t.JambaForCausalLM(config)
    scaled = classifier("gpt2", scale_attn_by_inverse_layer_idx=True)
    uneven = t.BertModel(config_of("bert", 2))
    uneven.encoder.layer[1].intermediate.dense = nn.Linear(16, 33)
    uneven.encoder.layer[1].output.dense = nn.Linear(33, 16)
    for teacher, layers, words in (
        (jamba, [2, 4], r"layers \[2, 4\]: .*keep layers 1 to 2$"),
        # Only its first block has no norm.
        (t.ModernBertModel(config_of("modernbert")), [2, 3], "keep layer 1"),
        (scaled, [2, 4], "attention by the layer's number"),
        (uneven, [2], "blocks differ"),
    ):
        raises(words, student_from_teacher, teacher, layers)
    for teacher in (jamba, scaled):
        assert student_from_teacher(teacher, [1, 2]).config.num_hidden_layers == 2


def _per_layer_inputs(model, ids):
    states = model.embed_tokens(ids)
    given = (ids, states)[: len(inspect.signature(model.get_per_layer_inputs).parameters)]
    return model.project_per_layer_inputs(states, model.get_per_layer_inputs(*given))


PER_LAYER = dict(
    **SMALL, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, intermediate_size=32, hidden_size_per_layer_input=4, vocab_size_per_layer_input=60,
    num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 3,
)  # fmt: skip
GEMMA_3N = dict(laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 6)


@pytest.mark.parametrize(("family", "options"), [
    ("Gemma3n", GEMMA_3N), ("Gemma4", dict(global_head_dim=16, use_double_wide_mlp=True)),
])  # fmt: skip
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
    assert student.generation_config is not teacher.generation_config
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
    assert spread_layers(lfm2, 7) == [2, 3, 5, 9, 10, 13, 16] and spread_layers(lfm2, 2) == [8, 15]
    assert [nemotron[i - 1] for i in spread_layers(nemotron, 4)] == [*"M-*M"]
    assert spread_layers("sf" * 6, 6) == [1, 4, 5, 8, 9, 12]
    for count in range(1, 13):
        assert spread_layers("x" * 12, count) == layer_map("uniform", 12, count)
    # Table 3
    assert layer_map("uniform", 12, 5) == [2, 4, 7, 9, 12]
    assert layer_map("top", 12, 6) == [7, 8, 9, 10, 11, 12]
    assert layer_map("bottom", 12, 6) == [1, 2, 3, 4, 5, 6]


CUT = (
    "albert", "bert", "roberta", "electra", "distilbert", "gpt2", "llama", "mistral", "qwen2",
    "qwen3", "t5",
)  # fmt: skip
INNER = {"gpt2": "n_inner", "distilbert": "hidden_dim", "t5": "d_ff"}


def logits(model):
    torch.manual_seed(1)
    inputs = batch(padding=0)
    inputs.pop("labels")
    if model.config.is_encoder_decoder:
        inputs["input_ids"][:, -1] = model.config.eos_token_id
    with torch.no_grad():
        return model.eval()(**inputs).logits


def widened(small, family):
    """A model of twice the widths with the outputs of ``small``.

    What writes is there twice; what reads, reads the second half.
    """
    config = copy.deepcopy(small.config)
    names = ["hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads"]
    for name in (*names, INNER.get(family, "")):
        if getattr(config, name, None) is not None:
            setattr(config, name, 2 * getattr(small.config, name))
    wide = type(small)(config).double().eval()
    weights = {}
    for name, tensor in wide.state_dict().items():
        part = small.state_dict()[name]
        reader = small.get_submodule(name.rpartition(".")[0])
        inputs = {nn.Linear: 1, t.pytorch_utils.Conv1D: 0}.get(type(reader))
        for dim, size in enumerate(tensor.shape):
            if part.shape[dim] == size:
                continue
            assert size == 2 * part.shape[dim]
            if part.dim() == 2 and dim == inputs:
                part = torch.cat((torch.zeros_like(part), part), dim)
            elif "c_attn" in name:
                part = torch.cat([x for each in part.chunk(3, dim) for x in (each, each)], dim)
            else:
                part = torch.cat((part, part), dim)
        weights[name] = part
    wide.load_state_dict(weights)
    return wide


@pytest.mark.parametrize("family", random.Random(FIRST).sample(CUT, 6))
def test_unused_widths_are_cut_first(family):
    """Exactly the dimensions, heads and neurons that no weight reads are cut."""
    small = with_noise(model_of(family, "sequence").double().eval(), 0.01)
    teacher = widened(small, family)
    torch.testing.assert_close(logits(teacher), logits(small), rtol=1e-5, atol=1e-5)
    inner = getattr(small.config, INNER.get(family, "intermediate_size"))
    sizes = {} if inner is None else {"intermediate_size": inner}
    for name in ("hidden_size", "num_attention_heads"):
        sizes[name] = getattr(small.config, name)
    student = student_from_teacher(teacher, config=sizes)
    assert student.config.to_dict() == small.config.to_dict()
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, small.state_dict()[name]), name
    same = student_from_teacher(small, config={"hidden_size": small.config.hidden_size})
    assert torch.equal(logits(same), logits(small))
    storage = {p.untyped_storage().data_ptr() for p in small.parameters()}
    assert not storage & {p.untyped_storage().data_ptr() for p in same.parameters()}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_smaller_heads_keep_the_teachers_scores(family):
    """Positions turn each pair of dimensions as fast as before, and scores keep their scale."""
    teacher = model_of(family, "sequence").eval()
    odd, first = [0, 1, 4, 7] if family == "t5" else [1, 3, 5, 7], [0, 1, 2, 3]  # of a head's 8
    heads = teacher.config.num_attention_heads
    with torch.no_grad():
        for name, tensor in teacher.named_parameters():
            if name.endswith((".q_proj.weight", ".q.weight")):
                tensor.view(heads, 8, -1)[:, odd] = 0
            if name.endswith((".o_proj.weight", ".o.weight")):
                tensor.view(-1, heads, 8)[..., first] = 0
    student = student_from_teacher(teacher, config={"head_dim": 4})
    assert student.num_parameters() < teacher.num_parameters()
    torch.testing.assert_close(logits(student), logits(teacher))


def test_queries_are_scaled_for_smaller_heads():
    bert, gpt2 = classifier("bert"), classifier("gpt2")
    for name, weight in (*bert.named_parameters(), *gpt2.named_parameters()):
        if name.endswith(("query.weight", "query.bias", "key.weight", "c_attn.weight")):
            nn.init.ones_(weight)
    new = student_from_teacher(bert, config={"hidden_size": 8}).bert.encoder.layer[0].attention.self
    weight = student_from_teacher(gpt2, config={"n_embd": 8}).transformer.h[0].attn.c_attn.weight
    both = (new.query.weight + new.query.bias) / 2, new.key.weight
    for queries, others in (both, weight.split([8, 16], 1)):
        torch.testing.assert_close(queries, torch.full((8, 8), 0.5**0.5))
        assert (others == 1).all()
    qwen = model_of("qwen3", "none")
    new = student_from_teacher(qwen, config={"head_dim": 6}).layers[0].self_attn
    assert new.q_norm.weight.tolist() == pytest.approx([0.75**0.5] * 6)
    assert new.k_norm.weight.tolist() == [1.0] * 6  # and pairs are the nearest to 0, 4/3 and 8/3
    assert torch.equal(new.q_proj.weight[:3], qwen.layers[0].self_attn.q_proj.weight[[0, 1, 3]])


def grouped():
    """A LLaMA whose four query heads share two key and value heads."""
    return model(t.LlamaModel, "llama", num_attention_heads=4, num_key_value_heads=2, head_dim=4)


def test_key_and_value_heads_stay_with_their_query_heads():
    teacher = grouped()
    attention = teacher.layers[0].self_attn
    with torch.no_grad():
        attention.o_proj.weight.view(16, 4, 4)[:, [0, 3]] *= 0.01
        attention.o_proj.weight.view(16, 4, 4)[:, 2] *= 10
    of_head = attention.q_proj.weight.view(4, 4, 16)
    for kv_heads, kept, shared in ((0, [2, 3], [1]), (2, [1, 2], [0, 1]), (1, [2, 3], [1])):
        sizes = {"num_attention_heads": 2} | ({"num_key_value_heads": kv_heads} if kv_heads else {})
        student = student_from_teacher(teacher, config=sizes)
        assert student.config.num_key_value_heads == len(shared)
        new = student.layers[0].self_attn
        assert torch.equal(new.q_proj.weight.view(2, 4, 16), of_head[kept])
        for name in ("k_proj", "v_proj"):
            old = getattr(attention, name).weight.view(2, 4, 16)
            assert torch.equal(getattr(new, name).weight.view(-1, 4, 16), old[shared])


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_hidden_dimensions_with_large_gains_are_kept(family):
    """Large weights into a dimension do not make it important: the next norm undoes them."""
    teacher = model_of(family, "sequence")
    words = teacher.get_input_embeddings().weight
    with torch.no_grad():
        words[:, 1::2] *= 10
        for name, tensor in teacher.named_parameters():
            if "norm" in name.lower() or ".ln_" in name:
                tensor[1::2] *= 0.1
    student = student_from_teacher(teacher, config={"hidden_size": 8})
    assert torch.equal(student.get_input_embeddings().weight, words[:, ::2])


def test_layers_and_widths_are_cut_together():
    teacher, sizes = classifier("bert"), {"intermediate_size": 8}
    narrow = student_from_teacher(teacher, config=sizes).bert.encoder.layer
    student = student_from_teacher(teacher, config={**sizes, "num_hidden_layers": 2})
    layer = student.bert.encoder.layer[0]
    assert (len(narrow), student.config.num_hidden_layers) == (4, 2)
    assert torch.equal(layer.output.dense.weight, narrow[1].output.dense.weight)


@pytest.mark.parametrize("family", ["bert", "deberta_v2", "gpt2", "qwen3", "bart", "albert"])
def test_random_students_have_any_size(family):
    teacher, students = model_of(family, "sequence").double(), []
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    if family == "deberta_v2":
        sizes["pooler_hidden_size"] = 32
    for _ in range(2):
        torch.manual_seed(0)
        students.append(student_from_teacher(teacher, 5, config=sizes, weights="random"))
    assert students[0].config.hidden_size == 32 and students[0].dtype == torch.float64
    depth = "decoder_layers" if family == "bart" else "num_hidden_layers"
    assert getattr(students[0].config, depth) == 5
    assert logits(students[0]).isfinite().all() and torch.equal(*map(logits, students))


# Wrong sizes, of a family's classifier or of a model.
WRONG = [
    ("bert", {"hiden_size": 8}, "no size 'hiden_size'; use num_hidden_layers, hid"),
    ("bert", {"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
    ("bert", {"hidden_size": 15}, "hidden_size: 15 is no multiple of num_attention_heads 2"),
    ("bert", {"hidden_size": 32}, "hidden_size: 32 is more than the teacher's 16"),
    ("bert", {"num_attention_heads": 1}, "head_dim: 16 is more than the teacher's 8"),
    ("bert", {"num_hidden_layers": 0}, "num_hidden_layers must be .*at least 1, got 0"),
    ("llama", {"num_key_value_heads": 2, "num_attention_heads": 1}, "no multiple of num_key"),
    ("llama", {"head_dim": 3}, "head_dim: 3 dimensions can't be rotated"),
    ("deberta_v2", {"hidden_size": 8}, "DebertaV2Config: only .*random"),
    ("electra", {"hidden_size": 8}, "can't be cut to"),
    (grouped, {"num_attention_heads": 3}, "num_attention_heads: 3 is no multiple of the 2 tha"),
    (grouped, {"num_key_value_heads": 1}, "query heads per key and value head: 4 is more"),
    (lambda: model(t.BertModel, "bert", is_decoder=True, add_cross_attention=True),
     {"hidden_size": 8}, r"encoder.* has several attentions"),
]  # fmt: skip


def test_wrong_layers_and_sizes_are_errors():
    teacher, two = classifier("bert"), classifier("bert", layers=2)
    for words, call, *given in (
        ("did you mean 'uniform'", layer_map, "uniforn", 12, 6),
        ("student_layers must be at least 1", layer_map, "top", 4, 0),
        ("increasing numbers from 1 to 4", check_layers, [0, 2], 4),
        ("increasing", check_layers, [2, 2], 4),
        ("increasing", check_layers, [], 4),
        ("2 teacher layers for 3 student layers", resolve_layers, [1, 2], 4, 3),
        ("at least two real tokens", select_layers, two, [], 1),
        ("transformers model", select_layers, nn.Linear(2, 2), [batch()], 1),
        (r"'uniform'; .*layer_map\(.uniform., 4, co", student_from_teacher, teacher, "uniform"),
        (r"increasing numbers from 1 to 4.*got True", student_from_teacher, teacher, True),
    ):  # fmt: skip
        raises(words, call, *given, error=(ValueError, TypeError))
    for family, sizes, words in WRONG:
        teacher = classifier(family) if isinstance(family, str) else family()
        raises(words, student_from_teacher, teacher, config=sizes)
    words, both = "layers, num_hidden_layers: both set", {"num_hidden_layers": 2}
    raises(words, student_from_teacher, two, 2, config=both)
    words, kind = "weights must be one of 'cut', 'random', got 'cur'", {"weights": "cur"}
    raises(words, student_from_teacher, two, config={"hidden_size": 8}, **kind)
