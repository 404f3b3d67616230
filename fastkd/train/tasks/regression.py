"""A number for a text, or for two."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.evaluation import evaluate, sanity_warning
from fastkd.train.labels import LARGEST, as_number
from fastkd.train.tasks.base import Corpus, FittedTask, LabelInfo, Prepared, Task


@dataclass(frozen=True)
class Regression(Task):
    """Real numbers, in a head with one output."""

    metrics = ("pearson", "spearman", "mse")
    lower_is_better = frozenset({"mse"})
    problem = "regression"
    unlabelled = True
    no_label = math.nan
    by_class = True
    summary = "It predicts a number."

    @property
    def num_labels(self) -> int:
        return 1

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return "pearson", "spearman"

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> FittedTask:
        return FittedTask(cls(), to_reals(train), {k: to_reals(rows) for k, rows in evals.items()})

    def prepare(self, rows: Rows, labelled: bool = True, order: str | None = None) -> Prepared:
        found = super().prepare(rows, labelled, order)
        return found._replace(rows=to_reals(rows)) if labelled else found

    def describe(self, corpus: Corpus) -> Iterator[str]:
        marked = np.count_nonzero(np.asarray(corpus.train.labels) == UNLABELLED)
        if marked:
            yield (
                f"warning: {marked} training labels are {UNLABELLED}, a number here, which is "
                "learned; rows without one belong into --unlabelled"
            )

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        return evaluate(metrics, answers, examples.targets)

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        return sanity_warning(answers, examples.targets, None)

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"value": float(value)} for value in answers[:, 0]]

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        return answers[:, 0].round(4).tolist()

    def references(self, examples: Encoded) -> list[Any]:
        return examples.targets.tolist()


TASK = Regression


def to_reals(rows: Rows) -> Rows:
    """Rows whose labels are real numbers."""
    return rows.labelled(_real, float)


def _real(label: str) -> float:
    value = as_number(label)
    if value is None or not math.isfinite(value):
        raise InputError(
            f"label {label!r:.40} is not a number of at most {LARGEST:.2g}, and this is a "
            "regression task"
        )
    return value
