"""Tags of words: reading, scores, and every command."""

import random

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastkd.train.data import read_file, read_hub
from fastkd.train.encoding import Encoder
from fastkd.train.entities import precision_recall_f1
from fastkd.train.errors import InputError
from fastkd.train.evaluation import score
from fastkd.train.tasks.token_classification import TASK
from tests.support.tiny import WORDS, make_teacher
from tests.train.tasks.through import refused, through

TAG = {"film": "B-FILM", "good": "B-GOOD", "very": "I-GOOD"}


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


def test_every_command_takes_it(tmp_path):
    teacher = make_teacher(tmp_path / "bert", layers=2, head=False)
    train, evals = (write_conll(tmp_path / f"{i}.conll", 24, i) for i in range(2))
    report = through(tmp_path, teacher, train, evals)
    assert report["task"] == "token-classification"
    assert report["labels"] == ["B-FILM", "B-GOOD", "I-GOOD", "O"]
    assert set(report["student"]) == {"f1", "precision", "recall"}
    told = report["told"]
    truth = list(tagged(24, 1))
    assert [row["tokens"] for row in told] == [words for words, _ in truth]
    given = [row["labels"] for row in told], [tags for _, tags in truth]
    precision, recall, f1 = precision_recall_f1(*given)
    assert report["student"] == {"f1": f1, "precision": precision, "recall": recall}
    assert told[0]["row"] == 3
    assert "token-classification" in (tmp_path / "run/student/README.md").read_text()


def test_the_first_piece_of_a_word_has_its_label(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_teacher(tmp_path / "bert", head=False))
    path = tmp_path / "a.conll"
    path.write_text("good-film B-GOOD\nis O\n")
    rows = read_file(path, TASK.columns, "--train", task=TASK)
    encoded = Encoder(tokenizer, 16, TASK(("B-GOOD", "O")))(rows)
    # [CLS] good - film is [SEP]
    assert encoded[0]["labels"] == [-100, 0, -100, -100, 1, -100]
    assert encoded.evaluation_columns[0]["words"] == [-1, 0, -1, -1, 1, -1]


def test_a_no_break_space_parts_no_word(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("1\u00a0000 B-NUM\n\u00a0\tO\n", encoding="utf-8")
    with pytest.raises(InputError, match="row 1: word 2 is empty"):
        read_file(path, TASK.columns, "--train", task=TASK)
    path.write_text("1\u00a0000 B-NUM\nfilm\tO\n", encoding="utf-8")
    (row,) = read_file(path, TASK.columns, "--train", task=TASK).columns("text", "label")
    assert row == (["1\u00a0000", "film"], ["B-NUM", "O"])


def test_comments_are_no_words(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("# sent_id = 1\n# text = EU\n# NN B-X O\nEU NNP B-NP B-ORG\n\n# newdoc = x\n")
    (row,) = read_file(path, TASK.columns, "--train", task=TASK).columns("text", "label")
    assert row == (["#", "EU"], ["O", "B-ORG"])
    path.write_text("\n# newdoc\n#sent_id = 1\nEU\tB-ORG\n# a note\n#\tO\n#eu\tO\n")
    (row,) = read_file(path, TASK.columns, "--train", task=TASK).columns("number", "text")
    assert row == (4, ["EU", "#", "#eu"])


def test_words_of_a_tokenizer_that_wants_blanks_before_them(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("good B-GOOD\nfilm O\n")
    rows = read_file(path, TASK.columns, "--train", task=TASK)
    encode = {}
    for blank in (False, True):
        made = Tokenizer(models.BPE(byte_letters(), []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, add_prefix_space=blank)
        encode[blank] = Encoder(tokenizer, 16, TASK(("B-GOOD", "O")))
    with pytest.raises(InputError, match="load it with add_prefix_space=True"):
        encode[False](rows)
    assert encode[True](rows)[0]["labels"] == [0, *[-100] * 4, 1, *[-100] * 4]


def byte_letters():
    return {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


@pytest.mark.parametrize(
    ("classes", "scored"),
    [
        (("O", "U-FILM"), ("f1", "precision", "recall")),
        (("L-A", "O"), ("f1", "precision", "recall")),
        (("NOUN", "VERB"), ("accuracy",)),
        (("O", "ORG"), ("accuracy",)),
    ],
)
def test_tags_with_marks_are_scored_as_entities(classes, scored):
    assert TASK(classes).select_metrics(None) == scored
    assert TASK(classes).select_metrics("f1") == ("f1", "precision", "recall")


def test_hidden_labels_of_a_hub_are_no_class(monkeypatch):
    tags = datasets.List(datasets.ClassLabel(names=["O", "B-GOOD"]))
    features = {"tokens": datasets.List(datasets.Value("string")), "labels": tags}
    rows = {"tokens": [["a", "film"], ["good"]], "labels": [[0, 0], [-1]]}
    found = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    with pytest.raises(InputError, match="split test, row 2: no label"):
        read_hub("some/set", None, "test", TASK.columns, "--data", TASK)


def test_words_that_are_cut_off_are_outside(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_teacher(tmp_path / "bert", head=False))
    path = tmp_path / "a.conll"
    path.write_text("good B-GOOD\nfilm B-FILM\nis O\n")
    rows = read_file(path, TASK.columns, "--train", task=TASK)
    task = TASK(("B-FILM", "B-GOOD", "O"))
    encoded = Encoder(tokenizer, 3, task)(rows)
    assert task.predictions([[0, 1, 0]], encoded) == [{"labels": ["B-GOOD", "", ""]}]
    scores = task.scores(("precision", "recall", "f1", "accuracy"), [[0, 1, 0]], encoded)
    assert scores["precision"] == 1 and scores["recall"] == 0.5
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert np.isnan(score(task, ("f1",), [[0, np.nan, 0]], encoded)["f1"])


def test_a_mistake_is_one_sentence(tmp_path):
    for name, text, words in (
        ("a.conll", "good B-GOOD\nfilm\n", "row 2: 1 columns where row 1 has 2"),
        ("a.conll", "EU NNP B-ORG\nrejects VBZ\n", "row 2: 2 columns where row 1 has 3"),
        ("a.conll", "EU NNP B-ORG\n\nrejects VBZ\n", "row 3: 2 columns where row 1 has 3"),
        ("a.conll", "EU B-ORG\n# a comment\n", "row 2: 3 columns where row 1 has 2"),
        ("a.conll", "# text = EU\n1\tEU" + 8 * "\t_" + "\n", "row 2: CoNLL-U"),
        ("a.conll", "good\nfilm\n", "no column 'labels'"),
        ("a.jsonl", '{"tokens": ["a", "b"], "labels": ["O"]}', "row 1: 2 words and 1 tags"),
        ("a.jsonl", '{"tokens": "a b", "labels": ["O"]}', "not a list of words but 'a b'"),
        ("a.jsonl", '{"tokens": ["a", " "], "labels": ["O", "O"]}', "row 1: word 2 is empty"),
        ("a.jsonl", '{"tokens": [], "labels": []}', "row 1: column 'tokens' is empty"),
        ("a.jsonl", '{"tokens": ["a"], "labels": ["O"]}', "the only tag is 'O'"),
    ):
        refused(tmp_path, "token-classification", text, words, name)
