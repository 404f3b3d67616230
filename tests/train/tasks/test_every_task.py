"""Every task: a run of every command, scores as libraries give them, losses as transformers'."""

import csv
import functools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import sacrebleu
import torch
import transformers as t
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score, f1_score, ndcg_score
from sklearn.preprocessing import MultiLabelBinarizer

from fastkd.train.data import load
from fastkd.train.generation import Generation, rouge_l
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from fastkd.train.tasks.question_answering import squad
from fastkd.train.tasks.token_classification import precision_recall_f1
from tests.support.draw import FIRST
from tests.support.runs import first_step, made
from tests.support.tiny import STILL, make_teacher, run, source, usual, write_onnx, write_tsv
from tests.train.tasks import through

#: By task: a function that makes a teacher, the kind of its files, and a word of the model card.
TASKS = {
    "causal-lm": (through.make_decoder, "txt", "text-generation"),
    "chat": (through.make_chat_teacher, "jsonl", "text-generation"),
    "classification": (functools.partial(make_teacher, labels=["yes", "no"], **STILL), "jsonl",
                       "text-classification"),
    "embedding": (functools.partial(through.make_embedder, pooling="cls"), "jsonl",
                  "SentenceTransformer("),
    "masked-lm": (through.make_bare, "txt", "fill-mask"),
    "multi-label": (through.make_bare, "jsonl", "text-classification"),
    "multiple-choice": (through.make_bare, "jsonl", "AutoModelForMultipleChoice"),
    "question-answering": (through.make_bare, "json", "AutoModelForQuestionAnswering"),
    "reranking": (functools.partial(make_teacher, layers=2, labels=1), "jsonl", "CrossEncoder("),
    "seq2seq": (through.make_writer, "jsonl", "generate("),
    "token-classification": (through.make_bare, "conll", "token-classification"),
}  # fmt: skip
#: Columns of rows that `fastkd predict` replaces, and those that it repeats by another name.
ANSWERS = {"answers", "label", "labels", "score", "target"}
RENAMED = {"sentence": "text", "sentence1": "text", "sentence2": "pair"}


def by_every_command(out, task, number=12, finetune=True, **options):
    """A student's report, its predicted rows, and the rows that were drawn, by every command.

    The teacher is fine-tuned first; the method is that of `--method auto`, the default.
    `evaluate` prints the scores of the run. In a third of the tasks each, drawn, a cache of the
    teacher teaches too, and a step passes `fastkd verify`.
    """
    make, kind, word = TASKS[task]
    teacher, given = make(out / "teacher"), {"device": "cpu", "batch_size": 8}
    rows = {"task": task, "max_length": 16, **given, **options}
    for seed, name in enumerate(("train", "eval")):
        rows[name] = through.write_rows(task, out / f"{name}.{kind}", number, seed)
    new = 8 if task in ("chat", "seq2seq") else None
    run("distill", **rows, teacher=teacher, finetune_teacher=1 if finetune else None, epochs=1,
        max_new_tokens=new, out=out / "run")  # fmt: skip
    student, truth = out / "run/student", [*through.drawn(task, number, 1)]
    report = read_json(student / "fastkd.json")
    assert report["task"] == task and word in (student / "README.md").read_text()
    run("evaluate", model=student, data=rows["eval"], out=out / "scores.json", **given)
    assert read_json(out / "scores.json").items() >= report["best"]["scores"].items()
    predicted = through.told(student, rows["eval"], out / "told.jsonl", **given)
    for name in truth[0].keys() - ANSWERS:
        assert column(predicted, RENAMED.get(name, name)) == column(truth, name)
    rows |= {"teacher": out / "run/teacher" if finetune else teacher}
    rows |= dict.fromkeys(("labelled", "accumulate"))
    if not random.Random(f"{task} {FIRST}").randrange(3):
        run("cache", **rows, out=out / "cache")
        taught = {"teacher": None, "teacher_layers": None}  # the cache has the student
        first_step(**{**rows, **taught}, teacher_cache=out / "cache")
    through.verified(**{**rows, "batch_size": None})
    return report, predicted, truth


def column(rows, name):
    return [row[name] for row in rows]


