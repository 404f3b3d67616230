"""Predictions, scores, sizes and times of models."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from fastkd.distributed import world_size
from fastkd.models.hooks import on_device
from fastkd.models.inputs import accepted
from fastkd.train import processes, sharding
from fastkd.train.arrow_rows import Encoded
from fastkd.train.config import Config
from fastkd.train.loading import Data, Sets, encoder
from fastkd.train.processes import Computation
from fastkd.train.progress import Display, counted
from fastkd.train.tasks.base import Task

#: Timed forward passes of each model, after one that isn't.
REPEATS = 5


@dataclass(frozen=True)
class Run:
    """A command's options and arithmetic, the rows that it read, and its display."""

    config: Config
    computation: Computation
    data: Data
    sets: Sets
    display: Display


@dataclass(frozen=True)
class Judged:
    """Scores of a model, its answers by the suffix of their rows, and why they look useless."""

    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)
    warning: str | None = None


def judge(
    run: Run,
    model: nn.Module,
    sets: Mapping[str, Encoded] | None = None,
    who: str = "",
    teacher: bool = False,
) -> Judged:
    """All metrics of ``model`` on all ``sets`` of rows; by default the evaluation rows.

    For a model called ``who`` a warning is printed if the answers look useless. ``teacher``: the
    model reads the teacher's tokens, and metrics may compare with its answers.
    """
    data, metrics, found = run.data, run.data.corpus.metrics, Judged()
    task, warning = data.task, None
    for suffix, rows in (run.sets.evals if sets is None else sets).items():
        read, tokenizer = rows, data.tokenizer
        if teacher and data.teacher_tokenizer is not None:
            read, tokenizer = cast(Encoded, rows.teacher_encoded), data.teacher_tokenizer
        with on_device(model):
            answers = predict(model, read, task, tokenizer, run.computation)
        if teacher and not task.teacher_metrics.isdisjoint(metrics):
            rows.teacher_answers = answers
        found.answers[suffix] = answers
        why = task.sanity_warning(answers, rows) if who and finite(answers) else None
        if why:
            where = f"{len(rows)} evaluation rows{f' ({suffix})' if suffix else ''}"
            run.display.say(f"warning: the {who}'s answers to the {where} {why}")
            warning = why
        for name, value in score(task, metrics, answers, rows).items():
            found.scores[f"{name}_{suffix}" if suffix else name] = value
    return dataclasses.replace(found, warning=warning)


def predict(
    model: nn.Module,
    examples: Encoded,
    task: Task,
    tokenizer: Any,
    computation: Computation,
    display: Display | None = None,
) -> Any:
    """`Task.answer` of ``model`` for all rows, in eval mode, without random numbers.

    Returns an array if `Task.answer` returns arrays, else a list. Several processes share the rows,
    and each of them returns all answers.
    """
    was_training = model.training
    model.eval()
    order, parts, size = examples.by_length, list[Any](), 2 * computation.own_rows
    ranks, collate = world_size(), task.collator(tokenizer)
    together = ranks > 1 and sharding.sharded(model)
    number = len(range(processes.rank() * size, len(order), ranks * size))
    batches = examples.batches(collate, size, order, shared=True, device=computation.device)
    if display is not None:
        batches = counted(batches, display, f"{len(order)} rows", number)
    try:
        with torch.no_grad(), computation.autocast():
            for batch in batches:
                parts.append(task.answer(model, batch, tokenizer))
            if together and number < -(-len(order) // (ranks * size)):  # others have another batch
                (spare,) = itertools.islice(
                    examples.batches(collate, 1, device=computation.device), 1
                )
                task.answer(model, spare, tokenizer)
    finally:
        model.train(was_training)
    by_rank = processes.all_gather(parts)
    found = [by_rank[i % len(by_rank)][i // len(by_rank)] for i in range(-(-len(order) // size))]
    back = np.argsort(order)
    if isinstance(found[0], np.ndarray):
        return np.concatenate(found)[back]
    answers = [one for part in found for one in part]
    return [answers[i] for i in back]


def finite(answers: Any) -> bool:
    """Whether all numbers in ``answers`` are finite."""
    if isinstance(answers, np.ndarray):
        return bool(np.isfinite(answers).all())
    if isinstance(answers, list | tuple):
        return all(map(finite, answers))
    return not isinstance(answers, float) or math.isfinite(answers)


def score(task: Task, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
    """The given metrics of ``answers``, by name; NaN if the answers are not finite."""
    if not finite(answers):
        return dict.fromkeys(metrics, math.nan)
    compared = not task.teacher_metrics.isdisjoint(metrics)
    found = task.agreement(answers, examples) if compared else {}
    rest = [name for name in metrics if name not in found]
    if rest:
        found |= task.scores(rest, answers, examples)
    return {name: float(found[name]) for name in metrics}


def rows_by_teacher(run: Run, max_length: int) -> dict[str, dict[str, Encoded]]:
    """For each teacher that has any, its evaluation rows by the suffix of a metric's name."""
    found = dict[str, dict[str, Encoded]]()
    for suffix, rows in run.data.corpus.evals.items():
        names = list(rows.column("teacher"))
        for name in run.data.row_teachers:
            own = [i for i, other in enumerate(names) if other == name]
            if own:
                encoded = encoder(run.data, max_length)(rows.select(own))
                found.setdefault(name, {})[suffix] = encoded
    return found


def seconds_a_batch(
    run: Run, student: nn.Module, teacher: nn.Module | None = None
) -> dict[str, float]:
    """Seconds for a forward pass of up to 32 rows: medians over interleaved repeats."""
    data, rows, device = run.data, run.sets.evals[""], run.computation.device
    tokenizers, models = {"student": data.tokenizer}, {"student": student.eval()}
    if teacher is not None:
        models["teacher"] = teacher.eval()
        tokenizers["teacher"] = data.teacher_tokenizer or data.tokenizer
    inputs, seconds = {}, dict[str, list[float]]()
    for who, tokenizer in tokenizers.items():
        read = rows if who == "student" else rows.teacher_encoded or rows
        inputs[who] = next(read.batches(data.task.collator(tokenizer), 32, device=device))
        if not getattr(student.config, "is_encoder_decoder", False):  # its decoder reads them
            inputs[who].pop("labels", None)
    wait: Any = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(1 + REPEATS):
        for who, model in models.items():
            with torch.no_grad(), on_device(model):
                wait()
                start = time.perf_counter()
                model(**accepted(model, inputs[who]))
                wait()
                seconds.setdefault(who, []).append(time.perf_counter() - start)
    return {who: statistics.median(times[1:]) for who, times in seconds.items()}
