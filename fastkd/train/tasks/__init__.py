"""Tasks, one file each; the file name is the task's name.

``some_task.py`` defines the task some-task as ``TASK``, a subclass of `Task`.
"""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastkd.train import files
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns
from fastkd.train.glue import GLUE_TASKS

if TYPE_CHECKING:  # with torch, whose import takes seconds
    from fastkd.train.tasks.base import Task

__all__ = ["NAMES", "Columns", "check", "named", "of_file", "of_model"]

NAMES = tuple(
    sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(__path__)
        if module.name != "base"
    )
)
# Task without --task, unless the file or the model belongs to one task only.
DEFAULT_TASK = "classification"
# Values of --task that do not name a kind of task.
NO_KIND = (None, *GLUE_TASKS)
# For the help of --task.
KINDS = (
    f"{DEFAULT_TASK} (default), {', '.join(name for name in NAMES if name != DEFAULT_TASK)}, or "
    "your own as package.module:Class"
)


def check(name: str | None, metric: str | None = None) -> None:
    """Raise unless --task ``name`` is a GLUE task, one of `NAMES`, or package.module:Class.

    A --metric must be one of the task, or of any task without a name.
    """
    known = (*NAMES, *GLUE_TASKS)
    if name is not None and ":" not in name and name not in known:
        raise InputError(f"--task {name!r} is not an option; {nearest(name, known)}")
    if metric is None:
        return
    kinds = map(named, NAMES) if name in NO_KIND else [named(name)]
    metrics = dict.fromkeys(x for one in kinds for x in one.metrics)
    if metric not in metrics:
        raise InputError(f"--metric {metric!r} is not an option; {nearest(metric, metrics)}")


def named(name: str | None) -> "type[Task]":
    """The class of the task ``name``, or of a user's package.module:Class."""
    name = DEFAULT_TASK if name is None or name in GLUE_TASKS else name
    if ":" not in name:
        module = name.replace("-", "_")
        return importlib.import_module(f"{__name__}.{module}").TASK
    if "" not in sys.path:
        sys.path.append("")  # the console script, unlike python -m, does not have it
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise InputError(f"--task {name}: {error}") from error
    from fastkd.train.tasks.base import Task

    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise InputError(f"--task {name}: {module} has no Task called {attribute!r}")
    return found


def of_file(name: str | None, path: Path | None) -> "type[Task]":
    """The task of --task ``name``; without a kind the only task that reads such a file, or the
    default."""
    ending = "" if path is None else files.kind_of(path)
    if name in NO_KIND and ending and ending not in files.READERS:
        for task in map(named, NAMES):
            if ending in task.readers:
                return task
    return named(name)


def of_model(who: str, name: str | None, trained: str | None, config: Any) -> "type[Task]":
    """The task ``name``; without a name that of the model's training or head, or the default.

    ``trained`` was read from the folder of the model, called ``who``. It must be the name of a task
    of fastkd: a user's class is code, which only the command line may name.
    """
    name = None if name in NO_KIND else name
    if name is None and trained is not None and trained not in NAMES:
        raise InputError(
            f"{who}: it was trained with --task {trained!r}, which is not a task of fastkd; "
            "pass --task, which imports such a class"
        )
    if name is not None or trained is not None:
        return named(name or trained)
    problem = getattr(config, "problem_type", None)
    for task in map(named, NAMES):
        if problem is not None and task.problem == problem:
            return task
    usual = named(None)
    for head in config.architectures or ():
        endings = ((task, task.head.removeprefix("AutoModel")) for task in map(named, NAMES))
        fitting = [task for task, ending in endings if ending and head.endswith(ending)]
        if fitting and usual not in fitting:
            return fitting[0]
    return usual