def causal_lm(path):
    report, rows, _ = by_every_command(path, "causal-lm", 24)
    # A uniform guess among the 17 tokens has 17.
    assert report["labels"] is None and 1 < report["student"]["perplexity"] < 20
    assert all(row["perplexity"] > 1 for row in rows)


def masked_lm(path):
    report, rows, _ = by_every_command(path, "masked-lm", 24)
    assert 1 < report["student"]["masked_perplexity"] < 40
    assert all(row["hidden"] >= 1 and row["masked_perplexity"] > 1 for row in rows)
    # The student's next task, and one that its teacher can't learn.
    data, teacher = write_tsv(path / "a.tsv", 8), make_teacher(path / "next")
    _, models = made(train=data, eval=data, teacher=teacher, student=path / "run/student")
    assert "ForSequenceClassification" in type(models.student).__name__
    causal = {name: path / f"{name}.txt" for name in ("train", "eval")}
    causal |= {"task": "causal-lm", "finetune_teacher": 1, "out": path / "no"}
    said = run("distill", **usual(path, path, **causal), expect=2)
    assert "a bert model attends to both sides" in said and "--task masked-lm" in said


def chat(path):
    report, rows, truth = by_every_command(path, "chat")
    answers = column(rows, "answer"), [row["messages"][-1]["content"] for row in truth]
    assert report["student"]["rouge_l"] == pytest.approx(rouge_l(*answers), abs=1e-12)
    out = path / "told.csv"
    run("predict", model=path / "run/student", data=path / "eval.jsonl", out=out, device="cpu")
    with out.open(newline="") as file:
        table = [*csv.DictReader(file)]
    assert [json.loads(row["messages"]) for row in table] == column(truth, "messages")
    assert column(table, "answer") == answers[0]


def embedding(path):
    """By a student of another body and tokenizer."""
    body = through.make_body(path / "body")
    report, rows, truth = by_every_command(path, "embedding", 24, finetune=False, student=body)
    student = path / "run/student"
    words = t.AutoTokenizer.from_pretrained(student)
    assert words.model_max_length == 24 and "##od" in words.get_vocab()
    for text, vector in (("text", "embedding"), ("pair", "pair_embedding")):
        (expected,) = through.vectors_of(student, texts=column(rows, text))
        np.testing.assert_allclose(column(rows, vector), expected, atol=1e-5)
    for name, score in (("spearman", spearmanr), ("pearson", pearsonr)):
        expected = score(column(rows, "cosine"), column(truth, "score"))[0]
        assert report["student"][name] == pytest.approx(expected, abs=1e-4)


def multi_label(path):
    more = through.write_rows("text", path / "more.txt", 2)
    report, rows, truth = by_every_command(path, "multi-label", 24, unlabelled=more)
    assert report["labels"] == list(through.NAMED)
    binary = MultiLabelBinarizer(classes=through.NAMED)
    true, found = (binary.fit_transform(column(table, "labels")) for table in (truth, rows))
    chances = np.array([column(rows, f"P({name})") for name in through.NAMED]).T
    assert (found == (chances > 0.5)).all()
    scores = report["best"]["scores"]
    for average in ("micro", "macro"):
        expected = f1_score(true, found, average=average, zero_division=0)
        assert scores[f"{average}_f1"] == expected
    expected = average_precision_score(true, chances, average="macro")
    assert scores["mean_average_precision"] == pytest.approx(expected, abs=1e-9)
    # A written table is read back; without fastkd's manifest the configuration gives the task.
    student, evals = path / "run/student", path / "eval.jsonl"
    run("predict", model=student, data=evals, out=path / "told.csv", device="cpu")
    again = through.rows_of(path / "told.csv", "multi-label")
    assert list(again.column("label")) == column(rows, "labels")
    (student / "fastkd.json").unlink()
    run("evaluate", model=student, data=evals, out=path / "a.json", device="cpu", max_length=16)
    assert read_json(path / "a.json")["micro_f1"] == pytest.approx(scores["micro_f1"])


def multiple_choice(path):
    more = through.write_jsonl(path / "more.jsonl", [{"question": "a", "choices": [*"bcde"]}] * 4)
    report, rows, truth = by_every_command(path, "multiple-choice", 16, unlabelled=more)
    assert report["rows"]["unlabelled"] == 4
    assert all(row["choice"] == row["choices"][row["label"]] for row in rows)
    right = np.mean(np.equal(column(rows, "label"), column(truth, "label")))
    assert report["best"]["scores"] == {"accuracy": right}


