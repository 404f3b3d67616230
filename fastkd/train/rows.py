"""Rows and their tokens in Arrow files on disk, mapped into memory: a corpus may exceed it.

The files are those of `datasets`, in its cache (HF_DATASETS_CACHE), under names made of all they
depend on: the bytes of the source, the columns, the tokenizer, the code that read them. So each is
made once, by the first of several processes, while the others wait for it.
"""

import contextlib
import hashlib
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkd._core.extras import MissingExtra, require
from fastkd.train.errors import InputError
from fastkd.train.saving import saving

# Rows in memory at a time: texts may be long, and a tokenizer needs a hundred times their size.
BATCH = 128
FEW = 8  # rows that may all be of unknown words
CODE = ("rows.py", "data.py", "files.py")


@dataclass(frozen=True, eq=False)
class Rows:
    """One split as it was read.

    ``data`` has the columns number, text and, if there are, pair and label, the label as JSON of
    what stands in the source. ``labels`` are the encoded ones: class ids, or real numbers.
    """

    source: str
    data: Any
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.data)

    @property
    def paired(self) -> bool:
        return "pair" in self.data.column_names

    @property
    def texts(self) -> list[str]:
        """All of them, in memory."""
        return self.data["text"][:]

    @property
    def pairs(self) -> list[str] | None:
        """All second texts, in memory."""
        return self.data["pair"][:] if self.paired else None

    def columns(self, *names: str) -> Iterator[tuple]:
        """The values of these columns, row by row."""
        for batch in self.data.select_columns(list(names)).iter(BATCH):
            yield from zip(*(batch[name] for name in names), strict=True)

    def both_texts(self) -> Iterator[tuple[str, str]]:
        """Text and second text, which is empty if there is none."""
        if self.paired:
            return self.columns("text", "pair")
        return ((text, "") for (text,) in self.columns("text"))

    def raw_labels(self) -> Iterator[tuple[int, Any]]:
        """Number and label of each row as they stand in the source."""
        return ((number, json.loads(label)) for number, label in self.columns("number", "label"))

    def number(self, index: int) -> int:
        """Where row ``index`` stands in the source."""
        return self.data[index]["number"]

    def labelled(self, labels: Iterable[float], kind: type) -> "Rows":
        """With these encoded labels, of ``kind`` int or float."""
        return replace(self, labels=np.fromiter(labels, kind, len(self)))

    def sample(self, limit: int | None, seed: int) -> "Rows":
        """At most ``limit`` rows, drawn without replacement, in their first order."""
        if limit is None or limit >= len(self):
            return self
        return self.select(sorted(random.Random(seed).sample(range(len(self)), limit)))

    def select(self, keep: list[int]) -> "Rows":
        """The rows of these numbers, counted from 0."""
        labels = None if self.labels is None else self.labels[keep]
        return replace(self, data=self.data.select(keep, keep_in_memory=True), labels=labels)

    def followed_by(self, other: "Rows") -> "Rows":
        """The texts of these rows and of the ``other`` ones, without labels."""
        parts = [rows.data.remove_columns(rows._labels) for rows in (self, other)]
        return Rows(f"{self.source} and {other.source}", _library().concatenate_datasets(parts))

    @property
    def _labels(self) -> list[str]:
        return ["label"] if "label" in self.data.column_names else []


def fingerprint(parts: Iterable[bytes]) -> str:
    """A short name for these bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def file_fingerprint(path: Path) -> str:
    """That of a file's bytes."""
    with path.open("rb") as file:
        return fingerprint(iter(lambda: file.read(2**20), b""))


def in_memory(source: str, texts: list[str], labels: Sequence[float]) -> Rows:
    """A few rows that no file holds."""
    numbers = list(range(1, len(texts) + 1))
    data = _library().Dataset.from_dict(
        {"number": numbers, "text": texts}, features=_features(False, False)
    )
    return Rows(source, data, np.asarray(labels))


def stored(
    source: str,
    records: Callable[[], Iterator[dict[str, Any]]],
    parts: Iterable[str],
    paired: bool,
    labelled: bool = True,
) -> Rows:
    """The rows that ``records()`` gives; read before if ``parts``, all they depend on, are same."""
    library = _library()
    code = (file_fingerprint(Path(__file__).with_name(name)) for name in CODE)
    words = (*parts, *code, library.__version__)
    try:
        with _writing(source):
            data = library.Dataset.from_generator(
                records,
                features=_features(paired, labelled),
                fingerprint=fingerprint(f"{word}\0".encode() for word in words),
                writer_batch_size=BATCH,
            )
    except library.exceptions.DatasetGenerationError as error:
        # What went wrong in `records`, or while it was written.
        with _writing(source):
            raise error.__cause__ or error from None
    return Rows(source, data)


def label_json(label: Any) -> str:
    """A label of any type, so that one column holds them all."""
    return json.dumps(label, default=lambda x: float(x) if isinstance(x, Decimal) else [str(x)])


