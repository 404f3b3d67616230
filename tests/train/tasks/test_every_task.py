"""Every task: a run of every command, scores as libraries give them, losses as transformers'."""

import csv
import json
import math

import numpy as np
import pytest
import sacrebleu
import torch
import transformers as t
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score, f1_score, ndcg_score

from fastkd.train.data import load
from fastkd.train.generation import Generation, rouge_l
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from fastkd.train.tasks.question_answering import squad
from fastkd.train.tasks.token_classification import precision_recall_f1
from tests.support.runs import first_step, made
from tests.support.tiny import STILL, make_teacher, run, sentences, source, usual, write_onnx
from tests.train.tasks.through import (
    NAMED,
    TASKS,
    chosen,
    encoded,
    labelled,
    loss_of,
    make_body,
    queries,
    questions,
    rows_of,
    tagged,
    talks,
    through,
    told,
    vectors_of,
    write_choices,
    write_jsonl,
)


def shown(rows, *names):
    """Columns of predicted rows, as tuples."""
    return [tuple(row[name] for name in names) for row in rows]


def causal_lm(path):
    report, rows = through(path, "causal-lm", 24)
    scores = report["student"]
    assert report["labels"] is None and scores.keys() == {"perplexity", "bits_per_byte"}
    # A uniform guess among the 17 tokens has 17.
    assert 1 < scores["perplexity"] < 20 and all(row["perplexity"] > 1 for row in rows)
    assert shown(rows, "text") == [(text,) for text, _ in sentences(24, 1)]
    assert "text-generation" in report["card"]


def masked_lm(path):
    report, rows = through(path, "masked-lm", 24)
    assert report["student"].keys() == {"masked_perplexity"}
    assert 1 < report["student"]["masked_perplexity"] < 40 and "fill-mask" in report["card"]
    assert all(row["hidden"] >= 1 and row["masked_perplexity"] > 1 for row in rows)
    # The student's next task.
    rows = write_jsonl(path / "a.jsonl", [{"text": x, "label": y} for x, y in sentences(8, 0)])
    teacher = make_teacher(path / "next")
    given = {"train": rows, "eval": rows, "max_length": 16}
    _, models = made(**given, teacher=teacher, student=path / "run/student")
    assert "ForSequenceClassification" in type(models.student).__name__


def chat(path):
    report, rows = through(path, "chat")
    assert report["student"].keys() == {"perplexity", "rouge_l"}
    asked = talks(12, 1)
    assert [row["messages"] for row in rows] == asked
    pairs = [row["answer"] for row in rows], [talk[-1]["content"] for talk in asked]
    assert report["student"]["rouge_l"] == pytest.approx(rouge_l(*pairs), abs=1e-12)
    out = path / "told.csv"
    run("predict", model=path / "run/student", data=path / "eval.jsonl", out=out, device="cpu")
    with out.open(newline="") as file:
        table = [*csv.DictReader(file)]
    assert [json.loads(row["messages"]) for row in table] == asked
    assert [row["answer"] for row in table] == pairs[0]


def embedding(path):
    """By a student of another body and tokenizer."""
    body = make_body(path / "body")
    report, rows = through(path, "embedding", 24, finetune=False, student=body)
    assert report["student"].keys() == {"spearman", "pearson"}
    words = t.AutoTokenizer.from_pretrained(path / "run/student")
    assert words.model_max_length == 24 and "##od" in words.get_vocab()
    for text, vector in (("text", "embedding"), ("pair", "pair_embedding")):
        (expected,) = vectors_of(path / "run/student", texts=[row[text] for row in rows])
        np.testing.assert_allclose([row[vector] for row in rows], expected, atol=1e-5)
    with (path / "eval.tsv").open() as file:
        true = [float(row["score"]) for row in csv.DictReader(file, delimiter="\t")]
    cosines = [row["cosine"] for row in rows]
    for name, score in (("spearman", spearmanr), ("pearson", pearsonr)):
        assert report["student"][name] == pytest.approx(score(cosines, true)[0], abs=1e-4)
    assert "library_name: sentence-transformers" in report["card"]
    assert "SentenceTransformer(" in report["card"]


def multi_label(path):
    train, more = path / "train.csv", path / "more.txt"
    lines = (f"{text},{'|'.join(names)}" for text, names in labelled(24))
    train.write_text("\n".join(["text,labels", *lines]) + "\n")
    more.write_text("good film\nbad film\n")
    report, rows = through(path, "multi-label", 24, train=train, unlabelled=more)
    assert report["labels"] == list(NAMED)
    assert shown(rows, "text") == [(text,) for text, _ in labelled(24, 1)]
    true = np.array([[name in names for name in NAMED] for _, names in labelled(24, 1)])
    chances = np.array([[row[f"P({name})"] for name in NAMED] for row in rows])
    found = np.array([[name in row["labels"] for name in NAMED] for row in rows])
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
    again = rows_of(path / "told.csv", "multi-label")
    assert list(again.columns("label")) == shown(rows, "labels")
    (student / "fastkd.json").unlink()
    run("evaluate", model=student, data=evals, out=path / "a.json", device="cpu", max_length=16)
    assert read_json(path / "a.json")["micro_f1"] == pytest.approx(scores["micro_f1"])


