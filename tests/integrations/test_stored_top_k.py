"""A teacher whose top k is in files or in finished chat completions."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fastkd import TopK
from fastkd.distill import Distiller, SoftTargets, student_from_teacher
from fastkd.integrations import openai
from fastkd.integrations._rows import SourceError
from fastkd.integrations.top_k_files import TopKFiles, export, write
from fastkd.train.config import Config
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError
from tests.integrations.test_served_teacher import assert_same_step, batch, make_teacher
from tests.support.compare import raises

K = 5


@pytest.fixture(scope="module")
def teacher():
    return make_teacher()


def rows(teacher):
    """Token ids of each row, and the teacher's top k at all of its positions."""
    found = []
    for ids, mask in zip(*(batch()[x] for x in ("input_ids", "attention_mask")), strict=True):
        tokens = ids[mask.bool()]
        with torch.no_grad():
            top = teacher(tokens[None]).logits[0].log_softmax(-1).topk(K)
        found.append((tokens.tolist(), TopK(top.indices, top.values)))
    return found


def as_flat(found, folder, names):
    write(found, folder)


def as_padded(found, folder, names):
    rows = [(torch.tensor(t), top.ids, top.log_probs, torch.ones(len(t))) for t, top in found]
    columns = [pad_sequence(x, batch_first=True) for x in zip(*rows, strict=True)]
    save_file(dict(zip((*names, "attention_mask"), columns, strict=True)), folder / "a.safetensors")


def as_parquet(found, folder, names):
    lists = [
        [tokens for tokens, _ in found],
        [top.ids[:-1].tolist() for _, top in found],  # the last position predicts nothing
        [top.log_probs[:-1].tolist() for _, top in found],
    ]
    pq.write_table(pa.table(dict(zip(names, lists, strict=True))), folder / "a.parquet")


NAMES = ("tokens", "ids", "values")


@pytest.mark.parametrize(
    ("form", "names"), [(as_flat, ()), (as_padded, NAMES), (as_parquet, NAMES)]
)
def test_a_step_is_that_of_a_cache_of_the_top_k(teacher, tmp_path, form, names):
    form(rows(teacher), tmp_path, names)
    files = TopKFiles(tmp_path, **({"columns": names} if names else {}))
    assert len(files) == 3 and files.top_k == K
    writer = Distiller(teacher, student_from_teacher(teacher, [1]), SoftTargets(temperature=1.0))
    cache = writer.cache_teacher([batch()], tmp_path / "cache", top_k=K)
    assert_same_step(files, teacher, batch(), oracle=cache)
    packed = {name: x.flip(0) for name, x in batch().items()}
    assert_same_step(files, teacher, packed, oracle=cache)


def test_a_cache_is_exported_and_read_back(teacher, tmp_path):
    student = student_from_teacher(teacher, [1])
    method = SoftTargets(temperature=1.0)
    writer = Distiller(teacher, student, method)
    cache = writer.cache_teacher([batch(), batch(1)], tmp_path / "cache", top_k=K)
    export(Distiller(cache, student, method), [batch(), batch(1), batch()], tmp_path / "files")
    files = TopKFiles(tmp_path / "files")
    assert len(files) == 6
    for seed in (0, 1):
        assert_same_step(files, teacher, batch(seed), oracle=cache)
    whole = Distiller(teacher, student, method).cache_teacher([batch()], tmp_path / "whole")
    for source in (teacher, whole):
        raises("it stores no top k", export, Distiller(source, student, method), [], tmp_path)


def test_a_position_without_a_teacher_has_a_soft_target_of_zero(teacher, tmp_path):
    found = rows(teacher)
    top = found[0][1]
    known = torch.arange(len(top.ids))[:, None] % 2 == 0
    half = TopK(top.ids, top.log_probs.masked_fill(~known, -torch.inf))
    write([(found[0][0], half)], tmp_path)
    data = {name: x[:1] for name, x in batch().items()}
    student = student_from_teacher(teacher, [1]).eval()
    soft = Distiller(TopKFiles(tmp_path), student, SoftTargets(temperature=1.0, alpha=1.0))
    logits = student(data["input_ids"]).logits[0, :-1].log_softmax(-1)
    expected = 0.0
    for n in range(0, 8, 2):
        p, q = top.log_probs[n].exp(), logits[n].exp()[top.ids[n]]
        rest, other = 1 - p.sum(), 1 - q.sum()
        expected += (p * (p / q).log()).sum() + rest * (rest / other).log()
    torch.testing.assert_close(soft.eval()(**data).terms["soft"], (expected / 8).detach())


