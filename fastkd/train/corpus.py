"""The rows of a run, and the task that they are of."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastkd.train.arrow_rows import Rows

if TYPE_CHECKING:
    from fastkd.train.tasks.base import Task


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation rows with what their task makes of the labels.

    ``evals`` maps the suffix of a metric's name to its rows: "" for the main set, "mm" for MNLI
    mismatched. ``test`` rows are scored once, at the end; ``unlabelled`` ones carry what losses on
    labels leave out. Of the ``metrics`` the first picks the best model.
    """

    train: Rows
    evals: dict[str, Rows]
    task: "Task"
    metrics: tuple[str, ...]
    test: Rows | None = None
    unlabelled: Rows | None = None
    #: Lines to be read: how many rows are marked as having no label, ...
    without_labels: tuple[str, ...] = ()
    #: ... and how numbers were read as the classes of a head.
    reading: str = ""

    @property
    def names(self) -> list[str] | None:
        """What the outputs of the head are called, if they have names."""
        return self.task.names
