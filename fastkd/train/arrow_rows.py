"""Rows and their tokens in memory-mapped Arrow files, so that a corpus may exceed the memory.

The files are in the cache of `datasets` (HF_DATASETS_CACHE). Their names are hashes of everything
they depend on: the bytes of the source, the columns, the tokenizer, the code that read them. Each
file is written once, by the first of several processes, while the others wait for it.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkd._core.extras import MissingExtra, require
from fastkd.distill.cache import TeacherCache
from fastkd.distributed import world_size
from fastkd.integrations._rows import RowSource
from fastkd.train import processes
from fastkd.train.errors import InputError
from fastkd.train.saving import MANIFEST, STUDENT, read_json, save_tokenizer, saving

# Rows in memory at a time: texts may be long, and a tokenizer needs a hundred times their size.
BATCH = 128
# Prefix of the teacher's own inputs in a batch for a Distiller.
TEACHER_PREFIX = "teacher_"
# Class id of a row without a label, as in transformers.
UNLABELLED = -100
# Column of the classes' probabilities, where labels are distributions.
PROBABILITIES = "probabilities"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one split.

    ``data`` is a `datasets.Dataset` with the column ``number``, the number of each row in its
    source, and the columns of its task: ``text`` and, where present, ``pair`` and ``label``. A
    label that is one word is a string until the task is fitted, then a class id or a number.
    ``classes`` are the class names that the source declares, in its order.
    """

    source: str
    data: Any
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.data)

    @property
    def texts(self) -> list[str]:
        """All texts, in memory."""
        return self.data["text"][:]

    @property
    def pairs(self) -> list[str] | None:
        """All second texts, in memory."""
        return self.data["pair"][:] if "pair" in self.data.column_names else None

    @functools.cached_property
    def labels(self) -> Any:
        """All class ids or numbers, (rows,); None if the rows have neither."""
        return _numbers(self.data, "label")

    def columns(self, *names: str) -> Iterator[tuple]:
        """The values of these columns, row by row; without names of all but the row's number."""
        names = names or tuple(name for name in self.data.column_names if name != "number")
        for batch in self.data.select_columns(list(names)).iter(BATCH):
            yield from zip(*(batch[name] for name in names), strict=True)

    def column(self, name: str) -> Iterator[Any]:
        """The values of one column."""
        return (value for (value,) in self.columns(name))

    @functools.cached_property
    def raw_labels(self) -> tuple[list[str], np.ndarray]:
        """Distinct labels of the source in order of appearance, and each row's index into them."""
        column = self.data.select_columns(["label"]).with_format("arrow")[:].column("label")
        coded = column.dictionary_encode().combine_chunks()
        return coded.dictionary.to_pylist(), coded.indices.to_numpy()

    def number(self, index: int) -> int:
        """Number of row ``index`` in the source."""
        return self.data[index]["number"]

    def first_row_with_label(self, i: int) -> int:
        """Number in the source of the first row with raw label ``i``."""
        return self.number(int(np.argmax(self.raw_labels[1] == i)))

    def map_labels(self, read: Callable[[str], Any]) -> np.ndarray:
        """``read(label)`` of each row, for which it is called once for each distinct raw label.

        An InputError gets the row as a prefix.
        """
        labels, which = self.raw_labels
        found = []
        for i, label in enumerate(labels):
            try:
                found.append(read(label))
            except InputError as error:
                raise InputError(
                    f"{self.source}, row {self.first_row_with_label(i)}: {error}"
                ) from None
        return np.array(found)[which]

    def with_labels(self, labels: np.ndarray | list[list[str]]) -> "Rows":
        """Rows with these labels: numbers, or a list of names for each row."""
        if isinstance(labels, list):
            kind = features_of(["large_string"])
            data = self.without_label().data.add_column("label", labels, feature=kind)
            return replace(self, data=data)
        return replace(self, data=self.without_label().data.add_column("label", labels))

    def with_probabilities(self, found: np.ndarray) -> "Rows":
        """Rows with probabilities of the classes (rows, classes), and the most probable class."""
        rows, kind = self.with_labels(found.argmax(-1)), features_of(["float64"])
        return replace(rows, data=rows.data.add_column(PROBABILITIES, [*found], feature=kind))

    def sample(self, limit: int | None, seed: int) -> "Rows":
        """At most ``limit`` rows, drawn without replacement, in their first order."""
        if limit is None or limit >= len(self):
            return self
        return self.select(sorted(random.Random(seed).sample(range(len(self)), limit)))

    def select(self, keep: list[int]) -> "Rows":
        """The rows of these numbers, counted from 0."""
        return replace(self, data=self.data.select(keep, keep_in_memory=True))

    def without_label(self) -> "Rows":
        """Rows without their labels, if they have any."""
        known = [name for name in self.data.column_names if name in ("label", PROBABILITIES)]
        return replace(self, data=self.data.remove_columns(known))

    def followed_by(self, other: "Rows") -> "Rows":
        """These rows and the ``other`` rows, without labels."""
        data = self.without_label().data
        kept = [name for name in data.column_names if name in other.data.column_names]
        parts = [rows.data.select_columns(kept) for rows in (self, other)]
        return Rows(
            f"{self.source} and {other.source}",
            require("datasets", "train").concatenate_datasets(parts),
        )


def _numbers(data: Any, name: str) -> np.ndarray | None:
    """Column ``name`` of a data set as an array if each value is one number, else None."""
    if getattr(data.features.get(name), "dtype", None) not in ("int64", "float64"):
        return None
    return np.asarray(data.select_columns([name]).with_format("numpy")[:][name])


