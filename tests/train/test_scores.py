"""Scores by hand, by other libraries, and as seqeval 1.2.2 gave for the same rows."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer
from scipy.stats import pearsonr

from fastkd.train.data import load
from fastkd.train.generation import Words, rouge_l
from fastkd.train.scoring import finite, score
from fastkd.train.tasks.classification import Classification, useless_classes
from fastkd.train.tasks.embedding import agreement
from fastkd.train.tasks.multi_label import TASK as MULTI_LABEL
from fastkd.train.tasks.question_answering import squad, squad_best
from fastkd.train.tasks.regression import number_scores, useless_numbers
from fastkd.train.tasks.token_classification import TASK, entities, is_marked, precision_recall_f1
from tests.support.tiny import WORDS, source
from tests.train.tasks.through import write_jsonl

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


def test_scores_of_entities_are_those_of_seqeval():
    for true, found, *expected in RECORDED:
        for marks in ({}, {"S-": "U-", "E-": "L-"}, {"I-": "M-"}):  # BILOU and BMES
            rows = [found, true]
            for old, new in marks.items():
                rows = [row.replace(old, new) for row in rows]
            scores = precision_recall_f1(*([row.split()] for row in rows))
            assert scores == pytest.approx(tuple(expected), rel=1e-5)
    # Rows add up to micro averages; no entity continues in the next row.
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


def test_scores_by_hand():
    logits = np.array([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    labels = np.array([0, 1, 0, 0])
    rows = SimpleNamespace(labels=labels)
    scores = Classification(("no", "yes")).scores(("f1", "mcc"), logits, rows)
    # One true positive, one false positive, two true negatives.
    assert scores["accuracy"] == 0.75
    assert scores["f1"] == pytest.approx(2 / 3)
    assert scores["mcc"] == pytest.approx((1 * 2 - 1 * 0) / np.sqrt(2 * 1 * 3 * 2))
    rows = SimpleNamespace(labels=np.array([0, 1, 1, 2]))
    three = Classification(("a", "b", "c")).scores(("f1",), np.eye(3)[[0, 1, 0, 2]], rows)
    assert three["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)

    numbers = np.array([1.0, 2.0, 3.0, 10.0])
    scores = number_scores(numbers, np.array([2.0, 4.0, 6.0, 8.0]))
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(28 / np.sqrt(50 * 20))
    assert scores["mse"] == pytest.approx((1 + 4 + 9 + 4) / 4)
    assert number_scores(np.ones(3), np.arange(3.0))["pearson"] == 0.0
    for answers in (np.full((2, 2), np.nan), [("text", np.inf, 1)], [[1.0, np.nan]]):
        assert not finite(answers)
        assert np.isnan(score(Classification(), ("accuracy",), answers, None)["accuracy"])
    assert finite([("text", 0.5, 1), np.ones(2)])


def test_answers_that_are_worth_nothing():
    rng = np.random.default_rng(0)
    labels, real = rng.integers(0, 3, 200), rng.normal(size=50)
    chance = "are no better than chance"
    for answers, why in (
        (labels, None),
        ((labels + (rng.random(200) < 0.5)) % 3, None),
        (rng.permutation(labels), chance),
        (np.ones(200, int), "are all 'b'"),
    ):
        assert useless_classes(answers, labels, ["a", "b", "c"]) == why
    for answers, why in ((real, None), (-real, chance), (np.ones(50), "are all 1")):
        assert useless_numbers(answers, real) == why


def test_scores_of_rows_and_labels_that_nothing_has(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ({"text": "a", "labels": numbers} for numbers in ([10, 9], [])))
    corpus = load(source(task="multi-label", train=path, evals=path))
    assert corpus.task.classes == ("9", "10")
    encoded = SimpleNamespace(rows=corpus.train)
    task = MULTI_LABEL(("9", "10", "11"))
    answers = np.array([[3.0, 1.0, -1.0], [-1.0, 2.0, -1.0]], dtype=np.float32)
    found = task.scores(task.default_metrics, answers, encoded)
    assert found["micro_f1"] == pytest.approx(4 / 5)
    assert found["macro_f1"] == pytest.approx((1 + 2 / 3) / 3)
    assert found["mean_average_precision"] == pytest.approx((1 + 1 / 2) / 3)
    assert task.sanity_warning(answers, encoded) is None
    assert "'10'" in task.sanity_warning(answers[[1, 1]], encoded)
    # scikit-learn takes one column for the classes yes and no: accuracy, and the mean of both.
    write_jsonl(path, ({"text": "a", "labels": names} for names in (["good"], [], ["b"], [])))
    rows = load(source(task="multi-label", train=path, evals=path)).train
    answers = np.array([[1.0], [2.0], [-1.0], [-1.0]])
    scores = MULTI_LABEL(("good",)).scores(
        MULTI_LABEL.default_metrics, answers, SimpleNamespace(rows=rows)
    )
    f1 = pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert scores == {"micro_f1": f1, "macro_f1": f1, "mean_average_precision": 0.5}


def test_scores_are_squads():
    said = ["The cat!", "a dog", "red  house", ""]
    gold = [["cat", "a cat"], ["dogs", "big dog"], ["the red house of", "house"], ["it"]]
    f1 = pytest.approx(25 * (1 + 2 / 3 + 4 / 5 + 0))  # as torchmetrics' and evaluate-v1.1.py
    assert squad(said, gold) == {"exact_match": 25.0, "f1": f1}
    # These answers have no common token, in evaluate-v1.1.py.
    assert squad(["the"], [["an"]]) == {"exact_match": 100.0, "f1": 0.0}
    # SQuAD 2.0: only an empty prediction fits no answer; answers without words are empty.
    assert squad(["", "the", "cat"], [[], ["an"], []])["f1"] == pytest.approx(200 / 3)
    # The best threshold.
    rng = random.Random(0)
    gold = [[] if i % 3 == 0 else [rng.choice(WORDS[:6])] for i in range(12)]
    said = [rng.choice(["dull", "fine film", *answers * 3]) for answers in gold]
    doubts = [rng.random() for _ in gold]
    tried = [
        squad([text if d <= most else "" for text, d in zip(said, doubts, strict=True)], gold)
        for most in (-1, *doubts)
    ]
    found = squad_best(said, gold, doubts)
    assert found["best_f1"] == pytest.approx(max(one["f1"] for one in tried))
    assert found["best_exact_match"] == pytest.approx(max(one["exact_match"] for one in tried))
    assert found["best_f1"] > squad(said, gold)["f1"]


def cosine(x):
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit @ unit.T


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
    turned = teacher @ np.linalg.qr(rng.normal(size=(6, 6)))[0]
    assert agreement(turned, teacher) == (pytest.approx(1), 1)
    assert agreement(np.ones((12, 3)), teacher[:12])[0] == 0


def test_tags_with_marks_are_scored_as_entities():
    entities = ("f1", "precision", "recall")
    for marked, names in ((True, "B-A U-LOC L-x M-x S-a-b"), (False, "B B- NOUN X-A ORG-B")):
        assert {is_marked(name) for name in names.split()} == {marked}
    for classes in (("O", "U-FILM"), ("L-A", "O"), ("NOUN", "VERB"), ("O", "ORG")):
        marked = any("-" in name for name in classes)
        assert TASK(classes).select_metrics(None) == (entities if marked else ("accuracy",))
        assert TASK(classes).select_metrics("f1") == entities