def question_answering(path):
    report, rows, truth = by_every_command(path, "question-answering", max_length=12)
    assert report["no_answer"] is False
    assert all(row["text"] and row["text"] in row["context"] for row in rows)
    scores = report["best"]["scores"]
    gold = [column(row["answers"], "text") for row in truth]
    assert scores == pytest.approx(squad(column(rows, "text"), gold))
    student, onnx, said = (path / name for name in ("run/student", "x.onnx", "onnx.json"))
    model = t.AutoModelForQuestionAnswering.from_pretrained(student)
    write_onnx(model, onnx, "start_logits", "end_logits")
    run("evaluate", model=student, data=path / "eval.json", onnx=onnx, out=said, device="cpu")
    assert dict(read_json(said).items() & scores.items()) == scores


def reranking(path):
    report, rows, _ = by_every_command(path, "reranking", finetune=False)
    ranks = []
    for row in rows:
        scores = row["pos_scores"] + row["neg_scores"]
        ranks.append((ndcg_score([[1] + [0] * len(row["neg"])], [scores], k=10),
                      1 / (1 + sum(x >= scores[0] for x in scores[1:]))))  # fmt: skip
    expected = dict(zip(("ndcg@10", "mrr"), np.mean(ranks, 0), strict=True))
    assert report["best"]["scores"] == pytest.approx(expected)
    # The CrossEncoder of sentence-transformers ranks by the same scores.
    encoders = pytest.importorskip("sentence_transformers")
    encoder = encoders.CrossEncoder(str(path / "run/student"), device="cpu")
    pairs = [(rows[-1]["query"], text) for text in rows[-1]["pos"] + rows[-1]["neg"]]
    found = encoder.predict(pairs, activation_fn=torch.nn.Identity())
    assert found.tolist() == pytest.approx(scores, abs=1e-5)
    # What `predict` writes is a file with a teacher's scores.
    more = {"task": "reranking", "train": path / "told.jsonl", "eval": path / "eval.jsonl",
            "method": "margin_mse", "set": "alpha=0"}  # fmt: skip
    found, terms = first_step(**usual(path, path, **more))
    said = "\n".join(found.data.corpus.task.describe(found.data.corpus))
    assert "lists of 2 to 4 documents; 12 of 12 training lists have scores" in said
    assert terms.keys() == {"total", "task"}
    data = write_tsv(path / "a.tsv", 8)
    other = {"task": "classification", "train": data, "eval": data}
    for options, words in (
        ({"accumulate": 2}, "--accumulate: a row of --task reranking is a list"),
        ({**other, "teacher": make_teacher(path / "next")}, "MarginMSE compares scores"),
    ):
        assert words in run("distill", expect=2, **usual(path, path / "no", **more | options))
    bare = [{"query": "film", "documents": ["good", "bad film"]}]
    bare = through.write_jsonl(path / "a.jsonl", bare)
    (row,) = through.told(path / "run/student", bare, path / "bare.jsonl")
    assert not row["pos_scores"] and len(row["neg_scores"]) == 2


def seq2seq(path):
    # T5's first block has parameters that other blocks lack.
    report, rows, truth = by_every_command(path, "seq2seq", 16, teacher_layers="1")
    found, true = (column(table, "target") for table in (rows, truth))
    scores = report["student"]
    assert scores["rouge_l"] == pytest.approx(rouge_l(found, true), rel=1e-12)
    assert scores["chrf"] == sacrebleu.corpus_chrf(found, [true]).score and 0 < scores["loss"] < 10


def token_classification(path):
    report, rows, truth = by_every_command(path, "token-classification", 24)
    assert report["labels"] == ["B-FILM", "B-GOOD", "I-GOOD", "O"]
    train = path / "train.conll"  # whose suffix names the task
    assert load(source(train=train, evals=train)).task.name() == "token-classification"
    expected = precision_recall_f1(column(rows, "labels"), column(truth, "labels"))
    assert [report["student"][x] for x in ("precision", "recall", "f1")] == [*expected]
    assert rows[0]["row"] == 3


