"""Training from a teacher's cache equals training from the teacher, bit for bit."""

import copy
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers as t
from safetensors.torch import load_file
from torch.nn import functional as F

from fastkd import distill
from fastkd.distill import Distiller, SoftTargets, TeacherCache, student_from_teacher
from fastkd.distill.cache import sample_keys
from fastkd.distill.verify import taken
from fastkd.models.batch import MixedDocuments
from tests.distill.draws import halved
from tests.distill.models import batch, classifier, config_of, model, pair, recipe
from tests.distill.own_method import HiddenAndAttention
from tests.distill.support import data_of, model_of
from tests.distill.test_blocks import HeadInputs
from tests.distill.test_distiller import documents, padded
from tests.support.compare import raises
from tests.support.draw import FIRST

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")


def live_and_cached(teacher, student, make, data, path):
    """The cache of the data, with whose outputs a step has the same bits as with the teacher's.

    Steps of every method, of drawn data: test_by_hand.py.
    """
    live = Distiller(teacher, copy.deepcopy(student), make())
    cache = live.cache_teacher(data, path)
    cached = Distiller(TeacherCache(path), copy.deepcopy(student), make())
    cached.method.load_state_dict(live.method.state_dict())
    assert not list(cached.teacher.parameters())
    assert {key.partition(".")[0] for key in cached.state_dict()} <= {"student", "method"}
    for inputs in data:
        found = []
        for distiller in (live, cached):
            torch.manual_seed(4)
            found.append(taken(distiller, inputs))
        torch.testing.assert_close(*found, atol=0, rtol=0)
    return cache


def lora(teacher):
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    return peft.get_peft_model(teacher, config).eval()


def halves(teacher):
    teacher.lm_head.register_forward_hook(lambda module, args, output: halved(output))
    return teacher


# What is stored of the predictions: the head once and its inputs, of a masked model's a transform
# of the last states; logits where the head isn't known or others follow.
HEAD = {"keys", "lengths", "states"}
STORED = [
    ("llama", "next word", "soft_targets", None, HEAD, {"weight"}),
    ("llama", "next word", "lrkd", None, {"hidden.3", *HEAD}, {"weight"}),
    ("llama", "next word", "fcd", None, {"hidden.1", "hidden.3", "keys", "lengths"}, None),
    ("llama", "next word", "soft_targets", lora, HEAD, {"weight", "down_0", "up_0"}),
    ("llama", "next word", "soft_targets", halves, {"keys", "lengths", "logits"}, None),
    ("bert", "masked words", "soft_targets", None, HEAD, {"weight", "bias"}),
    ("electra", "masked words", "soft_targets", None, HEAD, {"weight", "bias"}),
    ("gemma2", "next word", "soft_targets", None, HEAD, {"weight"}),
    ("bert", "choices", "soft_targets", None, {"keys", "lengths", "logits"}, None),
    ("bert", "answers", "soft_targets", None, {"end", "keys", "lengths", "start"}, None),
    ("bert", "sequence", "knn", None, {"hidden.3", "keys", "lengths", "logits"}, None),
]


@pytest.mark.parametrize(("family", "head", "name", "changed", "stored", "once"), STORED)
def test_stored_predictions(family, head, name, changed, stored, once, tmp_path):
    teacher, student = (model_of(family, head).eval() for _ in range(2))
    student = student_from_teacher(student, [1, 3])
    teacher = changed(teacher) if changed else teacher
    data = data_of(family, head)
    cache = live_and_cached(teacher, student, lambda: recipe(name), [data], tmp_path)
    found = load_file(next(tmp_path.glob("shard-*")))
    assert found.keys() == stored and len(found["keys"]) == len(cache) == 4
    assert name != "knn" or len(found["hidden.3"]) == 4  # a method that reads one token
    path = tmp_path / "head.safetensors"
    assert (load_file(path).keys() if path.exists() else None) == once


