"""Sentence embeddings: rows, scores, folders of sentence-transformers, and every command."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import (
    InformationRetrievalEvaluator,
    TripletEvaluator,
)
from transformers import AutoConfig, BertConfig

from fastkd.train import tasks
from fastkd.train.errors import InputError
from fastkd.train.models import make_method
from fastkd.train.saving import read_json
from fastkd.train.tasks.embedding import TASK
from tests.support.runs import first_step
from tests.support.tiny import run, usual
from tests.train.tasks.through import (
    make_body,
    make_embedder,
    told,
    vectors_of,
    verified,
    write_lines,
    write_triples,
)

PAGE = Path(__file__).parents[3] / "docs" / "distill.md"


def agreement_of(*models, texts):
    """Correlation of the cosines of all pairs of texts, by two models."""
    above = np.triu_indices(len(texts), 1)
    found = (x / np.linalg.norm(x, axis=1)[:, None] for x in vectors_of(*models, texts=texts))
    one, other = ((x @ x.T)[above] for x in found)
    return pytest.approx(pearsonr(one, other)[0], abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and files of the page, and a body with its words in pieces."""
    path = tmp_path_factory.mktemp("page")
    make_embedder(path / "embedder")
    write_triples(path / "queries.jsonl")
    write_lines(path / "texts.txt", 24)
    write_lines(path / "held-out.txt", 16, seed=1)
    make_body(path / "body")
    return path


@pytest.fixture
def options(folder, tmp_path):
    """Options of a student with the teacher's words, some of them split into pieces."""
    names = {"teacher": "embedder", "train": "texts.txt", "eval": "held-out.txt", "student": "body"}
    given = {name: folder / file for name, file in names.items()}
    given |= {"task": "embedding", "method": "embeddings"}
    return usual(folder, tmp_path, **given)


def test_the_page_goes_from_nothing_to_a_folder(folder, monkeypatch):
    """Scores of triples and queries are sentence-transformers' own, of the saved folder."""
    pattern = r"```sh\n(fastkd distill --task embedding.*?)```"
    found = re.search(pattern, PAGE.read_text(), re.DOTALL)
    lines = found[1].replace("\\\n", " ").splitlines()
    distil, evaluate = (shlex.split(line)[1:] for line in lines)
    monkeypatch.chdir(folder)
    few = {"epochs": 2, "batch_size": 8, "device": "cpu", "max_length": 16, "learning_rate": 0.01}
    run(*distil, **few)
    student = folder / "runs/embedder/student"
    report = read_json(student / "fastkd.json")
    assert report["teacher"] == {"agreement": pytest.approx(1), "overlap": 1}
    texts = (folder / "held-out.txt").read_text().splitlines()
    expected = agreement_of(student, folder / "embedder", texts=texts)
    assert report["student"]["agreement"] == expected
    losses = [entry["losses"]["loss"] for entry in report["history"]]
    assert losses[-1] < losses[0]
    assert "14 rows:  accuracy" in run(*evaluate, "--device", "cpu", "--out", "a.json")
    model, scores = SentenceTransformer(str(student)), read_json(folder / "a.json")
    rows = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    expected = TripletEvaluator(*columns.values())(model)["cosine_accuracy"]
    assert scores["accuracy"] == pytest.approx(expected)
    queries = {text: text for text in columns["anchor"]}
    documents = {text: text for text in (*columns["positive"], *columns["negative"])}
    relevant = {text: set() for text in queries}
    for row in rows:
        relevant[row["anchor"]].add(row["positive"])
    ranking = InformationRetrievalEvaluator(queries, documents, relevant)(model)
    for name in ("ndcg@10", "recall@10"):
        assert 0 < scores[name] < 1
        assert scores[name] == pytest.approx(ranking[f"cosine_{name}"], abs=1e-6)


def test_terms_of_triples(options, tmp_path):
    """Of a student with another body and tokenizer, as in test_every_task.py."""
    options |= {"train": write_triples(tmp_path / "a.jsonl"), "set": "relations=1"}
    assert set(first_step(**options)[1]) == {"total", "contrast", "samples"}
    left = {"out", "epochs", "batch_size", "learning_rate"}
    verified(**{name: x for name, x in options.items() if name not in left})


