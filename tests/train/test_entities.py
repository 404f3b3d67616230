"""Scores: entities of tagged words, as seqeval 1.2.2 gave for the same rows, and of texts."""

import itertools

import pytest
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from fastkd.train.generation import Words, rouge_l
from fastkd.train.tasks.token_classification import entities, is_marked, precision_recall_f1

# True tags, tags found, and seqeval's precision, recall and F1: IOB, IOBES, and marks mixed.
RECORDED = [
    ("B-A O O I-B O B-A", "B-A I-B B-B I-B O B-A", 0.5, 0.666667, 0.571429),
    ("E-A E-B E-A E-A E-A O I-B O S-A", "E-A E-B E-A O E-A E-A S-A B-A B-B",
     0.5, 0.571429, 0.533333),
    ("S-A S-B E-B E-A O B-A", "S-A S-B E-B S-B O S-B", 0.6, 0.6, 0.6),
    ("I-A E-B B-B S-B B-A B-B", "I-A E-A B-B S-B I-A I-A", 0.5, 0.333333, 0.4),
    ("O O I-B O E-B S-B", "O O S-B O E-B S-B", 1, 1, 1),
    ("S-A O O I-B I-B", "O O O B-B I-B", 1, 0.5, 0.666667),
    ("I-A B-A S-B E-B O O I-A S-B O", "B-A B-A S-A E-B O O E-B S-B I-B",
     0.571429, 0.666667, 0.615385),
]  # fmt: skip


@pytest.mark.parametrize(("true", "found", "precision", "recall", "f1"), RECORDED)
def test_scores_are_those_of_seqeval(true, found, precision, recall, f1):
    expected = pytest.approx((precision, recall, f1), rel=1e-5)
    assert precision_recall_f1([found.split()], [true.split()]) == expected
    bilou = [text.replace("S-", "U-").replace("E-", "L-").split() for text in (found, true)]
    assert precision_recall_f1([bilou[0]], [bilou[1]]) == expected
    bmes = [text.replace("I-", "M-").split() for text in (found, true)]
    assert precision_recall_f1([bmes[0]], [bmes[1]]) == expected


def test_scores_of_rows_add_up():
    """Micro averages; no entity continues in the next row."""
    true, found = [["B-A", "I-A"], ["I-A"], ["O"]], [["B-A", "I-A"], ["O"], ["S-B"]]
    assert precision_recall_f1(found, true) == (0.5, 0.5, 0.5)
    assert precision_recall_f1([["O"]], [["O"]]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("tags", "found"), [
    ("LOC LOC O ORG", {(0, 2, "LOC"), (3, 4, "ORG")}),
    ("person-artist O O-x", {(0, 1, "person-artist"), (2, 3, "O-x")}),
    ("B I O B B", {(0, 2, ""), (3, 4, ""), (4, 5, "")}),
    ("U-A L-A", {(0, 1, "A"), (1, 2, "A")}),
    ("B-per-x I-per-x I-per", {(0, 2, "per-x"), (2, 3, "per")}),
])  # fmt: skip
def test_tags_that_seqeval_reads_otherwise(tags, found):
    """It takes the first letter of any tag for a mark."""
    assert entities(tags.split()) == found


def test_each_word_is_in_one_entity_or_none():
    tags = ["O", "B-A", "I-A", "E-A", "S-A", "I-B"]
    for row in itertools.product(tags, repeat=4):
        words = [at for start, end, _ in entities(row) for at in range(start, end)]
        assert sorted(words) == [at for at, tag in enumerate(row) if tag != "O"]
    assert all(map(is_marked, ("B-A", "U-LOC", "L-x", "M-x", "S-a-b")))
    assert not any(map(is_marked, ("O", "B", "B-", "NOUN", "X-A", "ORG-B")))


@pytest.mark.parametrize(("text", "words"), [
    ("Der große Übersetzer", ["der", "große", "übersetzer"]),
    ("राम घर गया।", ["राम", "घर", "गया"]),
    ("мир, труд", ["мир", "труд"]),
    ("你好，GPT4世界。", ["你", "好", "gpt4", "世", "界"]),
    ("ペン ﾃﾞ", ["ペ", "ン", "デ"]),
    ("สวัสดี", ["ส", "วั", "ส", "ดี"]),
    ("안녕하세요 세계", ["안녕하세요", "세계"]),
    ("é e\u0301", ["é", "é"]),
    ("?! 👍", ["?", "!", "👍"]),
])  # fmt: skip
def test_words_of_every_script(text, words):
    assert Words().tokenize(text) == words
    assert rouge_l([text], [text]) == 1
    assert rouge_l([words[0]], [text]) == pytest.approx(2 / (len(words) + 1))


def test_rouge_of_ascii_text_is_that_of_rouge_score():
    texts = ["It's the 2nd snake_case film.", "the film, it is 2ND", "...", "fine"]
    own, scorer = DefaultTokenizer(use_stemmer=False), RougeScorer(["rougeL"])
    assert all(Words().tokenize(text) == own.tokenize(text) for text in texts if text != "...")
    expected = [scorer.score(a, b)["rougeL"].fmeasure for a in texts[:2] for b in texts[:2]]
    found = [rouge_l([b], [a]) for a in texts[:2] for b in texts[:2]]
    assert found == expected
