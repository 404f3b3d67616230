"""A number for a text, or for two."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.corpus import Corpus
from fastkd.train.errors import InputError
from fastkd.train.evaluation import doubt, evaluate
from fastkd.train.glue import Glue
from fastkd.train.label_values import LARGEST, as_name, as_number
from fastkd.train.tasks.base import FittedTask, LabelInfo, Task


@dataclass(frozen=True)
class Regression(Task):
    """Real numbers, in a head with one output."""

    metrics: ClassVar[tuple[str, ...]] = ("pearson", "spearman", "mse")
    default_metrics: ClassVar[tuple[str, ...]] = ("pearson", "spearman")
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"mse"})

    @property
    def num_labels(self) -> int:
        return 1

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> FittedTask:
        return FittedTask(cls(), to_reals(train), {k: to_reals(rows) for k, rows in evals.items()})

    def unlabelled(self, rows: Rows) -> Rows:
        return replace(rows, labels=np.full(len(rows), math.nan))

    def without_labels(self, rows: Rows) -> Rows:
        return self.unlabelled(rows)

    def describe(self, corpus: Corpus) -> Iterator[str]:
        marked = np.count_nonzero(np.asarray(corpus.train.labels) == UNLABELLED)
        if marked:
            yield (
                f"warning: {marked} training labels are {UNLABELLED}, a number here, which is "
                "learned; rows without one belong into --unlabelled"
            )

    def fit_config(self, config: Any) -> None:
        config.num_labels, config.problem_type = 1, "regression"

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        if asked is not None:
            raise InputError(
                f"--label-order {asked}: must name the data's label for each class of the model, "
                "and it predicts a number"
            )
        return to_reals(rows), ()

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        return evaluate(metrics, answers, examples.targets)

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        return doubt(answers, examples.targets, None)

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"value": float(value)} for value in answers[:, 0]]

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        return answers[:, 0].round(4).tolist()

    def references(self, examples: Encoded) -> list[Any]:
        return examples.targets.tolist()

    def select_metrics(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        return super().select_metrics(
            wanted, glue if glue is not None and glue.regression else None
        )

    def report(self) -> dict[str, Any]:
        return {"labels": None, "f1_of": 1}

    @classmethod
    def about(cls, report: Mapping[str, Any]) -> str:
        return "It predicts a number."


TASK = Regression


def to_reals(rows: Rows) -> Rows:
    """Labels as real numbers."""
    return rows.labelled(_real, float)


def _real(label: Any) -> float:
    value = as_number(label)
    if value is None:
        raise InputError(
            f"label {as_name(label)!r:.40} is not a number of at most {LARGEST:.2g}, and this is a "
            "regression task"
        )
    return value
