"""The right one of several choices for a question, or for the beginning of a text."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.files import Columns, field, settle_columns, text_of, words_of
from fastkd.train.labels import as_number
from fastkd.train.tasks import base
from fastkd.train.tasks.classification import useless_classes

QUESTION, CHOICES = "question", "choices"
# SWAG: the context, the beginning of the next sentence, and its endings.
CONTEXT, BEGINNING, ENDING = "sent1", "sent2", "ending"


@dataclass(frozen=True)
class MultipleChoice(base.Task):
    """Columns ``question``, ``choices`` and ``label``, the number of a choice from 0; or SWAG's.

    A model reads the question with each choice, and all rows of a file have equally many.
    """

    metrics = ("accuracy",)
    unlabelled = True
    no_label = UNLABELLED
    short_column = "label"
    head = "AutoModelForMultipleChoice"
    head_name = "multiple choice head"
    pipeline = "multiple-choice"
    collator_class = "DataCollatorForMultipleChoice"
    columns = Columns(QUESTION, CHOICES, "label")
    stored: ClassVar[Mapping[str, Any]] = {"text": base.TEXT, "pair": [base.TEXT], "label": "int64"}
    summary = "It chooses one of some answers to a question."
    usage = (
        f"{base.LOADING}"
        'question, choices = "...", ["...", "..."]\n'
        "pairs = tokenizer([question] * len(choices), choices, padding=True, "
        'return_tensors="pt")\n'
        "scores = model(**{name: x[None] for name, x in pairs.items()}).logits[0]\n"
        "print(choices[scores.argmax()])"
    )

    #: Number of choices of a training row, 0 if unknown.
    choices: int = 0

    @classmethod
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        usual = (columns.text, columns.pair) == (QUESTION, CHOICES)
        if usual and QUESTION not in record and {CONTEXT, f"{ENDING}0"} <= record.keys():
            columns = replace(columns, text=CONTEXT, pair=f"{ENDING}0")
        return settle_columns(columns, record, source)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        row: dict[str, Any] = {"text": text_of(record, columns.text, where)}
        if columns.pair == f"{ENDING}0":
            begins = text_of(record, BEGINNING, where) if BEGINNING in record else ""
            names = itertools.takewhile(
                record.__contains__, (f"{ENDING}{i}" for i in itertools.count())
            )
            row["pair"] = [f"{begins} {text_of(record, name, where)}".strip() for name in names]
        else:
            row["pair"] = words_of(record, columns.pair, where)
        count = len(row["pair"])
        if count < 2:
            raise InputError(f"{where}: column {columns.pair!r} holds {count} choices")
        if columns.label is not None:
            label = field(record, columns.label, where)
            number = as_number(label)
            if number is None or not 0 <= number < count or number != int(number):
                raise InputError(
                    f"{where}: label {label!r:.40} is none of the choices 0 to {count - 1}"
                )
            row["label"] = int(number)
        return row

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: base.LabelInfo) -> base.Task:
        return cls(_count(train))

    def read_labels(self, rows: Rows, unknown: str = base.UNKNOWN) -> base.Prepared:
        _count(rows)
        return base.Prepared(self, rows)

    def without_labels(self, rows: Rows) -> Rows:
        count = _count(rows)
        if self.choices not in (0, count):
            raise InputError(
                f"{rows.source}: {count} choices where the training rows have {self.choices}"
            )
        return super().without_labels(rows)

    def describe(self, corpus: base.Corpus) -> Iterator[str]:
        yield f"{self.choices} choices"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> base.Tokens:
        return {**paired_tokens(batch, tokenizer, max_length), "labels": batch["label"]}

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        return {"accuracy": float((answers.argmax(-1) == examples.labels).mean())}

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        names = [f"choice {i}" for i in range(answers.shape[-1])]
        return useless_classes(answers.argmax(-1), examples.labels, names)

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        likely = torch.from_numpy(answers).double().softmax(-1)
        found = []
        for choices, x in zip(examples.rows.column("pair"), likely, strict=True):
            best = int(x.argmax())
            row = {"label": best, "choice": choices[best]}
            found.append({**row, **base.probabilities(range(len(choices)), x)})
        return found


def paired_tokens(
    batch: Mapping[str, list], tokenizer: Any, max_length: int
) -> dict[str, list[Any]]:
    """Tokens of each row's text with each of its ``pair``, lists of lists, and their length."""
    pairs = list(zip(batch["text"], batch["pair"], strict=True))
    firsts = [question for question, choices in pairs for _ in choices]
    seconds = [choice for _, choices in pairs for choice in choices]
    flat = tokenizer(firsts, seconds, truncation=True, max_length=max_length)
    ends = np.cumsum([0, *(len(choices) for _, choices in pairs)]).tolist()
    found = {
        name: [values[at:end] for at, end in itertools.pairwise(ends)]
        for name, values in flat.items()
    }
    return {**found, "length": [max(map(len, ids)) for ids in found["input_ids"]]}


def _count(rows: Rows) -> int:
    """Number of choices of a row; raises if rows have different numbers."""
    kept = ((number, len(choices)) for number, choices in rows.columns("number", "pair"))
    first, count = next(kept)
    for number, other in kept:
        if other != count:
            raise InputError(
                f"{rows.source}, row {number}: {other} choices where row {first} has {count}"
            )
    return count


TASK = MultipleChoice
