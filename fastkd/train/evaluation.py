"""Predictions of a model over encoded rows, and their metrics."""

import itertools
import math
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkd._core.extras import require
from fastkd.distributed import world_size
from fastkd.train import processes, sharding
from fastkd.train.arrow_rows import Encoded
from fastkd.train.processes import Computation
from fastkd.train.progress import Display, counted
from fastkd.train.tasks.base import Task


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
    number, batches = examples.shared(collate, size, computation.device)
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
    found = task.agreement(metrics, answers, examples)
    rest = [name for name in metrics if name not in found]
    if rest:
        found |= task.scores(rest, answers, examples)
    return {name: float(found[name]) for name in metrics}


# Standard deviations above the mean that one in twenty random orders exceeds in agreement.
CHANCE = 1.645


def useless_classes(answers: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> str | None:
    """Why class ids look useless: constant, or no better than a random permutation."""
    if np.ptp(labels) == 0:
        return None
    if np.ptp(answers) == 0:
        return f"are all {names[answers[0]]!r}"
    # Accuracy above that of randomly permuted answers, in standard deviations.
    rows, classes = len(labels), len(names)
    given, true = (np.bincount(x, minlength=classes).astype(float) for x in (answers, labels))
    mean = given * true / rows
    # Counts on the diagonal of a table with these margins: multivariate hypergeometric.
    variance = (mean * (rows - given) * (rows - true)).sum() / rows + mean.sum() ** 2
    variance = (variance - (mean**2).sum()) / (rows - 1)
    better = ((answers == labels).sum() - mean.sum()) / np.sqrt(variance) > CHANCE
    return None if better else "are no better than chance"


def useless_numbers(answers: np.ndarray, labels: np.ndarray) -> str | None:
    """Why numbers look useless: constant, or not correlated with ``labels``."""
    if np.ptp(labels) == 0:
        return None
    if np.ptp(answers) == 0:
        return f"are all {answers[0]:.4g}"
    stats = require("scipy.stats", "train")
    by_chance = stats.pearsonr(answers, labels, alternative="greater").pvalue > 0.05
    return "are no better than chance" if by_chance else None


def class_scores(
    metrics: Sequence[str], logits: np.ndarray, labels: np.ndarray, positive: int = 1
) -> dict[str, float]:
    """At least the given metrics of ``logits`` (rows, classes).

    F1 is that of class ``positive`` of two classes, or the mean over more; the correlation with a
    constant is 0.
    """
    found = logits.argmax(-1)
    scores = {"accuracy": (found == labels).mean()}
    if scores.keys() >= {*metrics}:  # without the second that scikit-learn's import takes
        return scores
    library: Any = require("sklearn.metrics", "train")
    average = "binary" if logits.shape[-1] == 2 else "macro"
    constant = np.ptp(found) == 0 or np.ptp(labels) == 0
    f1 = library.f1_score(labels, found, average=average, pos_label=positive, zero_division=0.0)
    mcc = 0.0 if constant else library.matthews_corrcoef(labels, found)
    return {**scores, "mcc": mcc, "f1": f1}


def number_scores(numbers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Metrics of ``numbers`` (rows,); the correlation with a constant is 0."""
    stats: Any = require("scipy.stats", "train")
    constant = np.ptp(numbers) == 0 or np.ptp(labels) == 0
    return {
        "pearson": 0.0 if constant else stats.pearsonr(numbers, labels)[0],
        "spearman": 0.0 if constant else stats.spearmanr(numbers, labels)[0],
        "mse": ((numbers - labels) ** 2).mean(),
    }


def rouge_l(generated: Sequence[str], references: Sequence[str]) -> float:
    """rouge-score's mean F-measure of ROUGE-L, without stemming.

    rouge-score's own tokenizer drops all but ASCII letters and digits. `Words` gives the same words
    for such text, and words of other scripts.
    """
    scorer = require("rouge_score.rouge_scorer", "tasks").RougeScorer(["rougeL"], tokenizer=Words())
    pairs = zip(references, generated, strict=True)
    return math.fsum(scorer.score(*pair)["rougeL"].fmeasure for pair in pairs) / len(references)


class Words:
    """Tokenizer of lower-case words; in scripts without spaces each letter is a word.

    A text without letters and digits is split into characters.
    """

    def __init__(self) -> None:
        unspaced = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
        self.pattern = require("regex", "tasks").compile(
            rf"(?V1)[{unspaced}&&[\p{{L}}\p{{N}}]]\p{{M}}*"
            rf"|[[\p{{L}}\p{{N}}]--{unspaced}][[\p{{L}}\p{{N}}\p{{M}}]--{unspaced}]*"
        )

    def tokenize(self, text: str) -> list[str]:
        text = unicodedata.normalize("NFKC", text.lower())
        return self.pattern.findall(text) or [x for x in text if not x.isspace()]