def fingerprint(parts: Iterable[bytes]) -> str:
    """Short hash of the concatenated bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def fingerprint_of(value: Any) -> str:
    """Fingerprint of a file or folder, rows (texts and labels), models, a tokenizer or a class."""
    if isinstance(value, Path):
        if value.is_dir():
            inside = sorted(part for part in value.rglob("*") if part.is_file())
            names = (f"{part.relative_to(value)} {fingerprint_of(part)}\0" for part in inside)
            return fingerprint(map(str.encode, names))
        with value.open("rb") as file:
            return fingerprint(iter(lambda: file.read(2**20), b""))
    if isinstance(value, Rows):
        texts = map(repr, value.columns())
        return fingerprint(repr(text).encode() for text in texts)
    if isinstance(value, type):  # its source files, those of its bases included
        value = [*dict.fromkeys(Path(inspect.getfile(x)) for x in value.__mro__ if x is not object)]
    if isinstance(value, list):
        return fingerprint(fingerprint_of(part).encode() for part in value)
    if isinstance(value, TeacherCache):
        student = read_json(value.path / STUDENT / MANIFEST).get("files")
        return fingerprint(x.encode() for x in (value.digest, json.dumps(student, sort_keys=True)))
    if isinstance(value, RowSource):
        return fingerprint([json.dumps(value.configuration()).encode()])
    if isinstance(value, nn.Module):
        weights = (x.detach().cpu().contiguous() for x in value.state_dict().values())
        return fingerprint(w.flatten().view(torch.uint8).numpy().tobytes() for w in weights)
    with saving(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as folder:
        save_tokenizer(value, Path(folder))
        parts = type(value).__name__, fingerprint_of(Path(folder))
    return fingerprint(map(str.encode, parts))


def features_of(kind: Any) -> Any:
    """`datasets` features of a type's name, of a list ``[type]``, or of columns by name."""
    library = require("datasets", "train")
    if isinstance(kind, list):
        return library.List(features_of(kind[0]))
    if isinstance(kind, Mapping):
        return library.Features({name: features_of(inner) for name, inner in kind.items()})
    return library.Value(kind)


@contextlib.contextmanager
def writing(source: str) -> Iterator[None]:
    """Context that turns errors of the cache into one InputError."""
    arrow: Any = require("pyarrow", "train")
    cache = require("datasets", "train").config.HF_DATASETS_CACHE
    try:
        yield
    except MissingExtra:
        raise
    except (OSError, arrow.ArrowInvalid) as error:
        reason = getattr(error, "strerror", None)
        if reason is None:
            raise InputError(
                f"{source}: a file of the cache is damaged ({str(error).splitlines()[0]}); "
                f"remove {Path(cache) / 'generator'}"
            ) from error
        raise InputError(
            f"{source}: its rows cannot be cached in {cache} ({reason}); "
            "set HF_DATASETS_CACHE to another directory"
        ) from error


@dataclass(eq=False)
class Encoded(torch.utils.data.Dataset):
    """Tokenized rows with labels; a collator pads them batch by batch.

    ``tokens`` has the model inputs and, where the task has them, ``labels``. The columns for the
    metrics, and ``number`` and ``length`` of each row, are in ``evaluation_columns``. ``ends`` has
    the end of each of the ``sources`` in the encoded rows.
    """

    tokens: Any
    evaluation_columns: Any
    sources: list[Rows]
    ends: list[int]
    #: The teacher's answers, where metrics compare with the teacher.
    teacher_answers: Any = None
    #: The rows encoded with the teacher's tokenizer, where that differs.
    teacher_encoded: "Encoded | None" = None

    @property
    def rows(self) -> Rows:
        """The rows before encoding."""
        (rows,) = self.sources
        return rows

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row."""
        return np.asarray(_numbers(self.evaluation_columns, "length"))

    @functools.cached_property
    def labels(self) -> Any:
        """The label of each row, (rows,); None if it is not one number."""
        return _numbers(self.tokens, "labels")

    def source_of(self, index: int) -> tuple[str, int]:
        """Source and number of the (first) row that ``index`` was encoded from."""
        part = next(i for i, end in enumerate(self.ends) if index < end)
        return self.sources[part].source, self.evaluation_columns[index]["number"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.tokens[int(index)]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return self.tokens.__getitems__(list(indices))

    def batches(
        self,
        collate: Callable,
        size: int,
        order: Sequence[int] | None = None,
        *,
        shared: bool = False,
        device: torch.device | str = "cpu",
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Padded batches of ``size`` rows in this ``order``; processes have different ones if they
        are ``shared``."""
        order = range(len(self)) if order is None else order
        rank, ranks = (processes.rank(), world_size()) if shared else (0, 1)
        for start in range(rank * size, len(order), ranks * size):
            batch = collate(self.__getitems__(list(order[start : start + size])))
            yield {name: x.to(device) for name, x in batch.items()}

    @property
    def by_length(self) -> list[int]:
        """Row indices, shortest row first."""
        return np.argsort(self.lengths, kind="stable").tolist()

    def followed_by(self, other: "Encoded") -> "Encoded":
        """These rows and the ``other`` rows."""
        join = require("datasets", "train").concatenate_datasets
        return Encoded(
            join([self.tokens, other.tokens]),
            join([self.evaluation_columns, other.evaluation_columns]),
            [*self.sources, *other.sources],
            [*self.ends, *(len(self) + end for end in other.ends)],
        )
