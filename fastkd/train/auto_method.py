"""`--method auto`: the method of each kind of task, which a study found."""

from dataclasses import replace
from typing import NamedTuple

from fastkd.train import tasks
from fastkd.train.config import AUTO, Config
from fastkd.train.tasks.base import Task

#: The page with the study, and the method of each kind in a table.
PAGE = "docs/studies/method_by_task.md"


class Choice(NamedTuple):
    """A method, and why it is taken."""

    method: str
    why: str


_LIKE = "not studied; that of "
#: By the name of the task. `PAGE` has the same table, which a test compares.
METHODS = {
    "causal-lm": Choice("fcd", "above soft targets beyond noise"),
    "chat": Choice("fcd", _LIKE + "causal-lm"),
    "classification": Choice("soft_targets", "nothing is above it beyond noise"),
    "embedding": Choice("lrkd", "above FCD, MC3KD and LRC-BERT beyond noise"),
    "masked-lm": Choice("fcd", _LIKE + "causal-lm"),
    "multi-label": Choice("soft_targets", _LIKE + "classification"),
    "multiple-choice": Choice("soft_targets", _LIKE + "classification"),
    "question-answering": Choice("soft_targets", _LIKE + "token-classification"),
    "regression": Choice("fcd", "above soft targets beyond noise, cheaper than MC3KD"),
    "reranking": Choice("soft_targets", "not studied; KL over each list"),
    "seq2seq": Choice("fcd", _LIKE + "causal-lm"),
    "token-classification": Choice("soft_targets", "nothing is above it beyond noise"),
}


def kind_of(task: Task | type[Task]) -> str | None:
    """The kind in `METHODS` of a task; for a user's own the one it derives from, or its head's."""
    kind = task if isinstance(task, type) else type(task)
    bases = [base for base in kind.__mro__ if issubclass(base, Task) and base is not Task]
    alike = [other for other in map(tasks.named, METHODS) if other.head == kind.head]
    return next((x.name() for x in (*bases, *alike) if x.name() in METHODS), None)


def choose(task: Task | type[Task], own_tokens: bool = False) -> Choice:
    """The method for ``task``; ``own_tokens``: the tokenizer is the student's own."""
    kind = kind_of(task)
    if kind is None:
        return Choice("soft_targets", f"--task {task.name()} is of no kind that was studied")
    found, why = METHODS[kind]
    if own_tokens and task.head != "AutoModel":
        return Choice("soft_targets", "the student has a tokenizer of its own")
    return Choice(found, f"--task {kind}: {why} ({PAGE})")


def settled(
    config: Config, task: Task, own_tokens: bool = False, kept: str | None = None
) -> tuple[Config, str]:
    """``config`` with the method that auto takes, and the line that says so; ``kept``: that of
    the run to resume."""
    if config.method != AUTO:
        return config, ""
    found, why = choose(task, own_tokens) if kept is None else (kept, "as the run began")
    return replace(config, method=found), f"method {found} (--method {AUTO}): {why}"
