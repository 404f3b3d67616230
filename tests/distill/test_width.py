"""Students of other widths than their teacher's."""

import copy

import pytest
import torch
import transformers as t
from torch import nn

from fastkd.distill import student_from_teacher
from tests.distill.models import batch, classifier, model
from tests.distill.support import FAMILIES, model_of
from tests.support.compare import raises

CUT = (
    "albert", "bert", "roberta", "electra", "distilbert", "gpt2", "llama", "mistral", "qwen2",
    "qwen3", "t5",
)  # fmt: skip
HIDDEN = {"gpt2": "n_embd", "distilbert": "dim", "t5": "d_model"}
HEADS = {"gpt2": "n_head", "distilbert": "n_heads", "t5": "num_heads"}
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
    for name in (*names, *(table.get(family) for table in (HIDDEN, HEADS, INNER))):
        if getattr(config, name or "", None) is not None:
            setattr(config, name, 2 * getattr(small.config, name))
    wide = type(small)(config).eval()
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


@pytest.mark.parametrize("family", CUT)
def test_unused_widths_are_cut_first(family):
    """Exactly the dimensions, heads and neurons that no weight reads are cut."""
    small = model_of(family, "sequence").eval()
    teacher = widened(small, family)
    expected = logits(teacher)
    torch.testing.assert_close(expected, logits(small))
    sizes = {"hidden_size": small.config.hidden_size}
    sizes["num_attention_heads"] = small.config.num_attention_heads
    inner = INNER.get(family, "intermediate_size")
    if getattr(small.config, inner) is not None:
        sizes["intermediate_size"] = getattr(small.config, inner)
    student = student_from_teacher(teacher, config=sizes)
    assert student.config.to_dict() == small.config.to_dict()
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, small.state_dict()[name]), name
    same = student_from_teacher(small, config={"hidden_size": small.config.hidden_size})
    assert torch.equal(logits(same), logits(small))
    storage = {p.untyped_storage().data_ptr() for p in small.parameters()}
    assert not storage & {p.untyped_storage().data_ptr() for p in same.parameters()}


@pytest.mark.parametrize("family, head", [
    ("bert", "masked words"), ("roberta", "tokens"), ("gpt2", "next word"),
    ("t5", "written words"), ("llama", "next word"), ("electra", "answers"),
])  # fmt: skip
def test_students_with_fewer_heads_learn(family, head):
    teacher = model_of(family, head)
    student = student_from_teacher(teacher, 2, config={"hidden_size": 12, "num_attention_heads": 2})
    assert student.config.hidden_size == 12
    ids = torch.arange(10)[None] + 5
    labels = {"start_positions": ids[:, 0] - 5, "end_positions": ids[:, 0] - 4}
    labels = labels if head == "answers" else {"labels": ids % 3}
    student(input_ids=ids, **labels).loss.backward()
    unused = [n for n, p in student.named_parameters() if p.grad is None]
    assert not unused
    if student.config.tie_word_embeddings and head not in ("tokens", "answers"):
        assert student.get_output_embeddings().weight is student.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_smaller_heads_keep_the_teachers_scores(family):
    """Positions turn each pair of dimensions as fast as before, and scores keep their scale."""
    teacher = model_of(family, "sequence").eval()
    odd, first = torch.arange(1, 8, 2), torch.arange(4)  # of a head's 8
    if family == "t5":
        odd = torch.tensor([0, 1, 4, 7])
    heads = teacher.config.num_attention_heads
    with torch.no_grad():
        for name, tensor in teacher.named_parameters():
            if name.endswith((".q_proj.weight", ".q.weight")):
                tensor.view(heads, 8, -1)[:, odd] = 0
            if name.endswith((".o_proj.weight", ".o.weight")):
                tensor.view(-1, heads, 8)[..., first] = 0
    student = student_from_teacher(teacher, config={"head_dim": 4})
    assert sum(p.numel() for p in student.parameters()) < sum(
        p.numel() for p in teacher.parameters()
    )
    torch.testing.assert_close(logits(student), logits(teacher))