def multiple_choice(path):
    more = ({"question": q, "choices": c} for q, c, _ in chosen(4, 2))
    more = write_jsonl(path / "more.jsonl", more)
    train = write_choices(path / "a.csv", 16)
    report, rows = through(path, "multiple-choice", 16, train=train, unlabelled=more)
    assert report["rows"]["unlabelled"] == 4
    truth = list(chosen(16, 1))
    assert shown(rows, "question", "choices") == [row[:2] for row in truth]
    assert all(row["choice"] == row["choices"][row["label"]] for row in rows)
    right = np.mean([row["label"] == y for row, (*_, y) in zip(rows, truth, strict=True)])
    assert report["best"]["scores"] == {"accuracy": right}
    assert "AutoModelForMultipleChoice" in report["card"]


def question_answering(path):
    report, rows = through(path, "question-answering", max_length=12)
    assert report["no_answer"] is False
    truth = list(questions(12, 1))
    assert shown(rows, "id", "question", "context") == [row[:3] for row in truth]
    assert all(row["text"] and row["text"] in row["context"] for row in rows)
    scores = report["best"]["scores"]
    gold = [[answer["text"] for answer in answers] for *_, answers in truth]
    assert scores == pytest.approx(squad([row["text"] for row in rows], gold))
    assert "AutoModelForQuestionAnswering" in report["card"]
    student, onnx, said = (path / name for name in ("run/student", "x.onnx", "onnx.json"))
    model = t.AutoModelForQuestionAnswering.from_pretrained(student)
    write_onnx(model, onnx, "start_logits", "end_logits")
    run("evaluate", model=student, data=path / "eval.json", onnx=onnx, out=said, device="cpu")
    found = read_json(said)
    assert {name: found[name] for name in scores} == pytest.approx(scores)


def reranking(path):
    report, rows = through(path, "reranking", finetune=False)
    assert shown(rows, "query", "pos", "neg") == list(queries(12, 1))
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
    pairs = [(rows[0]["query"], text) for text in rows[0]["pos"] + rows[0]["neg"]]
    found = encoder.predict(pairs, activation_fn=torch.nn.Identity())
    assert found.tolist() == pytest.approx(rows[0]["pos_scores"] + rows[0]["neg_scores"], abs=1e-5)
    assert "CrossEncoder" in report["card"]
    # What `predict` writes is a file with a teacher's scores.
    more = {"task": "reranking", "train": path / "told.jsonl", "eval": path / "eval.jsonl",
            "teacher": path / "teacher", "method": "margin_mse", "set": "alpha=0"}  # fmt: skip
    found, terms = first_step(**more, max_length=16)
    said = "\n".join(found.data.corpus.task.describe(found.data.corpus))
    assert "lists of 2 to 4 documents; 12 of 12 training lists have scores" in said
    assert terms.keys() == {"total", "task"}
    for options, words in (
        ({**more, "accumulate": 2}, "--accumulate: a row of --task reranking is a list"),
        ({**more, "task": "classification", "train": path / "a.tsv", "eval": path / "a.tsv",
          "teacher": make_teacher(path / "next")}, "MarginMSE compares scores"),
    ):  # fmt: skip
        (path / "a.tsv").write_text("sentence\tlabel\n" + "good\t1\nbad\t0\n" * 4)
        assert words in run("distill", expect=2, **usual(path, path / "no", **options))
    bare = path / "bare.jsonl"
    bare.write_text(json.dumps({"query": "film", "documents": ["good", "bad film"]}))
    told(path / "run/student", bare, path / "bare.jsonl.jsonl")


