"""The right one of some choices that a question, or the beginning of a text, has."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fastkd._core.extras import require
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.corpus import Corpus
from fastkd.train.errors import InputError
from fastkd.train.evaluation import doubt
from fastkd.train.input_columns import Columns, field, holds_text, settle_columns, text_of, words_of
from fastkd.train.label_values import as_number
from fastkd.train.tasks.base import (
    LABEL,
    Collate,
    DefaultPaddingSide,
    FittedTask,
    LabelInfo,
    Task,
    Tokens,
    probabilities,
)

QUESTION, CHOICES = "question", "choices"
# SWAG: what was said, how the next sentence begins, and its ends.
CONTEXT, BEGINNING, ENDING = "sent1", "sent2", "ending"
SWAG_ENDINGS = 4


@dataclass(frozen=True)
class MultipleChoice(Task):
    """Columns ``question``, ``choices`` and ``label``, the number of a choice from 0; or SWAG's.

    A model reads the question with each choice, and all rows of a file have equally many.
    """

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    default_metrics: ClassVar[tuple[str, ...]] = metrics
    head: ClassVar[str] = "AutoModelForMultipleChoice"
    head_name: ClassVar[str] = "multiple choice head"
    pipeline: ClassVar[str] = "multiple-choice"
    columns: ClassVar[Columns] = Columns(QUESTION, CHOICES, LABEL)

    #: How many choices the training rows have, 0 where nobody knows.
    choices: int = 0

    @classmethod
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        usual = (columns.text, columns.pair) == (QUESTION, CHOICES)
        if usual and QUESTION not in record and {CONTEXT, f"{ENDING}0"} <= record.keys():
            columns = replace(columns, text=CONTEXT, pair=f"{ENDING}0")
        return settle_columns(columns, record, source)

    @classmethod
    def features(cls, columns: Columns) -> dict[str, Any]:
        kept = {QUESTION: "large_string", CHOICES: ["large_string"]}
        return kept if columns.label is None else {**kept, LABEL: "int64"}

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        row: dict[str, Any] = {QUESTION: text_of(record, columns.text, where)}
        if columns.pair == f"{ENDING}0":
            row[CHOICES] = _endings(record, where)
        else:
            row[CHOICES] = words_of(record, columns.pair, where)
        count = len(row[CHOICES])
        if count < 2:
            raise InputError(f"{where}: column {columns.pair!r} holds {count} choices")
        if columns.label is not None:
            row[LABEL] = _place(field(record, columns.label, where), count, where)
        return row

    @classmethod
    def has_text(cls, row: Mapping[str, Any]) -> bool:
        return holds_text(row[QUESTION], *row[CHOICES])

    @classmethod
    def hub_columns(cls, columns: Columns) -> list[str]:
        names = super().hub_columns(columns)
        if columns.pair != f"{ENDING}0":
            return names
        return [*names, BEGINNING, *(f"{ENDING}{i}" for i in range(1, SWAG_ENDINGS))]

    @classmethod
    def declared_classes(cls, feature: Any) -> list[str] | None:
        return None

    @classmethod
    def texts(cls, rows: Rows) -> list[str]:
        return [" ".join((text, *more)) for text, more in rows.columns(QUESTION, CHOICES)]

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> FittedTask:
        task = cls(_count(train))
        for rows in evals.values():
            _count(rows)
        return FittedTask(task, train, evals)

    def unlabelled(self, rows: Rows) -> Rows:
        count = _count(rows)
        if self.choices not in (0, count):
            raise InputError(
                f"{rows.source}: {count} choices where the training rows have {self.choices}"
            )
        return rows.without(LABEL)

    def without_labels(self, rows: Rows) -> Rows:
        return replace(self, choices=0).unlabelled(rows)

    def strata(self, rows: Rows) -> Sequence[int]:
        return rows.data[LABEL][:]

    def describe(self, corpus: Corpus) -> Iterator[str]:
        yield f"{self.choices} choices"

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        if asked is not None:
            super().read_labels(rows, asked)
        _count(rows)
        return rows, ()

    def added_tokens(self, tokenizer: Any, rows: Rows) -> tuple[int, str]:
        return tokenizer.num_special_tokens_to_add(pair=True), "a question and a choice"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        pairs = list(zip(batch[QUESTION], batch[CHOICES], strict=True))
        firsts = [question for question, choices in pairs for _ in choices]
        seconds = [choice for _, choices in pairs for choice in choices]
        flat = tokenizer(firsts, seconds, truncation=True, max_length=max_length)
        ends = np.cumsum([0, *(len(choices) for _, choices in pairs)]).tolist()
        found = {
            name: [values[at:end] for at, end in itertools.pairwise(ends)]
            for name, values in flat.items()
        }
        lengths = [max(map(len, ids)) for ids in found["input_ids"]]
        labels = batch.get(LABEL, [UNLABELLED] * len(pairs))
        return {**found, "labels": labels, "length": lengths}

    def collator(self, tokenizer: Any) -> Collate:
        transformers: Any = require("transformers", "train")
        return DefaultPaddingSide(transformers.DataCollatorForMultipleChoice(tokenizer), tokenizer)

    def samples(self, tokenizer: Any, longest: int) -> list[dict[str, torch.Tensor]]:
        found = super().samples(tokenizer, longest)
        return [
            {name: torch.stack([x] * count, 1) for name, x in batch.items()}
            for batch, count in zip(found, (3, 4), strict=True)
        ]

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        if not self.finite(answers):
            return dict.fromkeys(metrics, float("nan"))
        return {"accuracy": float((answers.argmax(-1) == self.references(examples)).mean())}

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        names = [f"choice {i}" for i in range(answers.shape[-1])]
        return doubt(answers, np.array(self.references(examples)), names)

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        likely = torch.from_numpy(answers).double().softmax(-1)
        found = []
        for (choices,), x in zip(examples.rows.columns(CHOICES), likely, strict=True):
            best = int(x.argmax())
            row = {LABEL: best, "choice": choices[best]}
            found.append({**row, **probabilities(range(len(choices)), x)})
        return found

    def shown_columns(self, rows: Rows) -> Iterator[dict[str, Any]]:
        kept = rows.columns(QUESTION, CHOICES)
        return ({QUESTION: question, CHOICES: choices} for question, choices in kept)

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        return answers.argmax(-1).tolist()

    def references(self, examples: Encoded) -> list[Any]:
        return examples.rows.data[LABEL][:]

    @classmethod
    def about(cls, report: Mapping[str, Any]) -> str:
        return "It chooses one of some answers to a question."

    @classmethod
    def usage(cls, report: Mapping[str, Any], directory: str) -> str:
        return (
            f"{cls.loading_code(directory)}"
            'question, choices = "...", ["...", "..."]\n'
            "pairs = tokenizer([question] * len(choices), choices, padding=True, "
            'return_tensors="pt")\n'
            "scores = model(**{name: x[None] for name, x in pairs.items()}).logits[0]\n"
            "print(choices[scores.argmax()])"
        )


def _endings(record: dict[str, Any], where: str) -> list[str]:
    """SWAG's sentences: each of the ends behind their common beginning."""
    begins = text_of(record, BEGINNING, where) if BEGINNING in record else ""
    names = itertools.takewhile(record.__contains__, (f"{ENDING}{i}" for i in itertools.count()))
    return [f"{begins} {text_of(record, name, where)}".strip() for name in names]


def _place(label: Any, count: int, where: str) -> int:
    number = as_number(label)
    if number is None or not 0 <= number < count or number != int(number):
        raise InputError(f"{where}: label {label!r:.40} is none of the choices 0 to {count - 1}")
    return int(number)


def _count(rows: Rows) -> int:
    """How many choices each row has, and all must have as many."""
    kept = ((number, len(choices)) for number, choices in rows.columns("number", CHOICES))
    first, count = next(kept)
    for number, other in kept:
        if other != count:
            raise InputError(
                f"{rows.source}, row {number}: {other} choices where row {first} has {count}"
            )
    return count


TASK = MultipleChoice
