"""Statistics of a study, against scipy and scikit-learn; its verdicts, pictures and tables."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, matthews_corrcoef

from fastkd.study import grid_report, paper_table, statistics
from fastkd.study.grid import Cell, Grid
from fastkd.study.grid_report import cells, findings, headline
from fastkd.study.statistics import gap_recovered, holm, of_confusion, paired_difference

LABELS = np.arange(1000) % 2
ABOUT = {
    "teacher": {"accuracy": 0.9}, "references": [], "classes": [], "warnings": {}, "rccc": 0.5,
    "lower_is_better": [], "percent": [], "rows": {"train": 10, "eval": 1000}, "options": {},
    "seconds": 1.0,
}  # fmt: skip
CLASSES = {"references": LABELS.tolist(), "classes": ["no", "yes"], "training_rows": [5, 5]}


def predictions(accuracy, seed):
    """Predictions of a model with this accuracy; most err on the same rows."""
    hard = np.random.default_rng(7).random(1000)
    hard += np.random.default_rng(seed).normal(0, 0.05, 1000)
    return np.where(hard < np.quantile(hard, accuracy), LABELS, 1 - LABELS).tolist()


def results_of(metric, scores, **about):
    """Results by variant, data set and seed; of scores by variant and seed."""
    results = {}
    for name, by_seed in scores.items():
        for seed, score in enumerate(by_seed):
            answers = predictions(score, len(results)) if "classes" in about else [0]
            scored = {"scores": {metric: score}, "predictions": answers}
            history = [{"step": 1, "scores": {metric: score}}]
            results[name, "t", seed] = {**ABOUT, **scored, "history": history, **about}
    return results


def study_of(results, paper=None):
    """A study of results and of a variant that has none; its table, and the table's rows."""
    names = [*dict.fromkeys(name for name, *_ in results), "absent"]
    seeds = tuple(range(1 + max(seed for *_, seed in results)))
    runs = tuple(Cell(name, "t", seed, {}, {}) for name in names for seed in seeds)
    study = Grid("Typed", names[0], seeds, "none", runs, paper)
    (summary,) = statistics.summarize(study, results)
    return study, summary, {row.variant: row for row in summary.rows}


def planted(accuracies, seeds=4):
    """A study in which each variant has its accuracy, with noise over seeds."""
    draw = np.random.default_rng(0)
    scores = {name: x + draw.normal(0, 0.004, seeds) for name, x in accuracies.items()}
    return study_of(results_of("accuracy", scores, **CLASSES))


def test_verdicts_find_the_planted_effects_only():
    """And the sentence that opens the report."""
    study, summary, rows = planted({"labels": 0.7, "same": 0.7, "better": 0.8, "worse": 0.6})
    assert [row.verdict for row in rows.values()] == ["", "not told apart", "above", "below"]
    assert rows["better"].difference.mean == pytest.approx(0.1, abs=0.01)
    assert rows["better"].recovered.mean == pytest.approx(0.5, abs=0.05)
    assert rows["labels"].difference is None and "Classes without" not in findings(summary)
    said = "Beyond noise: better is better than labels on t; worse is worse than labels on t."
    assert headline(study, [summary]) == said
    for accuracies, seeds, sentence in (
        ((0.7, 0.8, 0.8), 4, "Beyond noise: b, c are better than a on t."),
        ((0.7, 0.7), 4, "Nothing exceeds noise with 4 seeds."),
        ((0.7, 0.7), 2, "Nothing can be told with two seeds."),
        ((0.7, 0.8), 1, "Nothing can be told with one seed."),
    ):
        study, summary, rows = planted(dict(zip("abc", accuracies, strict=False)), seeds)
        assert headline(study, [summary]) == sentence
    found = statistics.Difference(0.1, 0.05, 0.15, 0.001)
    assert statistics.verdict(found, 0.001, (0.0, 0.2)) == "not told apart"
    assert rows["b"].verdict == "one seed: can't tell"
    assert math.isnan(rows["b"].difference.low) and math.isnan(rows["b"].p_holm)


def test_paired_differences_equal_scipy():
    """But scores that change by a row at a time vary at least as rounding does."""
    draw = np.random.default_rng(0)
    for count in range(2, 30):
        a, b = draw.normal(0.8, 0.02, (2, count))
        found, expected = paired_difference(a - b, step=1e-6), stats.ttest_rel(a, b)
        numbers = (expected.pvalue, np.mean(a - b), *expected.confidence_interval(0.95))
        assert (found.p, found.mean, found.low, found.high) == pytest.approx(numbers)
        assert not found.rounded
    assert paired_difference([0.0, 0.0]).p == 1.0 and paired_difference([0.1, 0.1]).p == 0.0
    # Both seeds lose 20 of 872 rows.
    found = paired_difference([-20 / 872, -20 / 872], step=1 / 872)
    assert found.low < found.mean < found.high < 0 and 0.005 < found.p < 0.05
    # Each seed has one more of 20 answers right: by chance, as with the same accuracies.
    about = {"references": ["film"] * 20, "percent": ["exact_match"]}
    scores = {"labels": [60.0] * 3, "other": [65.0] * 3}
    row = study_of(results_of("exact_match", scores, **about))[-1]["other"]
    assert row.difference == paired_difference([5.0] * 3, step=5.0)
    assert row.difference.rounded and row.verdict == "not told apart"
    scores = {"labels": (0.50, 0.52, 0.49), "better": (0.53, 0.551, 0.521)}
    row = study_of(results_of("pearson", scores, references=[0.5] * 20))[-1]["better"]
    expected = stats.ttest_rel(scores["better"], scores["labels"])
    assert row.difference.p == pytest.approx(expected.pvalue)
    assert row.verdict == "above" and row.rows_interval is None


