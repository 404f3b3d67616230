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
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from fastkd.train import tasks
from fastkd.train.data import load, read_file
from fastkd.train.errors import InputError
from fastkd.train.models import make_method
from fastkd.train.saving import read_json
from fastkd.train.settings import Source
from fastkd.train.tasks.embedding import TASK, agreement
from tests.support.tiny import make_teacher, run, sentences
from tests.train.tasks.through import killed_and_resumed, through

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


def test_a_run_goes_on_to_the_same_bits(tmp_path):
    teacher = make_embedder(tmp_path / "teacher")
    train, evals = (write_texts(tmp_path / f"{i}.txt", 20, i) for i in range(2))
    killed_and_resumed(tmp_path, teacher, train, evals, task="embedding", method="lrkd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("page")
    make_embedder(path / "embedder", ("cls", "mean"), normalize=False)
    write_texts(path / "texts.txt", 24)
    write_texts(path / "held-out.txt", 16, seed=1)
    return path


def test_the_pages_command_agrees_with_the_teacher_without_labels(folder, monkeypatch):
    found = re.search(r"fastkd (distill --task embedding.*?)\n```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    few = ("--epochs", 2, "--batch-size", 8, "--device", "cpu", "--max-length", 16)
    run(*shlex.split(found[1].replace("\\\n", " ")), *few)
    report = read_json(folder / "runs/embedder/student/fastkd.json")
    assert report["teacher"] == {"agreement": pytest.approx(1), "overlap": 1}
    texts = (folder / "held-out.txt").read_text().splitlines()
    models = {"teacher": "embedder", "student": "runs/embedder/student"}
    both = {
        name: SentenceTransformer(str(folder / at)).encode(texts) for name, at in models.items()
    }
    assert both["student"].shape == (16, 32)
    cosines = {name: cosine(x) for name, x in both.items()}
    above = np.triu_indices(16, 1)
    expected = pearsonr(cosines["student"][above], cosines["teacher"][above])[0]
    assert report["student"]["agreement"] == pytest.approx(expected, abs=1e-4)
    losses = [entry["losses"]["loss"] for entry in report["history"]]
    assert losses[-1] < losses[0]


def cosine(x):
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit @ unit.T


def test_a_narrower_student_of_other_weights(folder, tmp_path):
    sizes = "hidden_size=8,num_attention_heads=2,intermediate_size=16"
    where = {"train": folder / "texts.txt", "eval": folder / "held-out.txt", "out": tmp_path / "o"}
    few = {"epochs": 1, "batch_size": 8, "device": "cpu", "max_length": 16}
    run("distill", task="embedding", teacher=folder / "embedder", student_config=sizes,
        **where, **few)  # fmt: skip
    model = SentenceTransformer(str(tmp_path / "o/student"))
    assert model.encode("a good film").shape == (16,)
    assert 0 < read_json(tmp_path / "o/student/fastkd.json")["student"]["overlap"] <= 1


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
    assert tasks.of_model(None, None, ["BertForTokenClassification"]).name() == (
        "token-classification"
    )
    assert tasks.of_model(None, None, ["BertModel"]) is tasks.named(None)


@pytest.mark.parametrize("method", ["fcd", "lrc_bert", "mc3kd", "lrkd", "tinybert"])
def test_a_method_leaves_its_terms_on_logits_out(method):
    made = make_method(method, {}, "paper", headless=True)
    weights = made.weights(1.0)
    assert not any(weights.get(name) for name in made.logit_terms) and any(weights.values())


def test_columns_are_found_by_their_usual_names(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "score": 3}\n')
    rows = read_file(tmp_path / "a.jsonl", TASK.columns, "--train", task=TASK)
    assert list(rows.columns("text", "pair", "label")) == [("a", "b", 3.0)]
    write_texts(tmp_path / "b.txt", 2)
    rows = read_file(tmp_path / "b.txt", TASK.columns, "--train", task=TASK)
    assert {(pair, label) for pair, label in rows.columns("pair", "label")} == {(None, None)}


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ('{"words": "a"}', {}, "which column is the text"),
        ('{"text": 3}', {}, "row 1: column 'text' is not text but 3"),
        ('{"sentence1": "a", "sentence2": " "}', {}, "row 1: column 'sentence1' is empty"),
        ('{"sentence1": "a", "sentence2": "b", "score": "x"}', {}, "score 'x' is not a finite"),
        ('{"sentence1": "a", "sentence2": "b", "score": NaN}', {}, "score nan is not a finite"),
        ('{"text": "a", "s": 1}', {"label_column": "s"}, "--text-pair-column says where"),
        ('{"text": "a"}', {"metric": "spearman"}, "--metric spearman: .* have no scores"),
        ('{"text": "a"}', {"unlabelled": True}, "--unlabelled: the rows of --task embedding"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, text, given, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{text}\n")
    given = {name: path if value is True else value for name, value in given.items()}
    with pytest.raises(InputError, match=words):
        load(Source(task="embedding", train=path, evals=path, **given))


def test_what_it_cannot_do_is_said_before_anything_is_trained(folder, tmp_path):
    where = {"train": folder / "texts.txt", "eval": folder / "held-out.txt"}
    few = {"task": "embedding", "device": "cpu", "max_length": 16}
    teacher = folder / "embedder"

    def told(command="distill", **options):
        return run(command, expect=2, **options)

    out = tmp_path / "out"
    assert "--finetune-teacher: the rows of --task embedding" in told(
        **where, **few, teacher=teacher, finetune_teacher=1, out=out
    )
    body = folder / "embedder-body"
    assert "it has no modules.json" in told(**where, **few, teacher=body, out=out)
    assert "soft" in told(**where, **few, teacher=teacher, method="soft_targets", out=out)
    write_texts(tmp_path / "few.txt", 5)
    short = {**where, "eval": tmp_path / "few.txt"}
    assert "5 texts, and agreement, overlap need at least 12" in told(
        **short, **few, teacher=teacher, out=tmp_path / "short"
    )
    run("cache", **where, **few, teacher=teacher, method="fcd", out=tmp_path / "cache")
    assert "with which agreement compares; pass --teacher" in told(
        **where, **few, teacher_cache=tmp_path / "cache", method="fcd", out=out
    )
    assert "fastkd exports logits" in told("export", model=teacher, task="embedding")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1"}],
         "its modules are Transformer, Dense"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "puts a prompt"),
        ("modules.json", None, "its modules.json is damaged"),
        ("1_Pooling/config.json", {"pooling_mode": "best"}, "its pooling can't be loaded"),
    ],
)  # fmt: skip
def test_a_folder_that_does_more_is_refused(tmp_path, file, change, words):
    path = make_embedder(tmp_path / "teacher")
    (path / file).write_text("{" if change is None else json.dumps(change))
    config = torch.nn.Module()
    config.name_or_path = str(path)
    with pytest.raises(InputError, match=words):
        TASK.of(config)