def classification(path):
    """Of labels that are distributions over the classes, which the teacher has in another order."""
    report, _, truth = by_every_command(path, "classification", 24, labelled=8, accumulate=2)
    assert report["labels"] == ["yes", "no"] and report["rows"]["unlabelled"] == 16
    # The most probable class is the label of the scores.
    hard, out = path / "hard.jsonl", path / "hard.json"
    labels = (max(row["label"], key=row["label"].get) for row in truth)
    through.write_jsonl(hard, ({**row, "label": x} for row, x in zip(truth, labels, strict=True)))
    run("evaluate", model=path / "run/student", data=hard, device="cpu", out=out)
    assert read_json(out)["accuracy"] == report["student"]["accuracy"]
    # At the first step: -(.75 log q + .25 log q) of a row, by the teacher's own weights.
    one, teacher = through.write_rows("classification", path / "one.jsonl", 2), path / "teacher"
    given = {"train": one, "eval": one, "student": teacher, "method": "labels"}
    _, terms = first_step(**usual(path, path, **given))
    by_hand = 0
    answers = through.told(teacher, one, path / "one.out.jsonl")
    for labels, row in zip(through.SOFT, answers, strict=True):
        by_hand -= sum(p * math.log(row[f"P({name})"]) for name, p in labels.items()) / 2
    assert terms["task"].item() == pytest.approx(by_hand, rel=1e-4)


CHECKS = (
    causal_lm, chat, classification, embedding, masked_lm, multi_label, multiple_choice,
    question_answering, reranking, seq2seq, token_classification,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_every_command_takes_it(tmp_path, check):
    check(tmp_path)


@pytest.mark.parametrize(("name", "length", "options", "scores"), [
    ("causal-lm", 8, {"separate_documents": False}, {"perplexity": math.exp}),
    ("masked-lm", 12, {}, {"masked_perplexity": math.exp}),
    ("chat", 16, {}, {"loss": float, "perplexity": math.exp}),
    ("seq2seq", 16, {}, {"loss": float}),
])  # fmt: skip
def test_scores_of_tokens_are_the_loss_of_transformers(tmp_path, name, length, options, scores):
    """And generated texts depend on seed and row alone."""
    make, kind, _ = TASKS[name]
    folder, task = make(tmp_path / "model"), named(name)(**options)
    if name == "masked-lm":
        t.BertForMaskedLM(t.BertConfig.from_pretrained(folder)).save_pretrained(folder)
    model = getattr(t, task.head).from_pretrained(folder).eval()
    tokenizer = t.AutoTokenizer.from_pretrained(folder)
    data = through.write_rows(name, tmp_path / f"a.{kind}", 12)
    tokens = through.encoded(data, task, tokenizer, length)
    rows, collate = [*tokens], task.collator(tokenizer)
    batch = collate(rows)
    with torch.no_grad():
        answers, loss = task.answer(model, batch, tokenizer), model(**batch).loss.item()
    expected = {name: of_loss(loss) for name, of_loss in scores.items()}
    if name == "causal-lm":
        total = loss * sum(len(row["input_ids"]) - 1 for row in rows)
        size = sum(tokens.evaluation_columns["bytes"][:])
        expected["bits_per_byte"] = total / math.log(2) / size
    found = task.scores((*expected,), answers, tokens)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    if task.generation is None:
        return

    def texts(rows, *generation):
        writing = replace(task, generation=Generation(4, *generation))
        with torch.no_grad():
            return [answer[at] for answer in writing.answer(model, collate(rows), tokenizer)]

    at = -1 if name == "chat" else 0
    sampled, greedy = texts(rows, 1.0, 0), texts(rows)
    assert sampled == [x for row in rows for x in texts([row], 1.0, 0)] != texts(rows, 1.0, 1)
    assert texts(rows, 1e-6, 0) == greedy == [x for row in rows for x in texts([row])]
    assert max(len(x.split()) for x in sampled) <= 4
    true = tokens.evaluation_columns["answer"] if name == "chat" else tokens.rows.column("label")
    right = [[*answer] for answer in answers]
    for answer, text in zip(right, true, strict=True):
        answer[at] = text
    found = task.scores((), right, tokens)
    assert found["rouge_l"] == 1 and found.get("chrf", 100) == pytest.approx(100)