def test_queries_are_scaled_for_smaller_heads():
    bert = classifier("bert")
    student = student_from_teacher(bert, config={"hidden_size": 8})
    old, new = bert.bert.encoder.layer[0].attention, student.bert.encoder.layer[0].attention

    def sizes(weight):
        return {round(abs(x), 4) for x in weight.flatten().tolist()}

    assert sizes(new.self.query.weight) <= sizes(old.self.query.weight * 0.5**0.5)
    assert sizes(new.self.key.weight) <= sizes(old.self.key.weight)

    gpt2 = classifier("gpt2")
    nn.init.ones_(gpt2.transformer.h[0].attn.c_attn.weight)
    weight = student_from_teacher(gpt2, config={"n_embd": 8}).transformer.h[0].attn.c_attn.weight
    torch.testing.assert_close(weight[:, :8], torch.full((8, 8), 0.5**0.5))
    assert torch.equal(weight[:, 8:], torch.ones(8, 16))

    qwen = model_of("qwen3", "none")
    attention = student_from_teacher(qwen, config={"head_dim": 4}).layers[0].self_attn
    assert attention.q_norm.weight.tolist() == pytest.approx([0.5**0.5] * 4)
    assert attention.k_norm.weight.tolist() == [1.0] * 4
    assert torch.equal(attention.q_proj.weight[:2], qwen.layers[0].self_attn.q_proj.weight[:4:2])


def grouped():
    """A LLaMA whose four query heads share two key and value heads."""
    return model(t.LlamaModel, "llama", num_attention_heads=4, num_key_value_heads=2, head_dim=4)


def crossed():
    cross = {"is_decoder": True, "add_cross_attention": True}
    return t.BertModel(t.BertConfig(**FAMILIES["bert"].to_diff_dict() | cross))


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
    teacher = classifier("bert")
    student = student_from_teacher(teacher, [1, 4], config={"intermediate_size": 8})
    narrow = student_from_teacher(teacher, config={"intermediate_size": 8})
    assert torch.equal(
        student.bert.encoder.layer[1].output.dense.weight,
        narrow.bert.encoder.layer[3].output.dense.weight,
    )
    by_name = student_from_teacher(teacher, config={"intermediate_size": 8, "num_hidden_layers": 2})
    assert by_name.config.num_hidden_layers == 2
    assert len(student_from_teacher(teacher).bert.encoder.layer) == 4


@pytest.mark.parametrize("family", ["bert", "deberta_v2", "gpt2", "qwen3", "bart", "albert"])
def test_random_students_have_any_size(family):
    teacher = model_of(family, "sequence").double()
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    if family == "deberta_v2":
        sizes["pooler_hidden_size"] = 32
    torch.manual_seed(0)
    student = student_from_teacher(teacher, 5, config=sizes, weights="random")
    assert student.config.hidden_size == 32 and student.dtype == torch.float64
    depth = "decoder_layers" if family == "bart" else "num_hidden_layers"
    assert getattr(student.config, depth) == 5
    assert logits(student).isfinite().all()
    torch.manual_seed(0)
    again = student_from_teacher(teacher, 5, config=sizes, weights="random")
    assert torch.equal(logits(student), logits(again))


@pytest.mark.parametrize("family, sizes, words", [
    ("bert", {"hiden_size": 8}, "no size 'hiden_size'; use num_hidden_layers, hid"),
    ("bert", {"head_dim": 8}, "BertConfig has no size 'head_dim'"),
    ("bert", {"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
    ("bert", {"hidden_size": 8.5}, "hidden_size must be a whole number .* got 8.5"),
    ("bert", {"hidden_size": 15}, "hidden_size: 15 is no multiple of num_attention_heads 2"),
    ("bert", {"hidden_size": 32}, "hidden_size: 32 is more than the teacher's 16"),
    ("bert", {"num_attention_heads": 1}, "head_dim: 16 is more than the teacher's 8"),
    ("bert", {"num_hidden_layers": 9}, "student has 9 layers"),
    ("bert", {"num_hidden_layers": 0}, "num_hidden_layers must be .*at least 1, got 0"),
    ("llama", {"num_key_value_heads": 2, "num_attention_heads": 1}, "no multiple of num_key"),
    ("llama", {"head_dim": 3}, "head_dim: 3 dimensions can't be rotated"),
    ("deberta_v2", {"hidden_size": 8}, "DebertaV2Config: only .*random"),
    ("electra", {"hidden_size": 8}, "can't be cut to"),
    (grouped, {"num_attention_heads": 3}, "num_attention_heads: 3 is no multiple of the 2 tha"),
    (grouped, {"num_key_value_heads": 1}, "query heads per key and value head: 4 is more"),
    (crossed, {"hidden_size": 8}, r"encoder.* has several attentions"),
])  # fmt: skip
def test_impossible_sizes_are_errors(family, sizes, words):
    teacher = classifier(family) if isinstance(family, str) else family()
    raises(words, student_from_teacher, teacher, config=sizes)


def test_options_that_exclude_each_other_are_errors():
    teacher, layers = classifier("bert"), {"num_hidden_layers": 2}
    words = "layers, num_hidden_layers: both set"
    raises(words, student_from_teacher, teacher, 2, config=layers)
    words = "weights must be one of 'cut', 'random', got 'cur'"
    raises(words, student_from_teacher, teacher, config={"hidden_size": 8}, weights="cur")
