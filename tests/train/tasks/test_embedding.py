"""Sentence embeddings: scores, folders of sentence-transformers, and what is refused."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import evaluation
from transformers import AutoConfig, BertConfig

from fastkd.train import tasks
from fastkd.train.errors import InputError
from fastkd.train.models import make_method
from fastkd.train.saving import read_json
from fastkd.train.tasks.embedding import TASK, agreement
from tests.support.runs import first_step
from tests.support.tiny import run, usual
from tests.train.tasks.through import drawn, make_body, make_embedder, told, vectors_of, write_rows

PAGE = Path(__file__).parents[3] / "docs" / "distill.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and files of the page, and a body with its words in pieces."""
    path = tmp_path_factory.mktemp("page")
    make_embedder(path / "embedder")
    write_rows("triples", path / "queries.jsonl", 14)
    write_rows("text", path / "texts.txt", 24)
    write_rows("text", path / "held-out.txt", 16, seed=1)
    make_body(path / "body")
    return path


def test_the_page_goes_from_nothing_to_a_folder(folder, monkeypatch):
    """Scores of triples and queries are sentence-transformers' own, of the saved folder."""
    pattern = r"```sh\n(fastkd distill --task embedding.*?)```"
    found = re.search(pattern, PAGE.read_text(), re.DOTALL)
    distil, evaluate = (shlex.split(x)[1:] for x in found[1].replace("\\\n", " ").splitlines())
    monkeypatch.chdir(folder)
    few = {"epochs": 2, "batch_size": 8, "device": "cpu", "max_length": 16, "learning_rate": 0.01}
    run(*distil, **few)
    student = folder / "runs/embedder/student"
    report = read_json(student / "fastkd.json")
    assert report["teacher"] == {"agreement": pytest.approx(1), "overlap": 1}
    texts = [row["text"] for row in drawn("text", 16, 1)]
    expected, _ = agreement(*vectors_of(student, folder / "embedder", texts=texts))
    assert report["student"]["agreement"] == pytest.approx(expected, abs=1e-4)
    losses = [entry["losses"]["loss"] for entry in report["history"]]
    assert losses[-1] < losses[0]
    assert "14 rows:  accuracy" in run(*evaluate, "--device", "cpu", "--out", "a.json")
    model, scores = SentenceTransformer(str(student)), read_json(folder / "a.json")
    queries, answers, others = zip(*(row.values() for row in drawn("triples", 14)), strict=True)
    expected = evaluation.TripletEvaluator(queries, answers, others)(model)["cosine_accuracy"]
    assert scores["accuracy"] == pytest.approx(expected)
    relevant = {text: set() for text in queries}
    for query, answer in zip(queries, answers, strict=True):
        relevant[query].add(answer)
    texts = ({text: text for text in some} for some in (queries, answers + others))
    ranking = evaluation.InformationRetrievalEvaluator(*texts, relevant)(model)
    for name in ("ndcg@10", "recall@10"):
        assert 0 < scores[name] < 1
        assert scores[name] == pytest.approx(ranking[f"cosine_{name}"], abs=1e-6)


def test_a_student_reads_and_compares_as_its_teacher_does(tmp_path):
    """The student's folder keeps the teacher's similarity function and maximum length."""
    teacher, body = make_embedder(tmp_path / "a", normalize=False), tmp_path / "a-body"
    using = teacher / "config_sentence_transformers.json"
    using.write_text(json.dumps({**read_json(using), "similarity_fn_name": "dot"}))
    config = AutoConfig.from_pretrained(teacher)
    (teacher / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    TASK.of(config).save(body, config)
    assert {SentenceTransformer(str(x)).similarity_fn_name for x in (teacher, body)} == {"dot"}
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
        assert {name for name, x in made.weights(1.0).items() if x} - {*made.logit_terms}
        assert not any(made.weights(1.0).get(name) for name in made.logit_terms)


def test_terms_of_triples_and_what_is_refused_before_anything_is_trained(folder, tmp_path):
    """By a student with the teacher's words, some of them split into pieces."""
    names = {"teacher": "embedder", "train": "texts.txt", "eval": "held-out.txt", "student": "body"}
    given = {name: folder / file for name, file in names.items()}
    options = usual(folder, tmp_path, **given, task="embedding", method="embeddings")
    triples = {"train": folder / "queries.jsonl", "set": "relations=1"}
    assert set(first_step(**options | triples)[1]) == {"total", "contrast", "samples"}
    same, cache = {"student": None, "method": "fcd"}, tmp_path / "cache"
    left = dict.fromkeys(("epochs", "batch_size", "learning_rate"))
    run("cache", **options | same | left | {"out": cache})
    for given, words in (
        ({**same, "finetune_teacher": 1}, "--finetune-teacher: the rows of --task embedding"),
        ({**same, "teacher": folder / "embedder-body"}, "it has no modules.json"),
        ({**same, "method": "soft_targets"}, "soft"),
        ({**same, "eval": write_rows("text", tmp_path / "few.txt", 5)},
         "5 texts, and agreement, overlap need at least 12"),
        ({**same, "teacher": None, "teacher_cache": cache},
         "which agreement compares; pass --teacher"),
        ({"method": "fcd"}, "--method fcd compares tokens, and the student"),
        ({"set": "cosine=1"}, "have 8 dimensions, the teacher's 16"),
        ({"teacher": make_embedder(tmp_path / "max", "max")},
         "--method embeddings: pooling must be one of 'mean', 'cls', got 'max'"),
    ):  # fmt: skip
        assert words in run("distill", **options | given, overwrite=True, expect=2)


@pytest.mark.parametrize(("file", "change", "words"), [
    ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1"}],
     "its modules are Transformer, Dense"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ("config_sentence_transformers.json", {"prompts": {"query": "q: "}}, "adds prompts"),
    ("config_sentence_transformers.json", {"truncate_dim": 8}, "to truncate_dim 8, which"),
    ("modules.json", "{", "its modules.json is damaged"),
    ("1_Pooling/config.json", {"pooling_mode": "best"}, "its pooling can't be loaded"),
])  # fmt: skip
def test_a_folder_that_does_more_is_refused(folder, tmp_path, file, change, words):
    path = shutil.copytree(folder / "embedder", tmp_path / "teacher")
    (path / file).write_text(change if isinstance(change, str) else json.dumps(change))
    config = torch.nn.Module()
    config.name_or_path = str(path)
    with pytest.raises(InputError, match=words):
        TASK.of(config)
