"""Conversations: which tokens are answers, what is written, scores, and every command."""

import csv
import json
import math
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2LMHeadModel

from fastkd.distill import Distiller, SoftTargets, student_from_teacher
from fastkd.train.data import load, read_file
from fastkd.train.errors import InputError
from fastkd.train.feed import OnPolicy
from fastkd.train.rows import Encoder
from fastkd.train.saving import read_json
from fastkd.train.settings import Source
from fastkd.train.tasks.chat import TASK, prompts_of, write
from tests.cli.launched import Launch, commands
from tests.cli.test_cli import crash, stop_at
from tests.support.tiny import run, sentences, words_of
from tests.train.tasks.test_causal_lm import make_decoder
from tests.train.tasks.through import through

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[CLS] {{ m.content }} "
    "{% elif m.role == 'assistant' %}[MASK] {{ m.content }} [SEP] "
    "{% else %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[MASK] {% endif %}"
)
MARKS = TEMPLATE.replace(
    "{{ m.content }} [SEP] ", "{% generation %}{{ m.content }} [SEP]{% endgeneration %} "
)


def make_chat_teacher(path, template=TEMPLATE):
    """A random GPT-2 whose tokenizer has a chat template."""
    make_decoder(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def says(*contents):
    """A conversation that the user begins."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def talks(rows, seed=0):
    """Questions whose answer is their first word."""
    return [says(text, text.split()[0]) for text, _ in sentences(rows, seed)]


def write_jsonl(path, conversations):
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    return path


def read(path):
    return read_file(path, TASK.columns, "--train", task=TASK)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_chat_teacher(tmp_path_factory.mktemp("models") / "gpt2")


def test_every_command_takes_it(teacher, tmp_path):
    train, evals = (write_jsonl(tmp_path / f"{i}.jsonl", talks(12, i)) for i in range(2))
    report = through(tmp_path, teacher, train, evals, task="chat")
    assert report["task"] == "chat" and set(report["student"]) == {"perplexity", "rouge_l"}
    told, asked = report["told"], talks(12, 1)
    assert [row["messages"] for row in told] == asked
    scorer = RougeScorer(["rougeL"])
    found = [
        scorer.score(talk[-1]["content"], row["answer"])["rougeL"].fmeasure
        for talk, row in zip(asked, told, strict=True)
    ]
    assert report["student"]["rouge_l"] == pytest.approx(sum(found) / 12, abs=1e-12)
    history = [entry["scores"]["perplexity"] for entry in report["history"]]
    assert report["best"]["scores"]["perplexity"] == min(history)


@pytest.mark.parametrize("template", [TEMPLATE, MARKS])
def test_only_answers_are_learned(teacher, tmp_path, template):
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.chat_template = template
    rows = read(write_jsonl(tmp_path / "a.jsonl", [says("a film", "good", "so", "bad film", "is")]))
    (row,) = Encoder(tokenizer, 16, TASK())(rows)
    words = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert " ".join(words) == "[CLS] a film [MASK] good [SEP] [CLS] so [MASK] bad film [SEP]"
    counted = [i for i, label in enumerate(row["labels"]) if label != -100]
    assert counted == [4, 5, 9, 10, 11]
    assert all(row["labels"][i] == row["input_ids"][i] for i in counted)


def test_too_long_a_conversation_keeps_its_middle(teacher, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    talk = says("a the film is", "good fine nice bad poor")
    rows = read(write_jsonl(tmp_path / "a.jsonl", [talk]))
    for length, kept in (
        (12, "[CLS] a the film is [MASK] good fine nice bad poor [SEP]"),
        (11, "[CLS] a the film is [MASK] good fine nice bad poor"),
        (6, "film is [MASK] good fine nice"),
    ):
        (row,) = Encoder(tokenizer, length, TASK())(rows)
        assert " ".join(tokenizer.convert_ids_to_tokens(row["input_ids"])) == kept
        assert [label != -100 for label in row["labels"]].index(True) == kept.split().index("good")


def test_scores_are_those_of_the_answers(teacher, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = GPT2LMHeadModel.from_pretrained(teacher).eval()
    task = TASK()
    encoded = Encoder(tokenizer, 16, task)(read(write_jsonl(tmp_path / "a.jsonl", talks(5))))
    total = count = 0
    with torch.no_grad():
        for row in encoded:
            ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
            here = int((labels != -100).sum())
            total += model(ids, labels=labels).loss.double().item() * here
            count += here
        answers, alone = [], []
        for batch in encoded.batches(task.collator(tokenizer), 3):
            answers += task.answer(model, batch, tokenizer)
        for batch in encoded.batches(task.collator(tokenizer), 1):
            (prompt,) = prompts_of(batch)
            alone.append(write(model, [prompt], tokenizer)[0][1])
    found = task.scores(("loss", "perplexity"), answers, encoded)
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == math.exp(found["loss"])
    assert math.isnan(task.scores(("perplexity",), [(math.nan, 3, "")], encoded)["perplexity"])
    # Beside longer prompts the same is written as alone.
    texts = tokenizer.batch_decode(alone, skip_special_tokens=True)
    assert [text for *_, text in answers] == texts


def test_prompts_are_answered(teacher, tmp_path):
    """With an answer or without one, and not where nothing is asked."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    path = write_jsonl(tmp_path / "a.jsonl", [says("a film"), says("a film", "good")])
    rows = read_file(path, TASK.columns.__class__("messages", None, None), "--data", True, TASK)
    encoded = Encoder(tokenizer, 16, TASK().predicting())(rows)
    assert encoded[0] == encoded[1] and set(encoded[0]["labels"]) == {-100}
    words = tokenizer.convert_ids_to_tokens(encoded[0]["input_ids"])
    assert words == ["[CLS]", "a", "film", "[MASK]"]


def test_parquet_gives_the_same_rows(tmp_path):
    talk = says("a film", "good")
    talk[0]["name"] = "Ada"
    jsonl = write_jsonl(tmp_path / "a.jsonl", [talk])
    pyarrow.parquet.write_table(pyarrow.table({"messages": [talk]}), tmp_path / "a.parquet")
    one, other = (list(read(path).columns("messages")) for path in (jsonl, tmp_path / "a.parquet"))
    assert [*map(json.loads, one[0][0])] == [*map(json.loads, other[0][0])] == talk


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chat": []}, "no column 'messages'"),
        ({"messages": "hello"}, "row 2: column 'messages' is not a list of messages but 'hello'"),
        ({"messages": []}, "row 2: column 'messages' is empty"),
        ({"messages": ["a"]}, "row 2: message 1 is not an object but 'a'"),
        ({"messages": [{"role": "user"}]}, "row 2: message 1 has no text 'content' but None"),
        ({"messages": says("a")}, "row 2: no message is the assistant's"),
        ({"messages": says("a", " ")}, "row 2: message 2, the answer, is empty"),
        ({"messages": says("", "a")[1:]}, "row 2: the first message is the assistant's"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, row, words):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in ({"messages": says("a", "b")}, row)))
    with pytest.raises(InputError, match=words) as caught:
        load(Source(task="chat", train=path, evals=path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "--task chat needs a tokenizer with a chat template"),
        ("{{ messages | length }} {{ messages[-1].content }}", "row 1: message 2 can't be told"),
        (
            "{{ raise_exception('only systems') }}",
            "row 1: the .* template refuses it .only systems",
        ),
        (
            "{% if x %}{% generation %}{% endgeneration %}{% endif %}{{ messages[0].content }}",
            "row 1: the .* template marks no token",
        ),
    ],
)
def test_a_template_that_does_not_tell(teacher, tmp_path, template, words):
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.chat_template = template
    rows = read(write_jsonl(tmp_path / "a.jsonl", [says("a film", "good")]))
    with pytest.raises(InputError, match=words):
        Encoder(tokenizer, 16, TASK())(rows)