def test_keys_depend_on_every_input_of_the_teacher(tmp_path):
    """The same words in other places of a page are another sample."""
    config = config_of("layoutlm", 4, max_2d_position_embeddings=64)
    teacher = t.LayoutLMForSequenceClassification(config).eval()
    student = student_from_teacher(teacher, [2, 4])
    data = {**batch(num_labels=2), "bbox": torch.randint(0, 60, (6, 10, 4)).sort(-1).values}
    cache = live_and_cached(teacher, student, SoftTargets, [data], tmp_path)
    cached = Distiller(cache, student, SoftTargets())
    wider = {**data, "bbox": F.pad(data["bbox"], (0, 0, 0, 2))}
    for name in ("input_ids", "attention_mask"):
        wider[name] = F.pad(data[name], (0, 2))
    assert cached.sample_keys(wider) == cached.sample_keys(data)
    turned = {**data, "bbox": data["bbox"].flip(0)}
    raises("sample 0 of the batch is not in", cached, error=KeyError, **turned)
    raises("bbox: a teacher cache can't assign shape", cached, **{**data, "bbox": data["bbox"][:1]})


def test_an_interrupted_cache_is_completed(tmp_path):
    teacher, student = pair()
    distiller = Distiller(teacher, student, recipe("fcd"))
    data = [batch(), batch(), batch()]

    def until_it_stops():
        yield from data[:2]
        raise KeyboardInterrupt

    stopped = {"error": KeyboardInterrupt, "shard_bytes": 1}
    raises("", distiller.cache_teacher, until_it_stops(), tmp_path, **stopped)
    assert len(TeacherCache(tmp_path)) == 12
    calls = []
    teacher.register_forward_pre_hook(lambda module, args: calls.append(1))
    assert len(distiller.cache_teacher(data, tmp_path)) == 18
    # One call inspects the outputs, one computes the missing batch.
    assert len(calls) == 2


def test_a_cache_that_does_not_match_is_an_error(tmp_path):
    teacher, student = pair()
    raises("holds no teacher cache", TeacherCache, tmp_path, error=FileNotFoundError)
    live = Distiller(teacher, student, recipe("fcd"))
    (data,) = [batch()]
    live.cache_teacher([data], tmp_path)
    cache = TeacherCache(tmp_path)
    words = r"compares teacher layers \[1, 2\].* stores only \[2, 4\]"
    raises(words, Distiller, cache, student, recipe("fcd", layers=[1, 2]))
    raises(r"has soft targets, but .* stores no logits", Distiller, cache, student, SoftTargets())
    raises("attention maps", Distiller, cache, student, HiddenAndAttention())
    cached = Distiller(cache, student, recipe("fcd"))
    raises("sample 0 of the batch is not in", cached, error=KeyError, **batch())
    raises("a cache already", cached.cache_teacher, [data], tmp_path)

    other, words = classifier("bert"), "written with other settings .*"
    raises(f"{words}fingerprint: teacher", begun_by, other, student, [data], tmp_path)
    top = Distiller(teacher, student, recipe("fcd", layers="top"))
    raises(f"{words}kept: layers", top.cache_teacher, [data], tmp_path)
    raises("another teacher", TeacherCache, tmp_path, teacher=other)
    TeacherCache(tmp_path, teacher=teacher)
    one, two = (SimpleNamespace(get_vocab=lambda i=i: {"a": i, "b": 1 - i}) for i in range(2))
    live.cache_teacher([data], tmp_path / "words", tokenizer=one)
    raises("another tokenizer", TeacherCache, tmp_path / "words", tokenizer=two)

    pooled = tmp_path / "pooled"
    Distiller(teacher, student, distill.IntraClassKNN(alpha2=0.0)).cache_teacher([data], pooled)
    method = distill.IntraClassKNN(alpha2=0.0, pool="mean")
    raises("compares 'mean' .* stores 'cls'", Distiller, TeacherCache(pooled), student, method)
    about = json.loads((tmp_path / "teacher.json").read_text())
    (tmp_path / "teacher.json").write_text(json.dumps({**about, "format": 0}))
    raises("has cache format 0", TeacherCache, tmp_path)


