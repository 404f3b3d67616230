"""Tokens of a task's rows, encoded once and cached in an Arrow file."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.train.arrow_rows import (
    BATCH,
    Encoded,
    Rows,
    file_fingerprint,
    fingerprint,
    locked,
    tokenizer_fingerprint,
    writing,
)
from fastkd.train.errors import InputError, nearest
from fastkd.train.tasks.base import Task

FEW = 8  # with fewer rows, all tokens may be unknown


def code_fingerprints(task: type[Task]) -> list[str]:
    """The name of a task and the fingerprints of its source files, those of its bases included."""
    files = dict.fromkeys(inspect.getfile(part) for part in task.__mro__ if part is not object)
    return [task.name(), *(file_fingerprint(Path(file)) for file in files)]


class Encoder:
    """Callable that encodes the rows of a task; results are cached on disk."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        task: Task,
        teachers: Any = None,
        by_row: Sequence[str] = (),
    ):
        self.tokenizer, self.max_length, self.task = tokenizer, max_length, task
        #: Names of the teachers of which each row has one, whose number is ``teacher_id``.
        self.by_row = by_row
        #: The teacher's tokenizer, of rows with the tokens of both models.
        self.teachers = teachers
        self.parts = [tokenizer_fingerprint(tokenizer), str(max_length)]
        if teachers is not None:
            self.parts.append(tokenizer_fingerprint(teachers))
        for module in ("transformers", "tokenizers"):
            self.parts.append(getattr(require(module, "train"), "__version__", ""))
        self.parts += [repr(task), *by_row, *code_fingerprints(type(task))]

    def __call__(self, rows: Rows) -> Encoded:
        data, task = rows.data, self.task
        added = max(1, self.tokenizer.num_special_tokens_to_add(pair=rows.paired))
        if added >= self.max_length:
            what = "a pair" if rows.paired else "a text"
            raise InputError(
                f"--max-length {self.max_length}: leaves no room for text, as the tokenizer "
                f"adds {added} tokens to {what}; give a larger one"
            )
        name = fingerprint(f"{part}\0".encode() for part in (data._fingerprint, *self.parts))

        def encode(batch: dict[str, list]) -> dict[str, list]:
            batch = dict(batch)
            batch["where"] = [f"{rows.source}, row {number}" for number in batch["number"]]
            if self.teachers is None:
                found = dict(task.encode(batch, self.tokenizer, self.max_length))
            else:
                both = self.tokenizer, self.teachers
                found = dict(task.encode_both(batch, *both, self.max_length))
            found.setdefault("number", batch["number"])
            if self.by_row:
                numbers = map(self._teacher, batch["teacher"], batch["where"])
                number_of = dict(zip(batch["number"], numbers, strict=True))
                found["teacher_id"] = [number_of[row] for row in found["number"]]
            for number, ids in zip(found["number"], found["input_ids"], strict=True):
                if not ids:
                    raise InputError(f"{rows.source}, row {number}: no token is left of it")
            found.setdefault("length", [len(ids) for ids in found["input_ids"]])
            return found

        with writing(rows.source), locked(data, name):
            tokens = data.map(
                encode,
                batched=True,
                batch_size=BATCH,
                writer_batch_size=BATCH,
                remove_columns=data.column_names,
                new_fingerprint=name,
            )
        aside = ["number", "length", *task.evaluation_columns]
        encoded = Encoded(
            tokens.remove_columns(aside), tokens.select_columns(aside), [rows], [len(tokens)]
        )
        self._check_known(rows, encoded)
        return encoded

    def _teacher(self, name: str, where: str) -> int:
        """The number of a row's teacher."""
        if name not in self.by_row:
            raise InputError(
                f"{where}: its teacher is {name!r}; {nearest(name, self.by_row)} (--teachers)"
            )
        return self.by_row.index(name)

    def _check_known(self, rows: Rows, encoded: Encoded) -> None:
        """Raise if all tokens are unknown: a tokenizer without its files raises no error itself."""
        first = encoded.tokens[:BATCH]["input_ids"]
        found = {int(i) for ids in first for i in np.concatenate([np.ravel(x) for x in ids])}
        words = found - {i for i in self.tokenizer.all_special_ids if i is not None}
        if not words and len(rows) >= FEW:
            raise InputError(
                f"{rows.source}: the tokenizer knows no word of the first "
                f"{min(BATCH, len(rows))} rows; its files are missing, or it is another's"
            )