def test_what_a_student_draws_is_masked_exactly(teacher, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = GPT2LMHeadModel.from_pretrained(teacher).train()
    task = TASK()
    encoded = Encoder(tokenizer, 16, task)(read(write_jsonl(tmp_path / "a.jsonl", talks(6))))
    (batch,) = encoded.batches(task.collator(tokenizer), 6)
    rows = task.drawn(model, batch, tokenizer)
    assert model.training
    end, lengths = tokenizer.sep_token_id, set()
    for row, prompt in zip(rows, prompts_of(batch), strict=True):
        ids, labels = row["input_ids"], row["labels"]
        written = ids[len(prompt) :]
        assert ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + written
        assert end not in written[:-1] and (written[-1] == end or len(written) == 16)
        lengths.add(len(written))
    assert len(lengths) > 1


@pytest.fixture(scope="module")
def on_policy(teacher, tmp_path_factory):
    """Options of a student that writes in half of the steps."""
    folder = tmp_path_factory.mktemp("on-policy")
    files = [write_jsonl(folder / f"{i}.jsonl", talks(12, i)) for i in range(2)]
    return {
        "task": "chat", "train": files[0], "eval": files[1], "teacher": teacher, "max_length": 16,
        "method": "soft_targets", "epochs": 2, "batch_size": 4, "device": "cpu", "on_policy": 0.5,
        "learning_rate": 1e-2,
    }  # fmt: skip


def test_a_student_that_writes_resumes_to_the_same_bits(on_policy, tmp_path, monkeypatch):
    steps = []
    draw = TASK.drawn

    def noted(self, model, batch, tokenizer):
        rows = draw(self, model, batch, tokenizer)
        steps.append([row["input_ids"] for row in rows])
        return rows

    monkeypatch.setattr(TASK, "drawn", noted)
    options = {**on_policy, "checkpoint_every": 2, "lora": "r=2"}
    run("distill", **options, out=tmp_path / "whole")
    whole = list(steps)
    assert len(whole) == 3  # of six steps
    with monkeypatch.context() as patch:
        stop_at(patch, 5, crash)
        run("distill", **options, out=tmp_path / "out", expect=130)
    run("distill", "--resume", **options, out=tmp_path / "out")
    assert steps[-1:] == whole[-1:]
    one, other = (
        load_file(tmp_path / name / "student/model.safetensors") for name in ("whole", "out")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_on_policy_the_teacher_alone_is_learned_from(on_policy, tmp_path):
    run("distill", **{**on_policy, "on_policy": 1, "epochs": 1}, out=tmp_path / "out")
    (entry,) = read_json(tmp_path / "out/student/fastkd.json")["history"]
    assert set(entry["losses"]) == {"loss", "soft"}


def test_where_a_student_cannot_learn_from_itself(on_policy, tmp_path):
    cache = {"teacher": None, "teacher_cache": tmp_path}
    error = run("distill", **{**on_policy, **cache}, expect=2)
    assert "--on-policy and --teacher-cache exclude each other" in error
    for options, words in (
        ({"method": "knn"}, "--method knn compares rows of one class, and those of --task chat"),
        ({"method": "labels"}, "--on-policy: Labels learns from labels alone"),
        ({"on_policy": 2}, "--on-policy must be at most 1, got 2"),
    ):
        error = run("distill", **{**on_policy, **options}, out=tmp_path / "out", expect=2)
        assert words in error


def test_the_steps_on_policy_are_spread():
    for share, count in ((0.1, 100), (0.25, 250), (1 / 3, 333), (1.0, 1000)):
        steps = [OnPolicy(share, None).at(step) for step in range(1000)]
        assert sum(steps) == count
        assert sum(steps[:100]) == pytest.approx(100 * share, abs=1)


def test_two_processes_train_the_student_of_one(on_policy, teacher, tmp_path):
    still = tmp_path / "still"
    shutil.copytree(teacher, still)
    model = GPT2LMHeadModel.from_pretrained(teacher)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(model.config, name, 0.0)
    model.save_pretrained(still)
    options = {**on_policy, "teacher": still, "on_policy": 0, "epochs": 1}
    run("distill", **options, out=tmp_path / "one")
    options["batch_size"] = 2
    writing = {**options, "on_policy": 1, "lora": "r=2"}
    lines = {
        "writing": words_of("distill", **writing, out=tmp_path / "writing"),
        "two": words_of("distill", **options, out=tmp_path / "two"),
    }
    launch = Launch(tmp_path / "launch", 2, commands, tmp_path, lines)
    errors = launch.end()
    results = read_json(tmp_path / "0.json")
    assert launch.process.exitcode == 0 and results["writing"][0] == 0, (results, errors)
    one, two = (
        read_json(tmp_path / name / "student/fastkd.json")["history"][0] for name in ("one", "two")
    )
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
    assert one["scores"] == pytest.approx(two["scores"], rel=1e-4)
    (entry,) = read_json(tmp_path / "writing/student/fastkd.json")["history"]
    assert set(entry["losses"]) == {"loss", "soft"}


def test_a_table_has_messages_as_json(teacher, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [says("a film")])
    run("predict", model=teacher, data=path, out=tmp_path / "told.csv", task="chat", device="cpu")
    with (tmp_path / "told.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert json.loads(row["messages"]) == says("a film")[0] and row["answer"]


def test_the_teacher_scores_what_was_written(teacher, tmp_path):
    """Reverse KL over the student's own tokens, each as both models predict it, and no others."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = GPT2LMHeadModel.from_pretrained(teacher).double().eval()
    student = student_from_teacher(model, [1, 3]).eval()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    task = TASK()
    encoded = Encoder(tokenizer, 16, task)(read(write_jsonl(tmp_path / "a.jsonl", talks(4))))
    collate = task.collator(tokenizer)
    (batch,) = encoded.batches(collate, 4)
    rows = task.drawn(student, batch, tokenizer)
    method = SoftTargets(divergence="reverse_kl", temperature=1.0, alpha=0.25)
    method.left_out = frozenset({"task"})
    found = Distiller(model, student, method).eval()(**collate(rows))
    assert set(found.terms) == {"soft", "total"}
    expected = []
    for row in rows:
        ids, counted = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:]) != -100
        with torch.no_grad():
            log_s, log_t = (x(ids).logits[0, :-1].log_softmax(-1) for x in (student, model))
        expected.append((log_s.exp() * (log_s - log_t)).sum(-1)[counted])
    mean = torch.cat(expected).mean()
    torch.testing.assert_close(found.loss, 0.25 * mean, rtol=1e-9, atol=0)
