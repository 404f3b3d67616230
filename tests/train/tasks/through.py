"""Every task's tiny models and files, and one run of every command on them."""

import csv
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

from fastkd.distill.verify import _Step
from fastkd.train.arrow_rows import Encoded
from fastkd.train.data import Encoder, read_file
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from fastkd.train.tasks.base import Task
from tests.support.draw import FIRST
from tests.support.runs import crash, first_step, same_weights, stop_at
from tests.support.tiny import STILL, WORDS, make_teacher, run, sentences

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[CLS] {{ m.content }} "
    "{% elif m.role == 'assistant' %}[MASK] {{ m.content }} [SEP] "
    "{% else %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[MASK] {% endif %}"
)
TAG = {"film": "B-FILM", "good": "B-GOOD", "very": "I-GOOD"}
NAMED = ("bad", "film", "good", "so")


def make_bare(path, **config):
    """A random BERT of two layers without a head."""
    return make_teacher(path, head=False, **{"layers": 2, **config})


def make_body(path):
    """A smaller BERT that reads the words in pieces."""
    words = ["go", "##od", "fine", "nice", "b", "##ad", "poor", "du", "##ll", *WORDS[6:]]
    sizes = {"hidden_size": 8, "intermediate_size": 16, "longest": 24}
    return make_bare(path, words=words, **sizes, **STILL)