@pytest.mark.parametrize("name", ["shard-*.safetensors", "head.safetensors", "teacher.json"])
def test_a_changed_file_is_an_error(tmp_path, name):
    torch.manual_seed(0)
    distiller = Distiller(*pair("llama", head=t.LlamaForCausalLM), SoftTargets())
    data = [padded(documents((5, 9)))]
    before = distiller.cache_teacher(data, tmp_path).digest
    (path,) = tmp_path.glob(name)
    content = bytearray(path.read_bytes())
    content[-20 if name != "teacher.json" else content.index(b"layers")] ^= 1
    path.write_bytes(content)
    for opened in (TeacherCache, lambda folder: distiller.cache_teacher(data, folder)):
        raises(f"{path.name} was changed; delete", opened, tmp_path)
    if name != "teacher.json":
        path.unlink()
        assert distiller.cache_teacher(data, tmp_path).digest == before


def begun_by(teacher, student, data, path):
    return Distiller(teacher, student, recipe("fcd")).cache_teacher(data, path)


def test_what_else_writes_into_the_folder(tmp_path, monkeypatch):
    """Of two writers that find an empty folder, the second has another teacher and is refused.

    So are another precision, and a shard of another cache. Folders without hard links will do.
    """
    (teacher, student), data = pair(), [batch(), batch()]
    link, words = os.link, "was written with other settings .*fingerprint: teacher"

    def second(source, target):
        monkeypatch.setattr(os, "link", link)
        begun_by(teacher, student, data[:1], Path(target).parent)
        link(source, target)

    monkeypatch.setattr(os, "link", second)
    raises(words, begun_by, classifier("bert"), student, data, tmp_path / "both")
    monkeypatch.setattr(os, "link", second)
    assert len(begun_by(teacher, student, data, tmp_path / "same")) == 12
    with torch.autocast("cpu", torch.bfloat16):
        for some in (data[:1], data):
            cache = begun_by(teacher, student, some, tmp_path / "half")
    assert len(cache) == 12
    words = "precision: bfloat16, now that of the weights"
    raises(words, begun_by, teacher, student, data, tmp_path / "half")

    def refused(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    begun_by(classifier("bert"), student, data[:1], tmp_path / "one")
    (shard,) = (tmp_path / "one").glob("shard-*")
    shard.rename(tmp_path / "both" / shard.name)
    raises(f"{shard.name} does not belong to the cache", TeacherCache, tmp_path / "both")


def configured(kind, **options):
    """A model of the same weights, whatever its configuration."""
    torch.manual_seed(0)
    if kind == "modules":
        made = HeadInputs(2)
        vars(made).update({"sizes": [1, 2], **options})
        return distill.Blocks(made, "blocks", hidden_size=16, output_size=50, per_token=True)
    if kind == "adapter default":
        lora = {"r": 2, "target_modules": ["query"], "init_lora_weights": False, **options}
        return peft.get_peft_model(classifier("bert"), peft.LoraConfig(**lora)).eval()
    attention = options.pop("attention", "sdpa")
    made = classifier(kind, **options)
    made.set_attn_implementation(attention)
    return made


CONFIGURED = [
    ("bert", {"num_attention_heads": 4}),
    ("bert", {"layer_norm_eps": 1e-2}),
    ("bert", {"attention": "eager"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("adapter default", {"lora_alpha": 2}),
    ("modules", {"sizes": [1, 3]}),
    ("modules", {"activation": F.relu}),
]


@pytest.mark.parametrize("kind, changed", CONFIGURED)
def test_the_configuration_is_part_of_the_fingerprint(kind, changed, tmp_path):
    data, student = [{"input_ids": batch()["input_ids"] % 50}], configured(kind)

    def begin(teacher):
        live = Distiller(teacher, student, distill.LRKD(alpha=None))
        return len(live.cache_teacher(data, tmp_path))

    assert [begin(configured(kind)), begin(configured(kind))] == [6, 6]
    other, (name,) = configured(kind, **changed), changed
    name = kind if kind == "modules" else f"{kind}.{name}" if "adapter" in kind else name
    raises(f"written with other settings .configuration: .*{name}", begin, other)
    raises(f"another configuration of the teacher: .*{name}", TeacherCache, tmp_path, teacher=other)
    raises("fingerprint: teacher", begin, configured(kind).bfloat16())


def test_names_paths_and_dropout_do_not_change_the_fingerprint(tmp_path):
    """Another order of classes is an error, without the teacher too."""
    (teacher, student), data = pair(), [batch()]
    teacher.save_pretrained(tmp_path / "teacher")
    loaded = type(teacher).from_pretrained(tmp_path / "teacher")
    cache = Distiller(teacher, student, SoftTargets()).cache_teacher(data, tmp_path / "cache")
    TeacherCache(tmp_path / "cache", teacher=loaded)
    again = Distiller(loaded.train(), student, SoftTargets())
    assert len(again.cache_teacher(data, tmp_path / "cache")) == 6
    student.config.id2label = {1: "LABEL_0", 0: "LABEL_1", 2: "LABEL_2"}
    for source in (teacher, cache):
        words = "student's classes are LABEL_1, LABEL_0, LABEL_2"
        raises(words, Distiller, source, student, SoftTargets())


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_every_input_of_an_encoder_decoder_changes_the_key(family, tmp_path):
    """A word that doesn't count has no label; a masked one isn't read by those behind it."""
    models = [model_of(family, "written words").eval() for _ in range(2)]
    live, data = Distiller(*models, SoftTargets()).eval(), data_of(family, "written words")
    data["labels"][:, 2] = -100
    masks = {"attention_mask": data["attention_mask"], "decoder_attention_mask": torch.ones(4, 6)}
    for name, mask in masks.items():
        held = mask.long().index_fill(1, torch.tensor(2), 0)
        path, other = tmp_path / name, {**data, name: held}
        cached = Distiller(live.cache_teacher([data], path), models[1], SoftTargets()).eval()
        raises("sample 0 of the batch is not in", cached, error=KeyError, **other)
        live.cache_teacher([other], path)
        cached.teacher.reload()
        for inputs in (data, other):
            torch.testing.assert_close(cached(**inputs).terms, live(**inputs).terms)


def layouts(draw, text, types):
    """One row of a text: padding, positions, masked tokens and token types are drawn."""
    n, pad = len(text), draw.randrange(4)
    before = pad if draw.random() < 0.4 else 0
    places = (torch.arange(n + pad) - before).clamp(min=0)
    ids, mask = torch.zeros(2, n + pad, dtype=torch.long)
    ids[before : before + n] = torch.tensor(text)
    mask[before : before + n] = 1
    row = {"input_ids": ids, "attention_mask": mask}
    if draw.random() < 0.3:
        mask[before + draw.randrange(1, n - 1)] = 0
    if draw.random() < 0.4:
        row["position_ids"] = draw.randrange(3) + places * draw.choice([1, 1, 2])
    if types and draw.random() < 0.4:
        row["token_type_ids"] = torch.full_like(ids, int(draw.random() < 0.3))
    if draw.random() < 0.2:
        del row["attention_mask"]
    return {name: x[None] for name, x in row.items()}


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama", "xlnet"])
def test_samples_with_one_key_have_one_entry(family):
    """Whatever is drawn: rows that a cache takes for one sample are one to the teacher.

    GPT-2 adds the embedding of token types 0, which it doesn't without them; LLaMA reads positions
    that jump as several documents, but only without a mask.
    """
    teacher = model(t.AutoModel, family).double()
    student = student_from_teacher(teacher, [2, 4])
    distiller = Distiller(teacher, student, distill.FCD(task_weight=0)).eval()
    answers, shared = {}, 0
    draw = random.Random(FIRST)
    for i in range(40):
        text = [7, 9, 11, 5, 6] if i % 2 else [7, 9, 11, 5, 6, 8]
        try:
            row = layouts(draw, text, types=family not in ("roberta", "llama"))
            part = distiller.read(row)
        except MixedDocuments:
            continue
        with torch.no_grad():
            states = distiller.teachers.outputs(part, 0.0, False).hidden[4]
        keys, real = sample_keys(part, distiller.teachers.model)
        with torch.device("meta"):  # where new tensors would be
            assert distiller.sample_keys(row) == keys
        for key, found in zip(keys, (x[m] for x, m in zip(states, real, strict=True)), strict=True):
            shared += key in answers
            torch.testing.assert_close(answers.setdefault(key, found), found)
    assert len(answers) > 5 and shared > 5
