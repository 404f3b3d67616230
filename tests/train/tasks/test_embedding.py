"""Sentence embeddings: rows, scores, folders of sentence-transformers, and every command."""

import json
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import (
    InformationRetrievalEvaluator,
    TripletEvaluator,
)
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoConfig, BertConfig

from fastkd.train import tasks
from fastkd.train.data import load
from fastkd.train.errors import InputError
from fastkd.train.models import make_method
from fastkd.train.saving import read_json
from fastkd.train.tasks.embedding import TASK, agreement
from tests.cli.launched import Launch, commands
from tests.support.tiny import WORDS, make_teacher, run, sentences, source, words_of
from tests.train.tasks.through import killed_and_resumed, rows_of, through, verified

PAGE = Path(__file__).parents[3] / "docs" / "distill.md"


def make_embedder(path, pooling="mean", normalize=True, **config):
    """A random BERT in a folder that sentence-transformers wrote."""
    body = make_teacher(path.with_name(f"{path.name}-body"), head=False, **config)
    first = Transformer(str(body))
    modules = [first, Pooling(first.get_embedding_dimension(), pooling)]
    SentenceTransformer(modules=[*modules, *([Normalize()] * normalize)]).save(str(path))
    return path


def write_pairs(path, rows=24, seed=0):
    rng = random.Random(seed)
    texts = [text for text, _ in sentences(2 * rows, seed)]
    lines = [f"{a}\t{b}\t{rng.random():.3f}" for a, b in zip(texts[::2], texts[1::2], strict=True)]
    path.write_text("\n".join(["sentence1\tsentence2\tscore", *lines]) + "\n")
    return path


def write_texts(path, rows=24, seed=0):
    path.write_text("\n".join(text for text, _ in sentences(rows, seed)) + "\n")
    return path


def write_triples(path, rows=14, seed=0):
    names = ("anchor", "positive", "negative")
    texts = [text for text, _ in sentences(3 * rows, seed)]
    triples = [dict(zip(names, texts[i : i + 3], strict=True)) for i in range(0, 3 * rows, 3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in triples))
    return path


def test_every_command_takes_it(tmp_path):
    teacher = make_embedder(tmp_path / "teacher")
    train, evals = (write_pairs(tmp_path / f"{i}.tsv", 24, i) for i in range(2))
    report = through(
        tmp_path, teacher, train, evals, task="embedding", finetune=False, method="fcd"
    )
    assert report["task"] == "embedding" and set(report["student"]) == {"spearman", "pearson"}
    told = report["told"]
    model = SentenceTransformer(str(tmp_path / "run/student"))
    for text, vector in (("text", "embedding"), ("pair", "pair_embedding")):
        expected = model.encode([row[text] for row in told])
        np.testing.assert_allclose([row[vector] for row in told], expected, atol=1e-5)
    scores = [float(line.split("\t")[2]) for line in evals.read_text().splitlines()[1:]]
    cosines = [row["cosine"] for row in told]
    assert report["student"]["spearman"] == pytest.approx(spearmanr(cosines, scores)[0], abs=1e-6)
    assert report["student"]["pearson"] == pytest.approx(pearsonr(cosines, scores)[0], abs=1e-4)
    card = (tmp_path / "run/student/README.md").read_text()
    assert "library_name: sentence-transformers" in card and "SentenceTransformer(" in card