def test_a_student_reads_and_compares_as_its_teacher_does(tmp_path):
    """The student's folder keeps the teacher's similarity function and maximum length."""
    teacher, body = make_embedder(tmp_path / "a", normalize=False), tmp_path / "a-body"
    using = teacher / "config_sentence_transformers.json"
    using.write_text(json.dumps({**read_json(using), "similarity_fn_name": "dot"}))
    config = AutoConfig.from_pretrained(teacher)
    (teacher / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    TASK.of(config).save(body, config)
    names = [SentenceTransformer(str(path)).similarity_fn_name for path in (teacher, body)]
    assert names == ["dot", "dot"]
    texts, data = ["good film", "a", "the film is very very very very bad"], tmp_path / "a.txt"
    found, expected = vectors_of(teacher, body, texts=texts)
    np.testing.assert_array_equal(found, expected)
    data.write_text("\n".join(texts))
    rows = told(teacher, data, tmp_path / "a.jsonl", task="embedding")
    np.testing.assert_allclose([row["embedding"] for row in rows], expected, atol=1e-6)


def test_a_head_says_which_task_it_is_of_and_terms_on_logits_are_left_out():
    for head, expected in (("ForTokenClassification", "token-classification"), ("Model", None)):
        config = BertConfig(architectures=[f"Bert{head}"])
        assert tasks.of_model("--model x", None, None, config) is tasks.named(expected)
    for method in ("fcd", "lrc_bert", "mc3kd", "lrkd", "tinybert"):
        made = make_method(method, {}, "paper", headless=True)
        weights = made.weights(1.0)
        assert not any(weights.get(name) for name in made.logit_terms) and any(weights.values())


def test_what_it_cannot_do_is_said_before_anything_is_trained(options, folder, tmp_path):
    cached = ("task", "teacher", "train", "eval", "max_length", "device")
    cache = {name: options[name] for name in cached}
    run("cache", **cache, method="fcd", out=tmp_path / "cache")
    same = {"student": None, "method": "fcd"}
    few = write_lines(tmp_path / "few.txt", 5)
    for number, (given, words) in enumerate((
        ({**same, "finetune_teacher": 1}, "--finetune-teacher: the rows of --task embedding"),
        ({**same, "teacher": folder / "embedder-body"}, "it has no modules.json"),
        ({**same, "method": "soft_targets"}, "soft"),
        ({**same, "eval": few}, "5 texts, and agreement, overlap need at least 12"),
        ({**same, "teacher": None, "teacher_cache": tmp_path / "cache"},
         "which agreement compares; pass --teacher"),
        ({"method": "fcd"}, "--method fcd compares tokens, and the student"),
        ({"set": "cosine=1"}, "have 8 dimensions, the teacher's 16"),
        ({"teacher": make_embedder(tmp_path / "max", "max")},
         "--method embeddings: pooling must be one of 'mean', 'cls', got 'max'"),
    )):  # fmt: skip
        out = tmp_path / f"out{number}"
        assert words in run("distill", **{**options, "out": out, **given}, expect=2)


@pytest.mark.parametrize(("file", "change", "words"), [
    ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1"}],
     "its modules are Transformer, Dense"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ("config_sentence_transformers.json", {"prompts": {"query": "q: "}}, "adds prompts"),
    ("config_sentence_transformers.json", {"truncate_dim": 8}, "to truncate_dim 8, which"),
    ("modules.json", None, "its modules.json is damaged"),
    ("1_Pooling/config.json", {"pooling_mode": "best"}, "its pooling can't be loaded"),
])  # fmt: skip
def test_a_folder_that_does_more_is_refused(folder, tmp_path, file, change, words):
    path = shutil.copytree(folder / "embedder", tmp_path / "teacher")
    (path / file).write_text("{" if change is None else json.dumps(change))
    config = torch.nn.Module()
    config.name_or_path = str(path)
    with pytest.raises(InputError, match=words):
        TASK.of(config)
