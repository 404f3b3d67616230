"""The rows of a run, and their task."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastkd.train.arrow_rows import Rows

if TYPE_CHECKING:
    from fastkd.train.tasks.base import Task


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation rows with the task fitted to them.

    ``evals`` maps the suffix of a metric's name to its rows: "" for the main set, "mm" for MNLI
    mismatched. ``test`` rows are scored once, at the end. ``unlabelled`` rows train all losses but
    those on labels. The first of the ``metrics`` selects the best model.
    """

    train: Rows
    evals: dict[str, Rows]
    task: "Task"
    metrics: tuple[str, ...]
    test: Rows | None = None
    unlabelled: Rows | None = None
    #: Lines to print: how many rows have no label, ...
    without_labels: tuple[str, ...] = ()
    #: ... and how numbers were read as the classes of a head.
    reading: str = ""

    @property
    def names(self) -> list[str] | None:
        """Class names of the head; None if it has none."""
        return self.task.names
