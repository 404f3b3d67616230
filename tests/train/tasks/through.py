"""Every task's tiny models and files, and what tests do with them."""

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

from fastkd.distill.verify import _Step
from fastkd.train.arrow_rows import Encoded
from fastkd.train.data import Encoder, read_file
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from fastkd.train.tasks.base import Task
from tests.distill.models import model
from tests.support.draw import FIRST
from tests.support.runs import crash, same_weights, stop_at
from tests.support.tiny import STILL, WORDS, make_teacher, run, sentences

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[CLS] {{ m.content }} "
    "{% elif m.role == 'assistant' %}[MASK] {{ m.content }} [SEP] "
    "{% else %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[MASK] {% endif %}"
)
TAGS = {"film": "B-FILM", "good": "B-GOOD", "very": "I-GOOD"}
NAMED = ("bad", "film", "good", "so")
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)  # of a GPT-2
#: Probabilities of classes, by class.
SOFT = [{"no": 0.75, "yes": 0.25}, {"yes": 0.9, "no": 0.1}]


def make_bare(path, **config):
    """A random BERT of two layers without a head."""
    return make_teacher(path, head=False, **{"layers": 2, **config})


def make_body(path):
    """A smaller BERT that reads the words in pieces."""
    words = ["go", "##od", "fine", "nice", "b", "##ad", "poor", "du", "##ll", *WORDS[6:]]
    sizes = {"hidden_size": 8, "intermediate_size": 16, "longest": 24}
    return make_bare(path, words=words, **sizes, **STILL)


def make_decoder(path, template=None, longest=32):
    """A random GPT-2 without dropout."""
    make_teacher(path, head=False, longest=longest)
    tokenizer = t.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    sizes = {"bos_token_id": 3, "eos_token_id": 3, "max_position_embeddings": longest}
    return save_model(path, t.GPT2LMHeadModel, "gpt2", **NO_DROPOUT, **sizes)


make_chat_teacher = functools.partial(make_decoder, template=TEMPLATE)


def make_writer(path, dropout=0.1):
    """A random T5."""
    make_teacher(path, head=False)
    sizes = {"num_decoder_layers": 2, "eos_token_id": 3, "dropout_rate": dropout}
    return save_model(path, t.T5ForConditionalGeneration, "t5", layers=2, **sizes)


def save_model(path, head, family, layers=4, vocab_size=17, **options):
    """Save a random model of `tests.distill.models`."""
    torch.manual_seed(0)
    model(head, family, layers, vocab_size=vocab_size, **options).save_pretrained(path)
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


def says(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def drawn(task: str, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of a task."""
    rng = random.Random(seed)
    for i, (text, y) in enumerate(sentences(count, seed)):
        word, *rest = rng.sample(WORDS, 6)
        words = text.split()
        some = rng.choices(WORDS, k=rng.randint(2, 8))
        long = [*rng.choices(WORDS[:6], k=rng.randint(4, 16)), "film", "is", "so"]
        answer = {"text": " "[i % 2 :] + long[-4], "answer_start": len(" ".join(long[:-4])) + i % 2}
        rows = {
            "classification": {"sentence": text, "label": SOFT[y]},
            "chat": {"messages": says(text, words[0])},
            "embedding": {"sentence1": text, "sentence2": " ".join(rest), "score": rng.random()},
            "multi-label": {"text": text, "labels": [name for name in NAMED if name in words]},
            "multiple-choice": {"question": word, "choices": rest[:4], "label": rng.randrange(4)},
            "question-answering": {  # the word before "film"
                "id": f"q{i}", "question": "the film", "context": " ".join(long),
                "answers": [answer],
            },
            "reranking": {"query": word, "pos": [f"{word} {rest[0]}"],
                          "neg": rest[1 : rng.randint(2, 4)]},
            "seq2seq": {"source": text, "target": " ".join(words[: 1 + i % 3])},
            "token-classification": {"tokens": some, "labels": [TAGS.get(w, "O") for w in some]},
            "triples": {"anchor": word, "positive": " ".join(rest[:2]), "negative": " ".join(rest)},
        }  # fmt: skip
        yield rows.get(task, {"text": text})


def write_jsonl(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_rows(task: str, path: Path, count: int, seed: int = 0) -> Path:
    """Drawn rows, written as the task's own kind of file or as .jsonl."""
    rows = [*drawn(task, count, seed)]
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    if path.suffix == ".json":  # SQuAD's
        parts = [{"context": row.pop("context"), "qas": [row]} for row in rows]
        path.write_text(json.dumps({"data": [{"paragraphs": [part]} for part in parts]}))
    elif path.suffix == ".conll":
        tagged = (zip(row["tokens"], row["labels"], strict=True) for row in rows)
        texts = ("\n".join(f"{word} X {tag}" for word, tag in row) for row in tagged)
        path.write_text("\n\n".join(["-DOCSTART- -X- O", *texts, ""]))
    else:
        path.write_text("\n\n".join(row["text"] for row in rows) + "\n")
    return path


write_text = functools.partial(write_rows, "causal-lm")
write_targets = functools.partial(write_rows, "seq2seq")
write_conll = functools.partial(write_rows, "token-classification")
write_squad = functools.partial(write_rows, "question-answering")


def write_lines(path, rows=24, seed=0):
    path.write_text("".join(f"{text}\n" for text, _ in sentences(rows, seed)))
    return path


def write_chats(path, rows, seed=0):
    """Conversations, given or drawn."""
    talks = ({"messages": one} for one in rows) if isinstance(rows, list) else None
    return write_jsonl(path, talks or drawn("chat", rows, seed))


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


def rows_of(path: Path, task: type[Task] | str, written: Any = None, **columns: Any) -> Any:
    """The rows of a file, which is written first if a text, or rows of JSON, are given."""
    if written is not None:
        text = written if isinstance(written, str) else "\n".join(map(json.dumps, written))
        path.write_text(text, encoding="utf-8")
    task = named(task) if isinstance(task, str) else task
    return read_file(path, replace(task.columns, **columns), "--train", task=task)


def killed_and_resumed(out: Path, *steps: int, **options: Any) -> None:
    """Assert that a run interrupted after each of ``steps``, and resumed, equals a whole one."""
    seldom = out / "seldom.json"
    seldom.write_text('{"logging_steps": 99}')
    rows = dict(device="cpu", max_length=16, checkpoint_every=2, trainer_args=seldom) | options
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
    found = [[(x["scores"], x["losses"]) for x in report["history"]] for report in past]
    assert found[0] == found[1]
