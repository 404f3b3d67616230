"""The GLUE tasks: their columns and metrics."""

from dataclasses import dataclass

from fastkd.train.files import Columns


@dataclass(frozen=True)
class Glue:
    """A GLUE task: its columns on the hub and in GLUE's own files, its metrics and splits."""

    hub: Columns
    file: Columns
    metrics: tuple[str, ...] = ("accuracy",)
    regression: bool = False
    eval_splits: tuple[str, ...] = ("validation",)


_SENTENCES = Columns("sentence1", "sentence2")
HUB = "nyu-mll/glue"
GLUE_TASKS = {
    "cola": Glue(Columns("sentence"), Columns("3", None, "1", header=False), ("mcc",)),
    "sst2": Glue(Columns("sentence"), Columns("sentence")),
    "mrpc": Glue(_SENTENCES, Columns("#1 String", "#2 String", "Quality"), ("f1", "accuracy")),
    "stsb": Glue(
        _SENTENCES,
        Columns("sentence1", "sentence2", "score"),
        ("pearson", "spearman"),
        regression=True,
    ),
    "qqp": Glue(
        Columns("question1", "question2"),
        Columns("question1", "question2", "is_duplicate"),
        ("f1", "accuracy"),
    ),
    "mnli": Glue(
        Columns("premise", "hypothesis"),
        Columns("sentence1", "sentence2", "gold_label"),
        eval_splits=("validation_matched", "validation_mismatched"),
    ),
    "qnli": Glue(Columns("question", "sentence"), Columns("question", "sentence")),
    "rte": Glue(_SENTENCES, _SENTENCES),
}