def _features(paired: bool, labelled: bool) -> Any:
    library = _library()
    texts = ("text", *("pair",) * paired, *("label",) * labelled)
    kinds = {"number": "int64", **dict.fromkeys(texts, "large_string")}
    return library.Features({name: library.Value(kind) for name, kind in kinds.items()})


def _library() -> Any:
    library = require("datasets", "train")
    library.disable_progress_bars()
    return library


@contextlib.contextmanager
def _writing(source: str) -> Iterator[None]:
    """A cache that can't be written or read is one sentence."""
    arrow: Any = require("pyarrow", "train")
    cache = _library().config.HF_DATASETS_CACHE
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
            f"{source}: its rows can't be kept in {cache}: {reason}; "
            "HF_DATASETS_CACHE names another place"
        ) from error


class Encoded(torch.utils.data.Dataset):
    """Tokenized rows with labels; a collator pads them batch by batch."""

    def __init__(self, tokens: Any, labels: np.ndarray):
        self.lengths = np.asarray(tokens.with_format("numpy")["length"][:])
        self.tokens, self.labels = tokens.remove_columns("length"), labels

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.tokens[int(index)], "labels": self.labels[index].item()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        columns = {**self.tokens[list(indices)], "labels": self.labels[indices].tolist()}
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def batches(
        self,
        collate: Callable,
        size: int,
        order: Sequence[int] | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Padded batches of ``size`` rows in this ``order``; of them every ``ranks``-th one."""
        order = range(len(self)) if order is None else order
        for start in range(rank * size, len(order), ranks * size):
            batch = collate(self.__getitems__(list(order[start : start + size])))
            yield {name: x.to(device) for name, x in batch.items()}

    def ids(self) -> Iterator[list[int]]:
        """The token ids of each row."""
        for batch in self.tokens.select_columns("input_ids").iter(BATCH):
            yield from batch["input_ids"]

    def followed_by(self, other: "Encoded") -> "Encoded":
        """These rows and the ``other`` ones, nothing copied but labels and lengths."""
        both = Encoded.__new__(Encoded)
        both.tokens = _library().concatenate_datasets([self.tokens, other.tokens])
        both.labels = np.concatenate([self.labels, other.labels])
        both.lengths = np.concatenate([self.lengths, other.lengths])
        return both


class Encoder:
    """Makes tokens of rows."""

    def __init__(self, tokenizer: Any, max_length: int):
        self.tokenizer, self.max_length = tokenizer, max_length
        # Its files say all that it does, whatever class it is.
        with saving(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            self.words = [type(tokenizer).__name__, str(max_length), *map(file_fingerprint, files)]
        for module in ("transformers", "tokenizers"):
            self.words.append(getattr(require(module, "train"), "__version__", ""))

    def __call__(self, rows: Rows) -> Encoded:
        data = rows.data
        added = self.tokenizer.num_special_tokens_to_add(pair=rows.paired)
        if added >= self.max_length:
            raise InputError(
                f"--max-length {self.max_length} leaves no room for words: the tokenizer adds "
                f"{added} tokens to {'a pair' if rows.paired else 'a text'}"
            )
        name = fingerprint(f"{word}\0".encode() for word in (data._fingerprint, *self.words))

        def encode(batch: dict[str, list]) -> dict[str, list]:
            found = self.tokenizer(
                batch["text"], batch.get("pair"), truncation=True, max_length=self.max_length
            )
            for number, ids in zip(batch["number"], found["input_ids"], strict=True):
                if not ids:
                    raise InputError(f"{rows.source}, row {number}: no token is left of it")
            return {**found, "length": [len(ids) for ids in found["input_ids"]]}

        with _writing(rows.source), _alone(data, name):
            tokens = data.map(
                encode,
                batched=True,
                batch_size=BATCH,
                writer_batch_size=BATCH,
                remove_columns=data.column_names,
                new_fingerprint=name,
            )
        assert rows.labels is not None
        encoded = Encoded(tokens, rows.labels)
        self._check_known(rows, encoded)
        return encoded

    def _check_known(self, rows: Rows, encoded: Encoded) -> None:
        """A tokenizer without its files is one that knows no word, and says nothing."""
        found = {i for ids in itertools.islice(encoded.ids(), BATCH) for i in ids}
        words = found - {i for i in self.tokenizer.all_special_ids if i is not None}
        if not words and len(rows) >= FEW:
            raise InputError(
                f"{rows.source}: the tokenizer knows no word of the first "
                f"{min(BATCH, len(rows))} rows; its files are missing, or it is another's"
            )


def _alone(data: Any, name: str) -> contextlib.AbstractContextManager:
    """Only one process at a time makes the file called ``name`` beside those of ``data``."""
    if not data.cache_files:
        return contextlib.nullcontext()
    folder = Path(data.cache_files[0]["filename"]).parent
    filelock: Any = require("filelock", "train")
    return filelock.FileLock(folder / f"{name}.lock")
