"""Tags of words: reading, scores, and every command."""

import random

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastkd.train.data import Encoder, read_hub
from fastkd.train.errors import InputError
from fastkd.train.evaluation import score
from fastkd.train.tasks.token_classification import TASK, precision_recall_f1
from tests.support.tiny import WORDS, make_teacher
from tests.train.tasks.through import refused, rows_of, through

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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    teacher = make_teacher(tmp_path_factory.mktemp("tags") / "bert", head=False)
    return AutoTokenizer.from_pretrained(teacher)


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


def test_the_first_piece_of_a_word_has_its_label(tmp_path, tokenizer):
    rows = rows_of(tmp_path / "a.conll", TASK, "good-film B-GOOD\nis O\n")
    encoded = Encoder(tokenizer, 16, TASK(("B-GOOD", "O")))(rows)
    # [CLS] good - film is [SEP]
    assert encoded[0]["labels"] == [-100, 0, -100, -100, 1, -100]
    assert encoded.evaluation_columns[0]["words"] == [-1, 0, -1, -1, 1, -1]


def test_no_break_spaces_and_comments(tmp_path):
    """The first parts no word, and the second are none."""
    path = tmp_path / "a.conll"
    with pytest.raises(InputError, match="row 1: word 2 is empty"):
        rows_of(path, TASK, "1\u00a0000 B-NUM\n\u00a0\tO\n")
    for text, names, expected in (
        ("1\u00a0000 B-NUM\nfilm\tO\n", ("text", "label"),
         (["1\u00a0000", "film"], ["B-NUM", "O"])),
        ("# sent_id = 1\n# text = EU\n# NN B-X O\nEU NNP B-NP B-ORG\n\n# newdoc = x\n",
         ("text", "label"), (["#", "EU"], ["O", "B-ORG"])),
        ("\n# newdoc\n#sent_id = 1\nEU\tB-ORG\n# a note\n#\tO\n#eu\tO\n", ("number", "text"),
         (4, ["EU", "#", "#eu"])),
    ):  # fmt: skip
        assert list(rows_of(path, TASK, text).columns(*names)) == [expected]


def test_words_of_a_tokenizer_that_wants_blanks_before_them(tmp_path):
    rows, encode = rows_of(tmp_path / "a.conll", TASK, "good B-GOOD\nfilm O\n"), {}
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for blank in (False, True):
        made = Tokenizer(models.BPE(letters, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, add_prefix_space=blank)
        encode[blank] = Encoder(tokenizer, 16, TASK(("B-GOOD", "O")))
    with pytest.raises(InputError, match="load it with add_prefix_space=True"):
        encode[False](rows)
    assert encode[True](rows)[0]["labels"] == [0, *[-100] * 4, 1, *[-100] * 4]


def test_tags_with_marks_are_scored_as_entities():
    entities = ("f1", "precision", "recall")
    for classes in (("O", "U-FILM"), ("L-A", "O"), ("NOUN", "VERB"), ("O", "ORG")):
        marked = any("-" in name for name in classes)
        assert TASK(classes).select_metrics(None) == (entities if marked else ("accuracy",))
        assert TASK(classes).select_metrics("f1") == entities


def test_hidden_labels_of_a_hub_are_no_class(monkeypatch):
    tags = datasets.List(datasets.ClassLabel(names=["O", "B-GOOD"]))
    features = {"tokens": datasets.List(datasets.Value("string")), "labels": tags}
    rows = {"tokens": [["a", "film"], ["good"]], "labels": [[0, 0], [-1]]}
    found = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    with pytest.raises(InputError, match="split test, row 2: no label"):
        read_hub("some/set", None, "test", TASK.columns, "--data", TASK)


def test_words_that_are_cut_off_are_outside(tmp_path, tokenizer):
    rows = rows_of(tmp_path / "a.conll", TASK, "good B-GOOD\nfilm B-FILM\nis O\n")
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
