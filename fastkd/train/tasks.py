"""The GLUE tasks: where their text and labels stand, and how they are scored."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """Where text, second text and label stand; without a header the names are 0, 1, 2, ..."""

    text: str | None = None
    pair: str | None = None
    label: str | None = "label"
    header: bool = True


@dataclass(frozen=True)
class Task:
    """A GLUE task: its columns on the hub and in GLUE's own files, and how it is scored."""

    hub: Columns
    file: Columns
    metrics: tuple[str, ...] = ("accuracy",)
    regression: bool = False
    eval_splits: tuple[str, ...] = ("validation",)


_SENTENCES = Columns("sentence1", "sentence2")
GLUE = "nyu-mll/glue"
TASKS = {
    "cola": Task(Columns("sentence"), Columns("3", None, "1", header=False), ("mcc",)),
    "sst2": Task(Columns("sentence"), Columns("sentence")),
    "mrpc": Task(_SENTENCES, Columns("#1 String", "#2 String", "Quality"), ("f1", "accuracy")),
    "stsb": Task(
        _SENTENCES,
        Columns("sentence1", "sentence2", "score"),
        ("pearson", "spearman"),
        regression=True,
    ),
    "qqp": Task(
        Columns("question1", "question2"),
        Columns("question1", "question2", "is_duplicate"),
        ("f1", "accuracy"),
    ),
    "mnli": Task(
        Columns("premise", "hypothesis"),
        Columns("sentence1", "sentence2", "gold_label"),
        eval_splits=("validation_matched", "validation_mismatched"),
    ),
    "qnli": Task(Columns("question", "sentence"), Columns("question", "sentence")),
    "rte": Task(_SENTENCES, _SENTENCES),
}
CLASSIFICATION_METRICS = ("accuracy", "mcc", "f1")
REGRESSION_METRICS = ("pearson", "spearman", "mse")