def seq2seq(path):
    # T5's first block has parameters that other blocks lack.
    report, rows = through(path, "seq2seq", 16, teacher_layers="1")
    assert list(report["student"]) == ["chrf", "rouge_l", "loss"]
    pairs = [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
    assert shown(rows, "source") == shown(pairs, "source")
    found, true = ([row["target"] for row in table] for table in (rows, pairs))
    said = read_json(path / "scores.json")
    assert said["rouge_l"] == pytest.approx(rouge_l(found, true), rel=1e-12)
    assert said["chrf"] == sacrebleu.corpus_chrf(found, [true]).score and 0 < said["loss"] < 10


def token_classification(path):
    report, rows = through(path, "token-classification", 24)
    assert report["labels"] == ["B-FILM", "B-GOOD", "I-GOOD", "O"]
    train = path / "train.conll"  # whose suffix names the task
    assert load(source(train=train, evals=train)).task.name() == "token-classification"
    truth = list(tagged(24, 1))
    assert shown(rows, "tokens") == [(words,) for words, _ in truth]
    given = [row["labels"] for row in rows], [tags for _, tags in truth]
    expected = dict(zip(("precision", "recall", "f1"), precision_recall_f1(*given), strict=True))
    assert report["student"] == expected
    assert rows[0]["row"] == 3 and "token-classification" in report["card"]


def classification(path):
    """Of labels that are distributions over the classes."""
    teacher = make_teacher(path / "teacher", ["yes", "no"], **STILL)  # in another order
    soft = [{"no": 0.75, "yes": 0.25}, {"yes": 0.9, "no": 0.1}]

    def write(name, labels, rows=24, seed=0):
        rows = ({"sentence": x, "label": labels[y]} for x, y in sentences(rows, seed))
        return write_jsonl(path / name, rows)

    train, evals = (write(f"{i}.jsonl", soft, seed=i) for i in range(2))
    given = {"train": train, "eval": evals, "teacher": teacher}
    report, _ = through(path, "classification", **given, labelled=8, accumulate=2)
    assert report["labels"] == ["yes", "no"] and report["rows"]["unlabelled"] == 16
    # The most probable class is the label of the scores.
    hard, out = write("hard.jsonl", ["no", "yes"], seed=1), path / "hard.json"
    run("evaluate", model=path / "run/student", data=hard, device="cpu", out=out)
    assert read_json(out)["accuracy"] == report["student"]["accuracy"]
    # At the first step: -(.75 log q + .25 log q) of a row, by the teacher's own weights.
    one = write("one.jsonl", soft, rows=2)
    given |= {"student": teacher, "method": "labels", "train": one, "max_length": 16}
    _, terms = first_step(**given)
    q = torch.tensor(shown(told(teacher, one, path / "one.out.jsonl"), "P(no)", "P(yes)"))
    by_hand = -(torch.tensor([[0.75, 0.25], [0.1, 0.9]]) * q.log()).sum(-1).mean()
    assert terms["task"].item() == pytest.approx(by_hand.item(), rel=1e-4)


CHECKS = {
    check.__name__.replace("_", "-"): check
    for check in (causal_lm, chat, classification, embedding, masked_lm, multi_label,
                  multiple_choice, question_answering, reranking, seq2seq, token_classification)
}  # fmt: skip


@pytest.mark.parametrize("task", CHECKS)
def test_every_command_takes_it(tmp_path, task):
    CHECKS[task](tmp_path)
    assert TASKS.keys() <= CHECKS.keys()


def model_of(path, name, rows, length=16, **options):
    """A model of the task, its tokenizer, the task, and the tokens of rows."""
    make, write, kind = TASKS[name]
    folder, task = make(path / "model"), named(name)
    if name == "masked-lm":
        t.BertForMaskedLM(t.BertConfig.from_pretrained(folder)).save_pretrained(folder)
    model = getattr(t, task.head).from_pretrained(folder).eval()
    tokenizer, task = t.AutoTokenizer.from_pretrained(folder), task(**options)
    return model, tokenizer, task, encoded(write(path / f"a.{kind}", rows), task, tokenizer, length)


@pytest.mark.parametrize(("name", "length", "options", "scores"), [
    ("causal-lm", 8, {"separate_documents": False}, {"perplexity": math.exp}),
    ("masked-lm", 12, {}, {"masked_perplexity": math.exp}),
    ("chat", 16, {}, {"loss": float, "perplexity": math.exp}),
    ("seq2seq", 16, {}, {"loss": float}),
])  # fmt: skip
def test_scores_of_tokens_are_the_loss_of_transformers(tmp_path, name, length, options, scores):
    model, tokenizer, task, tokens = model_of(tmp_path, name, 12, length, **options)
    answers, loss = loss_of(task, model, tokenizer, tokens)
    expected = {name: of_loss(loss) for name, of_loss in scores.items()}
    if name == "causal-lm":
        total = loss * sum(len(ids) - 1 for ids in tokens.tokens["input_ids"])
        size = sum(tokens.evaluation_columns["bytes"][:])
        expected["bits_per_byte"] = total / math.log(2) / size
    found = task.scores((*expected,), answers, tokens)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["chat", "seq2seq"])
def test_texts_depend_on_seed_and_row_alone(tmp_path, name):
    model, tokenizer, task, tokens = model_of(tmp_path, name, 6)

    def answers(rows, *generation):
        task = named(name)(generation=Generation(*generation))
        with torch.no_grad():
            return task.answer(model, task.collator(tokenizer)(rows), tokenizer)

    def texts(*given):
        return [answer[at] for answer in answers(*given)]

    rows, at = [*tokens], -1 if name == "chat" else 0
    drawn = texts(rows, 4, 1.0, 0)
    assert drawn == [x for row in rows for x in texts([row], 4, 1.0, 0)] != texts(rows, 4, 1.0, 1)
    assert texts(rows, 4, 1e-6, 0) == texts(rows, 4) == [x for r in rows for x in texts([r], 4)]
    assert max(len(x.split()) for x in drawn) <= 4
    true = tokens.evaluation_columns["answer"] if name == "chat" else tokens.rows.column("label")
    right = [[*answer] for answer in answers(rows, 4)]
    for answer, text in zip(right, true, strict=True):
        answer[at] = text
    found = task.scores((), right, tokens)
    assert found["rouge_l"] == 1 and found.get("chrf", 100) == pytest.approx(100)