def test_wrong_files_are_one_sentence(teacher, tmp_path):
    found = rows(teacher)
    raises(r"has no \*.safetensors", TopKFiles, tmp_path, error=FileNotFoundError)
    write(found, tmp_path)
    raises("has no 'x', but input_ids, lengths", TopKFiles, tmp_path, columns=("x", "y", "z"))
    student = student_from_teacher(teacher, [1])
    distiller = Distiller(TopKFiles(tmp_path), student, SoftTargets(temperature=1.0))
    raises(r"row 0 of the batch is not in .*\(3 rows\)", distiller, **batch(3), error=SourceError)
    words = f"top_k: the source has top_k={K}, not {K + 1}"
    raises(words, distiller.cache_teacher, [], tmp_path / "cache", top_k=K + 1)
    write([(found[0][0], TopK(found[0][1].ids[:, :2], found[0][1].log_probs[:, :2]))], tmp_path)
    raises("tokens a position, other files", TopKFiles, tmp_path)
    logits = tmp_path / "logits"
    logits.mkdir()
    as_parquet([(t, TopK(x.ids, torch.zeros(len(t), K))) for t, x in found], logits, NAMES)
    distiller = Distiller(TopKFiles(logits, columns=NAMES), student, SoftTargets(temperature=1.0))
    raises("values aren't log-probabilities", distiller, **batch(), error=SourceError)


def byte_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = tokenizer.pre_tokenizer.alphabet()
    bpe = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=letters)
    tokenizer.train_from_iterator(["the cat is in the house"] * 4, bpe)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def entry(text, p, **others):
    def one(text, p):
        return {"token": text, "bytes": [*text.encode()], "logprob": math.log(p)}

    return {**one(text, p), "top_logprobs": [one(*x) for x in ((text, p), *others.items())]}


def test_chat_completions_are_read_where_tokens_are_the_students():
    tokenizer = byte_tokenizer()
    ids = tokenizer("the cat is in<end>")["input_ids"]
    names = tokenizer.convert_ids_to_tokens(ids)
    assert names[:2] == ["the", "Ġcat"]
    content = [
        entry("the", 0.5, house=0.25, zebra=0.125),
        *(entry(" c", 0.5), entry("at", 0.5)),  # another cut of the text
        *(entry(" is", 0.75, **{" in": 0.125}), entry(" in", 1.0)),
    ]
    found = openai.top_k(content, ids, tokenizer, 2)
    known = tokenizer.convert_tokens_to_ids(["the", "Ġis", "Ġin"])
    assert (found.read, found.probable, found.unknown) == (3, 6, 2)  # "house" has a space there
    expected = torch.full((len(ids), 2), 0.0)
    expected[0, 0] = 0.5
    at = names.index("Ġis")
    expected[at] = torch.tensor([0.75, 0.125])
    expected[at + 1, 0] = 1.0
    torch.testing.assert_close(found.top_k.log_probs.exp(), expected)
    assert found.top_k.ids[0, 0] == known[0] and found.top_k.ids[at].tolist() == known[1:]
    raises("not a part of the answer's text", openai.top_k, [entry("zz", 1.0)], ids, tokenizer, 2)
    raises("at most 0, got 0.6", openai.top_k, [entry("the", 2.0)], ids, tokenizer, 2)
    raises('must have "token"', openai.top_k, [{}], ids, tokenizer, 2, error=TypeError)


TEMPLATE = "{% for m in messages %}{{ m.role + '|' + m.content }}<end>{% endfor %}"


def test_command_learns_from_finished_chat_completions(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.chat_template = "<end>", TEMPLATE
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    model.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    asked = [{"role": "user", "content": "in the house"}]
    content = [entry("the", 0.5, zebra=0.25), entry(" cat", 0.5), entry(" is", 0.75)]
    answer = {"role": "assistant", "content": "the cat is"}
    choice = {"message": answer, "logprobs": {"content": content}}
    finished = {"messages": asked, "choices": [choice]}
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(finished)] * 4))
    plain = {"messages": [*asked, answer]}
    (tmp_path / "plain.jsonl").write_text(json.dumps(plain))
    given = {
        "task": "chat", "train": tmp_path / "train.jsonl", "evals": tmp_path / "plain.jsonl",
        "student": str(tmp_path / "student"), "method": "soft_targets", "teacher": "completions",
        "options": {"temperature": 1.0}, "num_train_epochs": 1, "batch_size": 4, "max_length": 64,
        "device_name": "cpu", "max_new_tokens": 4,
    }  # fmt: skip
    report = run_distillation(Config.of(out=tmp_path / "out", **given))
    said = "4 of 4 answers have log-probabilities, at 12 of their 16 tokens; 4 of 16 probable"
    assert said in report["stored_teacher"]
    assert said in (tmp_path / "out/student/README.md").read_text()
    for change, words in (
        ({"train": tmp_path / "plain.jsonl"}, "no answer of --train has logprobs"),
        ({"pack": True}, "--pack exclude each other"),
        ({"student": None}, "a teacher without weights can't be cut; pass --student"),
        ({"method": "auto", "options": {}}, "stored log-probabilities have temperature 1"),
    ):
        with pytest.raises(InputError, match=words):
            run_distillation(Config.of(out=tmp_path / "wrong", **{**given, **change}))
