"""A number for a text, or for two."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.labels import LARGEST, as_number
from fastkd.train.tasks.base import AGREEMENT, UNKNOWN, Corpus, Prepared, Task


@dataclass(frozen=True)
class Regression(Task):
    """Real numbers, in a head with one output."""

    metrics = ("pearson", "spearman", "mse", AGREEMENT)
    teacher_metrics = frozenset({AGREEMENT})
    default_metrics = ("pearson", "spearman")
    lower_is_better = frozenset({"mse"})
    problem = "regression"
    unlabelled = True
    no_label = math.nan
    by_class = True
    two_tokenizers = "texts"
    summary = "It predicts a number."

    @property
    def num_labels(self) -> int:
        return 1

    def read_labels(self, rows: Rows, unknown: str = UNKNOWN) -> Prepared:
        return Prepared(self, rows.with_labels(rows.map_labels(_real)))

    def describe(self, corpus: Corpus) -> Iterator[str]:
        marked = np.count_nonzero(corpus.train.labels == UNLABELLED)
        if marked:
            yield (
                f"warning: {marked} training labels are {UNLABELLED}, a number here, which is "
                "learned; rows without one belong into --unlabelled"
            )

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        return number_scores(answers[:, 0], examples.labels)

    def agreement(self, answers: Any, examples: Encoded) -> dict[str, float]:
        """The correlation with the teacher's numbers."""
        super().agreement(answers, examples)  # raises without a teacher
        numbers = number_scores(answers[:, 0], examples.teacher_answers[:, 0])
        return {AGREEMENT: numbers["pearson"]}

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        if np.isnan(examples.labels).any():  # rows without labels
            return None
        return useless_numbers(answers[:, 0], examples.labels)

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        return [{"value": float(value)} for value in answers[:, 0]]

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        return answers[:, 0].round(4).tolist()


TASK = Regression


def _real(label: str) -> float:
    value = as_number(label)
    if value is None or not math.isfinite(value):
        raise InputError(
            f"label {label!r:.40} is not a number of at most {LARGEST:.2g}, and this is a "
            "regression task"
        )
    return value


def useless_numbers(answers: np.ndarray, labels: np.ndarray) -> str | None:
    """Why numbers look useless: constant, or not correlated with ``labels``."""
    if np.ptp(labels) == 0:
        return None
    if np.ptp(answers) == 0:
        return f"are all {answers[0]:.4g}"
    stats = require("scipy.stats", "train")
    by_chance = stats.pearsonr(answers, labels, alternative="greater").pvalue > 0.05
    return "are no better than chance" if by_chance else None


def number_scores(numbers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Metrics of ``numbers`` (rows,); the correlation with a constant is 0."""
    stats: Any = require("scipy.stats", "train")
    constant = np.ptp(numbers) == 0 or np.ptp(labels) == 0
    return {
        "pearson": 0.0 if constant else stats.pearsonr(numbers, labels)[0],
        "spearman": 0.0 if constant else stats.spearmanr(numbers, labels)[0],
        "mse": ((numbers - labels) ** 2).mean(),
    }