def test_triples_and_queries_through_every_command(tmp_path):
    """Scores are sentence-transformers' own, of the folder that was saved."""
    teacher = make_embedder(tmp_path / "teacher", "cls")
    train, evals = (write_triples(tmp_path / f"{i}.jsonl", 14, i) for i in range(2))
    report = through(
        tmp_path, teacher, train, evals, task="embedding", finetune=False, method="embeddings",
        set="relations=1",
    )  # fmt: skip
    assert set(report["history"][0]["losses"]) == {"loss", "contrast", "samples"}
    model = SentenceTransformer(str(tmp_path / "run/student"))
    rows = [json.loads(line) for line in evals.read_text().splitlines()]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    triplets = TripletEvaluator(*columns.values())(model)
    found = report["student"]
    assert list(found) == ["accuracy", "ndcg@10", "recall@10"]
    assert found["accuracy"] == pytest.approx(triplets["cosine_accuracy"])
    queries = {text: text for text in columns["anchor"]}
    documents = {text: text for text in (*columns["positive"], *columns["negative"])}
    relevant = {text: set() for text in queries}
    for row in rows:
        relevant[row["anchor"]].add(row["positive"])
    ranking = InformationRetrievalEvaluator(queries, documents, relevant)(model)
    for name in ("ndcg@10", "recall@10"):
        assert 0 < found[name] < 1
        assert found[name] == pytest.approx(ranking[f"cosine_{name}"], abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("page")
    make_embedder(path / "embedder")
    write_triples(path / "queries.jsonl")
    write_texts(path / "texts.txt", 24)
    write_texts(path / "held-out.txt", 16, seed=1)
    return path


def test_the_page_goes_from_nothing_to_a_folder(folder, monkeypatch):
    pattern = r"```sh\n(fastkd distill --task embedding.*?)```"
    found = re.search(pattern, PAGE.read_text(), re.DOTALL)
    lines = found[1].replace("\\\n", " ").splitlines()
    distil, evaluate = (shlex.split(line)[1:] for line in lines)
    monkeypatch.chdir(folder)
    few = {"epochs": 2, "batch_size": 8, "device": "cpu", "max_length": 16, "learning_rate": 0.01}
    run(*distil, **few)
    report = read_json(folder / "runs/embedder/student/fastkd.json")
    assert report["teacher"] == {"agreement": pytest.approx(1), "overlap": 1}
    texts = (folder / "held-out.txt").read_text().splitlines()
    models = [folder / at for at in ("runs/embedder/student", "embedder")]
    both = [SentenceTransformer(str(path)).encode(texts) for path in models]
    assert both[0].shape == (16, 16)
    expected = pearsonr(*(cosine(x)[np.triu_indices(16, 1)] for x in both))[0]
    assert report["student"]["agreement"] == pytest.approx(expected, abs=1e-4)
    losses = [entry["losses"]["loss"] for entry in report["history"]]
    assert losses[-1] < losses[0]
    assert "14 rows:  accuracy" in run(*evaluate, "--device", "cpu")


def cosine(x):
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit @ unit.T


@pytest.fixture(scope="module")
def other_body(tmp_path_factory):
    """Options for a student with the teacher's words, some of them split into pieces."""
    path = tmp_path_factory.mktemp("body")
    words = ["go", "##od", "fine", "nice", "b", "##ad", "poor", "du", "##ll", *WORDS[6:]]
    sizes = {"hidden_size": 8, "intermediate_size": 16, "layers": 2, "longest": 24}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    make_embedder(path / "teacher")
    return {
        "task": "embedding", "teacher": path / "teacher", "train": write_texts(path / "a.txt", 22),
        "student": make_teacher(path / "body", head=False, words=words, **sizes, **still),
        "eval": write_texts(path / "b.txt", 13, seed=1), "method": "embeddings", "max_length": 16,
        "device": "cpu",
    }  # fmt: skip


def test_a_student_of_another_body_and_tokenizer(other_body, tmp_path):
    given = dict(other_body)
    teacher, train, evals = (given.pop(name) for name in ("teacher", "train", "eval"))
    killed_and_resumed(tmp_path, teacher, train, evals, **given, learning_rate=0.01)
    model = SentenceTransformer(str(tmp_path / "whole/student"))
    assert model.max_seq_length == 24 and "##od" in model.tokenizer.get_vocab()
    texts = evals.read_text().splitlines()
    both = [one.encode(texts) for one in (model, SentenceTransformer(str(teacher)))]
    assert both[0].shape == (13, 8)
    report = read_json(tmp_path / "whole/student/fastkd.json")
    assert report["teacher"] == {"agreement": pytest.approx(1), "overlap": 1}
    expected = pearsonr(*(cosine(x)[np.triu_indices(13, 1)] for x in both))[0]
    assert report["student"]["agreement"] == pytest.approx(expected, abs=1e-4)
    losses = [entry["losses"]["contrast"] for entry in report["history"]]
    assert losses[-1] < losses[0]
    verified(**other_body)


def test_two_processes_train_the_student_of_one(other_body, tmp_path):
    few = {**other_body, "epochs": 1, "set": "relations=1", "gather": True}
    run("distill", **few, batch_size=8, out=tmp_path / "one")
    lines = {"two": words_of("distill", **few, batch_size=4, out=tmp_path / "two")}
    launch = Launch(tmp_path / "launch", 2, commands, tmp_path, lines)
    errors = launch.end()
    assert launch.process.exitcode == 0, errors
    reports = [read_json(tmp_path / name / "student/fastkd.json") for name in ("one", "two")]
    one, two = (report["history"][0] for report in reports)
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
    assert one["scores"] == pytest.approx(two["scores"], rel=1e-4)


def test_other_tokens_are_compared_by_texts_alone(other_body, tmp_path):
    cases = [
        ({"method": "fcd"}, "--method fcd compares tokens, and the student"),
        ({"set": "cosine=1"}, "have 8 dimensions, the teacher's 16"),
    ]
    for pooling in ("max", "lasttoken"):
        teacher = make_embedder(tmp_path / pooling, pooling)
        words = f"--method embeddings: pooling must be one of 'mean', 'cls', got '{pooling}'"
        cases.append(({"teacher": teacher}, words))
    for options, words in cases:
        options = {**other_body, **options, "out": tmp_path / "out"}
        assert words in run("distill", **options, expect=2)


def test_a_student_reads_and_compares_as_its_teacher_does(tmp_path):
    """The student's folder keeps the teacher's similarity function and maximum length."""
    teacher, body = make_embedder(tmp_path / "a", normalize=False), tmp_path / "a-body"
    using = teacher / "config_sentence_transformers.json"
    using.write_text(json.dumps({**read_json(using), "similarity_fn_name": "dot"}))
    config = AutoConfig.from_pretrained(teacher)
    (teacher / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    TASK.of(config).save(body, config)
    both = [SentenceTransformer(str(path)) for path in (teacher, body)]
    assert [model.similarity_fn_name for model in both] == ["dot", "dot"]
    texts, out = ["good film", "a", "the film is very very very very bad"], tmp_path / "a.json"
    found, expected = (model.encode(texts) for model in both)
    np.testing.assert_array_equal(found, expected)
    data = tmp_path / "a.txt"
    data.write_text("\n".join(texts))
    run("predict", model=teacher, data=data, task="embedding", out=out)
    np.testing.assert_allclose([row["embedding"] for row in read_json(out)], expected, atol=1e-6)


def test_agreement_is_that_of_all_pairs_and_of_ten_neighbours():
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(300, 6)) + 3
    student = (teacher @ rng.normal(size=(6, 4)) + rng.normal(size=(300, 4))).astype(np.float32)
    pearson, overlap = agreement(student, teacher)
    s, t = cosine(student.astype(np.float64)), cosine(teacher)
    above = np.triu_indices(300, 1)
    assert pearson == pytest.approx(pearsonr(s[above], t[above])[0], abs=1e-9)
    nearest = []
    for x in (s, t):
        np.fill_diagonal(x, -2)
        nearest.append([set(row) for row in np.argsort(-x, axis=1)[:, :10]])
    shared = [len(a & b) / 10 for a, b in zip(*nearest, strict=True)]
    assert overlap == pytest.approx(np.mean(shared))
    assert agreement(teacher @ np.linalg.qr(rng.normal(size=(6, 6)))[0], teacher) == (
        pytest.approx(1), 1,
    )  # fmt: skip
    assert agreement(np.ones((12, 3)), teacher[:12])[0] == 0


def test_a_head_says_which_task_it_is_of_and_none_says_nothing():
    for head, expected in (("ForTokenClassification", "token-classification"), ("Model", None)):
        config = BertConfig(architectures=[f"Bert{head}"])
        assert tasks.of_model("--model x", None, None, config) is tasks.named(expected)


@pytest.mark.parametrize("method", ["fcd", "lrc_bert", "mc3kd", "lrkd", "tinybert"])
def test_a_method_leaves_its_terms_on_logits_out(method):
    made = make_method(method, {}, "paper", headless=True)
    weights = made.weights(1.0)
    assert not any(weights.get(name) for name in made.logit_terms) and any(weights.values())


def test_columns_are_found_by_their_usual_names(tmp_path):
    one = '{"query": "a", "passage": "b", "negatives": ["c"]}'
    other = '{"query": "a", "passage": "d"}'
    for name, text, columns, rows in (
        ("a.jsonl", '{"sentence1": "a", "sentence2": "b", "score": 3}', ("text", "pair", "label"),
         [("a", "b", 3.0)]),
        ("a.csv", "anchor,positive,negative_1,negative_2\na,b,c,d\n",
         ("text", "pair", "negatives", "label"), [("a", "b", ["c", "d"], None)]),
        ("b.jsonl", f"{one}\n{other}\n", ("pair", "negatives"), [("b", ["c"]), ("d", [])]),
        ("c.jsonl", f"{other}\n{one}\n", ("pair", "negatives"), [("d", []), ("b", ["c"])]),
        ("b.txt", "good film\nbad film\n", ("pair", "label"), [(None, None)] * 2),
    ):  # fmt: skip
        assert list(rows_of(tmp_path / name, TASK, text).columns(*columns)) == rows


@pytest.mark.parametrize(("text", "given", "words"), [
    ('{"words": "a"}', {}, "which columns are the texts"),
    ('{"query": "a", "pos": "b"}', {}, "query or anchor with positive or .* known: query, pos"),
    ('{"anchor": "a", "positive": ["b"]}', {}, "row 1: column 'positive' is not text but"),
    ('{"query": "a", "positive": "b", "negatives": "c d"}', {"metric": "pearson"}, "no scores"),
    ('{"query": "a", "positive": "b", "negatives": [3]}', {}, "row 1: column 'negatives' is"),
    ('{"query": "a", "positive": "b", "negative": ""}', {}, "row 1: column 'negative' is empt"),
    ('{"query": "a", "positive": "b"}', {"metric": "accuracy"}, "no columns anchor, positive"),
    ('{"text": "a"}', {"metric": "ndcg@10"}, "have no columns query and positive"),
    ('{"text": 3}', {}, "row 1: column 'text' is not text but 3"),
    ('{"sentence1": "a", "sentence2": " "}', {}, "row 1: column 'sentence2' is empty"),
    ('{"sentence1": "a", "sentence2": "b", "score": "x"}', {}, "score 'x' is not a finite"),
    ('{"sentence1": "a", "sentence2": "b", "score": NaN}', {}, "score nan is not a finite"),
    ('{"text": "a", "s": 1}', {"label_column": "s"}, "pass --text-pair-column"),
    ('{"text": "a"}', {"metric": "spearman"}, "--metric spearman: .* have no scores"),
    ('{"text": "a"}', {"unlabelled": True}, "--unlabelled: rows of --task embedding"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(tmp_path, text, given, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{text}\n")
    given = {name: path if value is True else value for name, value in given.items()}
    with pytest.raises(InputError, match=words):
        load(source(task="embedding", train=path, evals=path, **given))


def test_what_it_cannot_do_is_said_before_anything_is_trained(folder, tmp_path):
    given = {
        "task": "embedding", "train": folder / "texts.txt", "eval": folder / "held-out.txt",
        "teacher": folder / "embedder", "method": "fcd", "device": "cpu", "max_length": 16,
    }  # fmt: skip
    few, cache = write_texts(tmp_path / "few.txt", 5), tmp_path / "cache"
    run("cache", **given, out=cache)
    cases = (
        ({"finetune_teacher": 1}, "--finetune-teacher: the rows of --task embedding"),
        ({"teacher": folder / "embedder-body"}, "it has no modules.json"),
        ({"method": "soft_targets"}, "soft"),
        ({"eval": few}, "5 texts, and agreement, overlap need at least 12"),
        ({"teacher": None, "teacher_cache": cache}, "which agreement compares; pass --teacher"),
    )
    for number, (options, words) in enumerate(cases):
        out = tmp_path / f"out{number}"
        assert words in run("distill", **{**given, **options}, out=out, expect=2)


@pytest.mark.parametrize(("file", "change", "words"), [
    ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1"}],
     "its modules are Transformer, Dense"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ("config_sentence_transformers.json", {"prompts": {"query": "q: "}}, "adds prompts"),
    ("config_sentence_transformers.json", {"truncate_dim": 8}, "to truncate_dim 8, which"),
    ("modules.json", None, "its modules.json is damaged"),
    ("1_Pooling/config.json", {"pooling_mode": "best"}, "its pooling can't be loaded"),
])  # fmt: skip
def test_a_folder_that_does_more_is_refused(tmp_path, file, change, words):
    path = make_embedder(tmp_path / "teacher")
    (path / file).write_text("{" if change is None else json.dumps(change))
    config = torch.nn.Module()
    config.name_or_path = str(path)
    with pytest.raises(InputError, match=words):
        TASK.of(config)