def test_holm_matches_values_computed_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    found = holm([0.02, math.nan, 0.9, 0.8])
    assert found == pytest.approx([0.06, math.nan, 1.0, 1.0], nan_ok=True)
    assert holm([]) == []


def test_metrics_of_confusion_matrices_match_scikit_learn():
    """Macro F1 leaves out classes that do not occur."""
    draw = np.random.default_rng(1)
    for classes, present in ((2, [0, 1]), (4, range(4)), (3, [0, 2])):
        true, guess = draw.choice(present, (2, 60))
        table = confusion_matrix(true, guess, labels=range(classes)).astype(float)
        average = "binary" if classes == 2 else "macro"
        assert {name: of_confusion(name, table) for name in ("accuracy", "mcc", "f1")} == {
            "accuracy": pytest.approx(accuracy_score(true, guess)),
            "mcc": pytest.approx(matthews_corrcoef(true, guess)),
            "f1": pytest.approx(f1_score(true, guess, average=average)),
        }
    assert of_confusion("mcc", np.array([[5.0, 0.0], [5.0, 0.0]])) == 0.0


def test_bootstrap_interval_matches_resampling_row_by_row():
    interval = statistics.bootstrap_interval
    students, baselines = ([predictions(x, seed) for seed in range(3)] for x in (0.8, 0.7))
    found = interval("accuracy", LABELS, students, baselines)
    gains = np.equal(students, LABELS).mean(0) - np.equal(baselines, LABELS).mean(0)
    drawn = np.random.default_rng(5).choice(gains, (2000, 1000)).mean(1)
    assert found == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.003)
    assert interval("accuracy", LABELS, students, students) == (0.0, 0.0)
    assert interval("mse", [0.5], [[0.5]], [[0.5]]) is None
    # Seeds may have labels of their own.
    flipped = ([*runs[:2], np.subtract(1, runs[2])] for runs in ([LABELS] * 3, students, baselines))
    assert interval("accuracy", *flipped) == found
    # F1 of a head of three classes is a mean even if the rows have two.
    low, high = interval("f1", [0, 1] * 50, [[0, 1] * 50], [[0, 0] * 50], num_classes=3)
    gain = 1 - f1_score([0, 1] * 50, [0] * 100, average="macro", zero_division=0.0)
    assert low < gain < high and high - low < 0.15


def test_gap_recovered_is_none_without_a_sufficient_gap():
    for scores, teachers, options in (
        ([(0.8, 0.8), (0.8, 0.8)], [0.805] * 2, {}),
        ([(0.8, 0.7), (0.82, 0.7)], [0.69] * 2, {}),
        ([(0.8, 0.7), (0.82, 0.7)], [0.9, math.nan], {}),
        ([], [], {}),
        ([(0.62, 0.6), (0.55, 0.6)], [0.605, 0.75], {}),  # within noise
        ([(20.0, 20.1)], [20.0], {"lower_is_better": True}),
        ([(60.0, 60.5)], [61.0], {"percent": True}),
    ):
        assert gap_recovered(scores, teachers, **options) is None
    found = gap_recovered([(0.62, 0.6), (0.63, 0.58), (0.6, 0.61)], [0.7, 0.72, 0.69])
    gains, gaps = np.array([0.02, 0.05, -0.01]), np.array([0.1, 0.14, 0.08])
    assert found.mean == pytest.approx(gains.sum() / gaps.sum())  # not the mean of ratios, .144
    half = stats.t.ppf(0.975, 2) * (gains - found.mean * gaps).std(ddof=1) / 3**0.5 / gaps.mean()
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))


def test_warnings_of_a_table():
    """Failed runs, classes without rows, a teacher at chance, students of one prediction."""
    about = {**CLASSES, "classes": ["no", "yes", "perhaps"], "training_rows": [6, 0, 4]}
    about |= {"warnings": {"teacher": "are no better than chance"}, "options": {"labelled": 2}}
    arms = {"labels": (0.7, 0.7), "always no": (0.5, 0.5), "bad": (0.6, 0.7, 0.7)}
    results = results_of("accuracy", arms, **about)
    for seed in range(2):
        results["always no", "t", seed]["predictions"] = [0] * 1000
    results["bad", "t", 1] = {"failed": "not finite"}
    _, summary, rows = study_of(results)
    assert [*rows] == [*arms] and rows["bad"].verdict == "one seed: can't tell"
    assert cells(rows["bad"])[:3] == ["bad (1 failed)", "2", "0.6500 ± 0.0707"]
    assert cells(rows["always no"])[0] == "always no (one prediction for all rows: 2 seeds)"
    for sentence in (
        "Classes without training rows: yes.", "Classes without held-out rows: perhaps.",
        "Students with the same prediction for every row: always no.", "Failed runs: 1,",
        "The teacher's answers are no better than chance.", "2 labels are fewer than the classes.",
    ):  # fmt: skip
        assert sentence in findings(summary)
    for seed in range(2):
        results["labels", "t", seed] = {"failed": "not finite"}
    _, none, rows = study_of(results)
    assert cells(rows["labels"])[:3] == ["labels (2 failed)", "0", ""]
    assert ["No verdicts yet" in findings(x) for x in (summary, none)] == [False, True]