def make_decoder(path, longest=32):
    make_teacher(path, head=False, longest=longest)
    shape = {"vocab_size": 17, "n_positions": longest, "n_embd": 16, "n_layer": 4, "n_head": 2}
    still = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    config = t.GPT2Config(**shape, **still)
    config.bos_token_id = config.eos_token_id = 3
    torch.manual_seed(0)
    t.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def make_chat_teacher(path, template=TEMPLATE, longest=32):
    make_decoder(path, longest)
    tokenizer = t.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def make_writer(path, dropout=0.1):
    make_teacher(path, head=False)
    config = t.T5Config(
        vocab_size=17, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    t.T5ForConditionalGeneration(config).save_pretrained(path)
    return path


def make_embedder(path, pooling="mean", normalize=True, **config):
    """A random BERT in a folder that sentence-transformers wrote."""
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules

    body = make_teacher(path.with_name(f"{path.name}-body"), head=False, **config)
    first = modules.Transformer(str(body))
    parts = [first, modules.Pooling(first.get_embedding_dimension(), pooling)]
    parts += [modules.Normalize()] * normalize
    st.SentenceTransformer(modules=parts).save(str(path))
    return path


def write_jsonl(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_text(path, rows, seed=0):
    texts = [text for text, _ in sentences(rows, seed)]
    if path.suffix == ".jsonl":
        return write_jsonl(path, ({"text": text} for text in texts))
    path.write_text("\n\n".join(texts) + "\n")
    return path


def write_lines(path, rows=24, seed=0):
    path.write_text("".join(f"{text}\n" for text, _ in sentences(rows, seed)))
    return path


def says(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def talks(rows, seed=0):
    """Questions answered by their first word."""
    return [says(text, text.split()[0]) for text, _ in sentences(rows, seed)]


def write_chats(path, rows, seed=0):
    """Conversations, given or drawn."""
    rows = talks(rows, seed) if isinstance(rows, int) else rows
    return write_jsonl(path, ({"messages": one} for one in rows))


def write_targets(path, rows, seed=0):
    return write_jsonl(
        path, ({"source": x, "target": x.split()[0]} for x, _ in sentences(rows, seed))
    )


def tagged(rows, seed=0):
    rng = random.Random(seed)
    for _ in range(rows):
        words = rng.choices(WORDS, k=rng.randint(2, 7))
        yield words, [TAG.get(word, "O") for word in words]


def write_conll(path, rows, seed=0):
    lines = []
    for row in tagged(rows, seed):
        lines += [*(f"{w} X {t}" for w, t in zip(*row, strict=True)), ""]
    path.write_text("\n".join(["-DOCSTART- -X- O", "", *lines]))
    return path


def labelled(rows, seed=0):
    for text, _ in sentences(rows, seed):
        yield text, [name for name in NAMED if name in text.split()]


def write_labels(path, rows, seed=0):
    return write_jsonl(path, ({"text": x, "labels": names} for x, names in labelled(rows, seed)))


def chosen(rows, seed=0):
    rng = random.Random(seed)
    for _ in range(rows):
        said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(5)]
        yield said[0], said[1:], rng.randrange(4)


def write_choices(path, rows, seed=0):
    """As SWAG's file, or of fastkd's own columns."""
    if path.suffix == ".jsonl":
        own = ("question", "choices", "label")
        return write_jsonl(path, (dict(zip(own, row, strict=True)) for row in chosen(rows, seed)))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["video-id", "sent1", "sent2", *(f"ending{i}" for i in range(4)), "label"])
        table.writerows([1, q, "so", *choices, label] for q, choices, label in chosen(rows, seed))
    return path


def questions(rows, seed=0):
    """What film it is: the word before "film"."""
    rng = random.Random(seed)
    for i in range(rows):
        words = [*rng.choices(WORDS[:6], k=rng.randint(4, 16)), "film", "is", "so"]
        text = " ".join(words)
        answers = [{"text": words[-4], "answer_start": text.rindex(f"{words[-4]} film")}]
        yield f"q{i}", "the film", text, answers


def write_squad(path, rows, seed=0):
    paragraphs = [
        {"context": text, "qas": [{"id": name, "question": asked, "answers": answers}]}
        for name, asked, text, answers in questions(rows, seed)
    ]
    half = rows // 2
    data = [{"title": "a", "paragraphs": part} for part in (paragraphs[:half], paragraphs[half:])]
    path.write_text(json.dumps({"version": "v2.0", "data": data}))
    return path


def queries(rows, seed=0):
    rng = random.Random(seed)
    for _ in range(rows):
        words = rng.sample(WORDS, 5)
        yield words[0], [f"{words[0]} {x}" for x in words[1:2]], words[2 : rng.randint(3, 5)]


def write_lists(path, rows, seed=0):
    return write_jsonl(path, ({"query": q, "pos": p, "neg": n} for q, p, n in queries(rows, seed)))


def write_scored(path, rows=24, seed=0):
    """Pairs of texts with a similarity."""
    rng = random.Random(seed)
    texts = [text for text, _ in sentences(2 * rows, seed)]
    lines = [f"{a}\t{b}\t{rng.random():.3f}" for a, b in zip(texts[::2], texts[1::2], strict=True)]
    path.write_text("\n".join(["sentence1\tsentence2\tscore", *lines]) + "\n")
    return path


def write_triples(path, rows=14, seed=0):
    names = ("anchor", "positive", "negative")
    texts = [text for text, _ in sentences(3 * rows, seed)]
    parts = (texts[i : i + 3] for i in range(0, 3 * rows, 3))
    return write_jsonl(path, (dict(zip(names, part, strict=True)) for part in parts))


#: By task: functions that make a teacher and write rows, and the rows' kind of file.
TASKS: dict[str, tuple[Any, Any, str]] = {
    "causal-lm": (make_decoder, write_text, "txt"),
    "chat": (make_chat_teacher, write_chats, "jsonl"),
    "embedding": (functools.partial(make_embedder, pooling="cls"), write_scored, "tsv"),
    "masked-lm": (make_bare, write_text, "txt"),
    "multi-label": (make_bare, write_labels, "jsonl"),
    "multiple-choice": (make_bare, write_choices, "jsonl"),
    "question-answering": (make_bare, write_squad, "json"),
    "reranking": (functools.partial(make_teacher, layers=2, labels=1), write_lists, "jsonl"),
    "seq2seq": (make_writer, write_targets, "jsonl"),
    "token-classification": (make_bare, write_conll, "conll"),
}


def through(
    out: Path, task: str, number: int = 12, *, finetune: bool = True, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Report of a student of a fine-tuned teacher, and its predicted rows, by every command.

    The method is that of `--method auto`, the default.
    Teacher and rows are those of `TASKS`, drawn by the seeds 0 and 1, unless they are given.
    `evaluate` prints the scores of the run, a cache of the teacher teaches too (in a half of the
    tasks, drawn), and a step passes `fastkd verify`.
    """
    options |= {"task": task, "batch_size": 8, "device": "cpu"}
    if "teacher" not in options:
        make, write, kind = TASKS[task]
        options["teacher"] = make(out / "teacher")
        for seed, name in enumerate(("train", "eval")):
            options.setdefault(name, write(out / f"{name}.{kind}", number, seed))
    teacher, evals = options.pop("teacher"), options["eval"]
    rows = {"max_length": 16, **options}
    first = {"teacher": teacher, "epochs": 1}
    if task in ("chat", "seq2seq"):
        first["max_new_tokens"] = 8
    if finetune:
        first["finetune_teacher"] = 1
    run("distill", **rows, **first, out=out / "run")
    student = out / "run/student"
    report = read_json(student / "fastkd.json")
    assert report["task"] == task
    length = {"device": "cpu", "batch_size": 8}
    run("evaluate", model=student, data=evals, out=out / "scores.json", **length)
    said = read_json(out / "scores.json")
    for name, value in report["best"]["scores"].items():
        assert said[name] == value
    predicted = told(student, evals, out / "told.jsonl", **length)
    report["card"] = (student / "README.md").read_text()
    learned = out / "run/teacher" if finetune else teacher
    cached = {k: x for k, x in rows.items() if k not in ("labelled", "accumulate")}
    cached["teacher"] = learned
    if random.Random(f"{task} {FIRST}").randrange(2):
        run("cache", **cached, out=out / "cache")
        rows.pop("teacher_layers", None)  # the cache has the student
        first_step(**rows, teacher_cache=out / "cache")
    cached.pop("batch_size")
    verified(**cached)
    return report, predicted


def told(model: Path, data: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of `fastkd predict`."""
    run("predict", model=model, data=data, out=out, **{"device": "cpu", **options})
    return [json.loads(line) for line in out.read_text().splitlines()]


def verified(**options: Any) -> None:
    """Assert that `fastkd verify` finds a step without a fault; in a third of the calls, drawn."""
    drawn = random.Random(f"{options.get('task')} {options.get('lora')} {FIRST}")
    if drawn.randrange(3):  # it takes as long as all else
        return
    with pytest.MonkeyPatch.context() as patch:
        # Compiling a model takes longer than all else: tests/distill/test_verify.py does.
        patch.setattr(_Step, "compiled", lambda step, backend: step.gradients(step.batch))
        said = run("verify", **options, rows=4, ranks=0)
    assert " rows, device cpu, float64" in said and "saved and loaded" in said
    assert "differs" not in said


def encoded(path: Path, task: Task, tokenizer: Any, length: int = 16) -> Encoded:
    """The tokens of a file."""
    return Encoder(tokenizer, length, task)(rows_of(path, type(task)))


def vectors_of(*models: Path, texts: list[str]) -> list[Any]:
    """Embeddings by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return [SentenceTransformer(str(path)).encode(texts) for path in models]


def loss_of(task: Task, model: nn.Module, tokenizer: Any, rows: Encoded) -> tuple[Any, float]:
    """Answers for all rows in one batch, and the loss that transformers computes of it."""
    batch = task.collator(tokenizer)(rows.__getitems__(range(len(rows))))
    with torch.no_grad():
        return task.answer(model, batch, tokenizer), model(**batch).loss.item()


def rows_of(path: Path, task: type[Task] | str, text: str | list | None = None) -> Any:
    """The rows of a file, which is written first if a text, or rows of JSON, are given."""
    if text is not None:
        text = text if isinstance(text, str) else "\n".join(map(json.dumps, text))
        path.write_text(text, encoding="utf-8")
    task = named(task) if isinstance(task, str) else task
    return read_file(path, task.columns, "--train", task=task)


def killed_and_resumed(out: Path, *steps: int, **options: Any) -> None:
    """Assert that a run interrupted after each of ``steps``, and resumed, equals a whole one."""
    rows = {"device": "cpu", "max_length": 16, "checkpoint_every": 2, **options}
    run("distill", **rows, out=out / "whole")
    resume = None
    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, step, crash)
            run("distill", **rows, resume=resume, out=out / "killed", expect=130)
        resume = True
    run("distill", **rows, resume=True, out=out / "killed")
    assert same_weights(out / "whole", out / "killed")
    past = [read_json(out / name / "student/fastkd.json") for name in ("whole", "killed")]
    scores = [[entry["scores"] for entry in report["history"]] for report in past]
    assert scores[0] == scores[1]
