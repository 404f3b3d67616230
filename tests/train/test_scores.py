"""Scores by hand, by other libraries, and as seqeval 1.2.2 gave for the same rows."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer
from scipy.stats import pearsonr

from fastkd.train.generation import Words, rouge_l
from fastkd.train.scoring import finite, score
from fastkd.train.tasks import named
from fastkd.train.tasks.classification import Classification, useless_classes
from fastkd.train.tasks.embedding import agreement
from fastkd.train.tasks.multi_label import MultiLabel
from fastkd.train.tasks.question_answering import squad, squad_best
from fastkd.train.tasks.regression import Regression, useless_numbers
from fastkd.train.tasks.token_classification import TASK, entities, is_marked, precision_recall_f1
from tests.support.tiny import WORDS


def test_scores_of_entities_are_those_of_seqeval():
    # True tags, tags found, and seqeval's precision, recall and F1: IOB, IOBES, and marks mixed.
    for true, found, *expected in (
        ("B-A O O I-B O B-A", "B-A I-B B-B I-B O B-A", 0.5, 0.666667, 0.571429),
        ("E-A E-B E-A E-A E-A O I-B O S-A", "E-A E-B E-A O E-A E-A S-A B-A B-B",
         0.5, 0.571429, 0.533333),
        ("I-A E-B B-B S-B B-A B-B", "I-A E-A B-B S-B I-A I-A", 0.5, 0.333333, 0.4),
        ("S-A O O I-B I-B", "O O O B-B I-B", 1, 0.5, 0.666667),
        ("I-A B-A S-B E-B O O I-A S-B O", "B-A B-A S-A E-B O O E-B S-B I-B",
         0.571429, 0.666667, 0.615385),
    ):  # fmt: skip
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
    # seqeval takes the first letter of any tag for a mark.
    for tags, expected in (
        ("LOC LOC O ORG", {(0, 2, "LOC"), (3, 4, "ORG")}),
        ("B I O B B", {(0, 2, ""), (3, 4, ""), (4, 5, "")}),
        ("B-per-x I-per-x I-per", {(0, 2, "per-x"), (2, 3, "per")}),
    ):
        assert entities(tags.split()) == expected
    # By default tags without marks are scored one by one.
    for mark, tags in ((True, "B-A U-LOC L-x M-x S-a-b"), (False, "B B- NOUN X-A ORG-B")):
        for tag in tags.split():
            metrics = ("f1", "precision", "recall") if mark else ("accuracy",)
            assert is_marked(tag) == mark and TASK(("O", tag)).select_metrics(None) == metrics
            assert TASK(("O", tag)).select_metrics("f1") == ("f1", "precision", "recall")


def test_words_of_every_script():
    for text, words in (
        ("Der große Übersetzer", ["der", "große", "übersetzer"]), ("мир, труд", ["мир", "труд"]),
        ("राम घर गया।", ["राम", "घर", "गया"]), ("안녕하세요 세계", ["안녕하세요", "세계"]),
        ("你好，GPT4世界。", ["你", "好", "gpt4", "世", "界"]), ("ペン ﾃﾞ", ["ペ", "ン", "デ"]),
        ("สวัสดี", ["ส", "วั", "ส", "ดี"]), ("é e\u0301", ["é", "é"]), ("?! 👍", ["?", "!", "👍"]),
    ):  # fmt: skip
        assert Words().tokenize(text) == words
        assert rouge_l([words[0]], [text]) == pytest.approx(2 / (len(words) + 1))
    # ASCII text has the words of rouge_score.
    texts = ["It's the 2nd snake_case film.", "the film, it is 2ND"]
    for text, other in (texts, texts[::-1]):
        assert Words().tokenize(text) == DefaultTokenizer(use_stemmer=False).tokenize(text)
        expected = RougeScorer(["rougeL"]).score(text, other)["rougeL"].fmeasure
        assert rouge_l([other], [text]) == expected


def test_scores_by_hand():
    for task, answers, labels, expected in (
        # One true positive, one false positive, two true negatives.
        (Classification(("no", "yes")), [[2, 1], [0, 1], [0, 3], [1, 0]], [0, 1, 0, 0],
         {"accuracy": 3 / 4, "f1": 2 / 3, "mcc": (1 * 2 - 1 * 0) / np.sqrt(2 * 1 * 3 * 2)}),
        (Classification(("a", "b", "c")), np.eye(3)[[0, 1, 0, 2]], [0, 1, 1, 2],
         {"f1": (2 / 3 + 2 / 3 + 1) / 3}),
        (Regression(), [[1], [2], [3], [10]], [2, 4, 6, 8],
         {"spearman": 1, "pearson": 28 / np.sqrt(50 * 20), "mse": (1 + 4 + 9 + 4) / 4}),
        (Regression(), [[1], [1], [1]], [0, 1, 2], {"pearson": 0}),
        # No row has the last label; one row has no label.
        (MultiLabel(("9", "10", "11")), [[3, 1, -1], [-1, 2, -1]], [["10", "9"], []],
         {"micro_f1": 4 / 5, "macro_f1": (1 + 2 / 3) / 3, "mean_average_precision": (1 + 0.5) / 3}),
        # scikit-learn takes one column for the classes yes and no: accuracy, and the mean of both.
        (MultiLabel(("good",)), [[1], [2], [-1], [-1]], [["good"], [], ["b"], []],
         {"micro_f1": 2 / 3, "macro_f1": 2 / 3, "mean_average_precision": 1 / 2}),
    ):  # fmt: skip
        answers, lists = np.array(answers, dtype=float), isinstance(labels[0], list)
        encoded = SimpleNamespace(labels=None if lists else np.array(labels, dtype=float))
        encoded.rows = SimpleNamespace(column=lambda name, labels=labels: labels)
        assert score(task, [*expected], answers, encoded) == pytest.approx(expected)
        if lists and len(task.classes) == 3:
            assert task.sanity_warning(answers, encoded) is None
            assert "are all '10'" in task.sanity_warning(answers[[1, 1]], encoded)
    for answers in (np.full((2, 2), np.nan), [("text", np.inf, 1)], [[1.0, np.nan]]):
        assert np.isnan(score(Classification(), ("accuracy",), answers, None)["accuracy"])
    assert finite([("text", 0.5, 1), np.ones(2)])
    documents = named("causal-lm")().predictions([(6.0, 3), (0.0, 0)], None)
    assert [row["perplexity"] for row in documents] == [pytest.approx(np.exp(2)), None]


def test_answers_that_are_worth_nothing():
    rng, chance = np.random.default_rng(0), "are no better than chance"
    labels, real = rng.integers(0, 3, 200), rng.normal(size=50)
    often = (labels + (rng.random(200) < 0.5)) % 3
    for answers, why in (
        (labels, None), (often, None), (rng.permutation(labels), chance),
        (np.ones(200, int), "are all 'b'"),
    ):  # fmt: skip
        assert useless_classes(answers, labels, ["a", "b", "c"]) == why
    for answers, why in ((real, None), (-real, chance), (np.ones(50), "are all 1")):
        assert useless_numbers(answers, real) == why


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
    best = {f"best_{name}": max(one[name] for one in tried) for name in ("exact_match", "f1")}
    assert squad_best(said, gold, doubts) == pytest.approx(best)
    assert best["best_f1"] > squad(said, gold)["f1"]


def test_agreement_is_that_of_all_pairs_and_of_ten_neighbours():
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(300, 6)) + 3
    student = (teacher @ rng.normal(size=(6, 4)) + rng.normal(size=(300, 4))).astype(np.float32)
    both = student.astype(float), teacher
    unit = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in both)
    s, t = (x @ x.T for x in unit)
    above = np.triu_indices(300, 1)
    nearest = [np.argsort(-x - 9 * np.eye(300), axis=1)[:, 1:11] for x in (s, t)]
    shared = [len({*a} & {*b}) / 10 for a, b in zip(*nearest, strict=True)]
    expected = pearsonr(s[above], t[above])[0], np.mean(shared)
    assert agreement(student, teacher) == pytest.approx(expected, abs=1e-9)
    turned = teacher @ np.linalg.qr(rng.normal(size=(6, 6)))[0]
    assert agreement(turned, teacher) == (pytest.approx(1), 1)
    assert agreement(np.ones((12, 3)), teacher[:12])[0] == 0