def test_learning_curves_average_runs_of_different_lengths(monkeypatch):
    found = results_of("accuracy", {"labels": (0.5, 0.6), "fcd": (0.5, 0.6)})
    study, *summaries, _ = study_of(found)
    for (variant, _, seed), result in found.items():
        steps = (4, 8) if seed else (2, 4, 5)
        more = {"intra_class_similarity": 0.5} if variant == "fcd" else {}
        done = {step: {"accuracy": step / steps[-1]} for step in steps}
        result["history"] = [{"step": x, "scores": done[x], **more} for x in steps]
    monkeypatch.setattr(grid_report, "_png", lambda figure: figure)
    (ax,) = grid_report._similarity_curves(study, summaries, found).axes
    assert ax.get_title() == "t: M_ICS" and len(ax.lines) == 1
    assert list(ax.lines[0].get_ydata()) == [0.5] * 3
    figure = grid_report._curves(study, summaries, found)
    _, *lines = figure.axes[0].lines  # the first is the teacher's
    for line in lines:
        assert list(line.get_xdata()) == pytest.approx([0.4, 0.8, 1.0])
        assert list(line.get_ydata()) == pytest.approx([(0.4 + 0.5) / 2, 0.8, 1.0])
    assert lines[0].get_linewidth() > lines[1].get_linewidth()  # so that both show
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["teacher", "labels", "fcd"]


PERPLEXITIES = {
    "labels": (28.5, 28.9, 28.4), "lower": (23.7, 24.2, 23.5), "higher": (31.5, 31.8, 31.3),
    "alike": (28.4, 29.1, 28.3),
}  # fmt: skip
PAPER = {
    "title": "Perplexity", "columns": {"x": "t perplexity", "y": ""},
    "rows": {"labels": [28.5, 1], "lower": [23.7, 1], "higher": [27.0, 1], "alike": ["-", 1]},
}  # fmt: skip


def test_pictures_and_tables_of_a_metric_to_minimise(monkeypatch):
    monkeypatch.setattr(grid_report, "_png", lambda figure: figure)
    about = {"lower_is_better": ["perplexity"], "teacher": {"perplexity": 20.0}}
    results = results_of("perplexity", PERPLEXITIES, **about)
    study, summary, rows = study_of(results, PAPER)
    assert [(row.verdict, row.quality) for row in rows.values()] == [
        ("", ""), ("below", "better"), ("above", "worse"), ("not told apart", "")
    ]  # fmt: skip
    assert rows["lower"].rows_interval is None and "below (better)" in cells(rows["lower"])
    assert rows["lower"].recovered.mean == pytest.approx(4.8 / 8.6, abs=0.01)
    text = "lower is better than labels on t; higher is worse than labels on t."
    assert headline(study, [summary]) == f"Beyond noise: {text}"
    (ax,) = grid_report._forest(study, [summary], results).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["higher", "alike", "lower"]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_color() for line in dots][::2] == ["#b42318", "#1a7f37"]
    assert dots[-1].get_xdata()[0] == pytest.approx(-4.8)  # not in percentage points
    assert ax.get_xlabel() == "perplexity (lower is better) above labels"
    beside = paper_table.beside(study, [summary], results)
    assert beside["rows"][1] == ["lower", "23.7", "23.80 ± 0.36", "1"]
    assert beside["order"] == [
        "x: lower is below labels in the paper (-4.8); here the same, beyond noise (-4.80)",
        "x: higher is below labels in the paper (-1.5); here the opposite, beyond noise (+2.93)",
    ]
    several = {"scores": dict.fromkeys(("x", "x_a", "f1_a")), "lower_is_better": ["x", "x_a"]}
    assert grid_report.averaged({**several, "tests": ["_a"]}) == ["x_a"]  # of test files
    # Percentages are not scaled again.
    about = {"percent": ["accuracy"], "teacher": {"accuracy": 61.0}}
    results = results_of("accuracy", PERPLEXITIES, **about)
    study, summary, _ = study_of(results, {**PAPER, "columns": {"x": "t accuracy", "y": ""}})
    beside = paper_table.beside(study, [summary], results)
    assert beside["rows"][1] == ["lower", "23.7", "23.80 ± 0.36", "1"]
    (ax,) = grid_report._forest(study, [summary], results).axes
    dots = sorted(line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o")
    assert dots[0] == pytest.approx(-4.8)
