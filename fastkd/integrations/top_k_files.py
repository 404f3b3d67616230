"""Files of a teacher's most probable tokens, as other tools write them: a teacher without a model.

A folder of safetensors or Parquet files. Each row has a text's token ids (T,), and for each of its
positions the ids (T, K) and log-probabilities (T, K) of the teacher's most probable next tokens.
The last position may be missing.

- Parquet: a list column for each.
- safetensors: (S, T), (S, T, K) and (S, T, K), with ``attention_mask`` (S, T) if rows are padded;
  or all rows one after another, (ΣT,), (ΣT, K) and (ΣT, K), with ``lengths`` (S,).

A position without a teacher has log-probabilities −inf, or in Parquet an empty list: its soft
target is zero.
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastkd._core.atomic_files import write_file
from fastkd._core.extras import require
from fastkd.distill.cache import TeacherCache, teacher_request
from fastkd.distill.distiller import Distiller
from fastkd.integrations._rows import Answer, RowSource, SourceError, SourceModel
from fastkd.lm.targets import SLACK, TopK
from fastkd.models.batch import Batch

__all__ = ["COLUMNS", "TopKFiles", "export", "write"]

COLUMNS = ("input_ids", "top_ids", "top_log_probs")
ROUNDED = 1e-2  # excess of a sum of probabilities that half precision may cause


class TopKRows(RowSource):
    """Base class of a teacher with stored predictions of rows of tokens."""

    def __init__(self, name: str, temperature: float) -> None:
        super().__init__()
        self.what, self.temperature = name, temperature
        self.model = SourceModel(name, name)
        self._places: dict[bytes, Any] = {}

    def find(self, place: Any) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities (T, K) of a row at ``place``."""
        raise NotImplementedError

    def answers(self, rows: list[tuple[int, ...]]) -> list[Answer]:
        found: list[Answer] = []
        for number, row in enumerate(rows):
            place = self._places.get(key_of(row))
            if place is None:
                raise SourceError(
                    f"row {number} of the batch is not in {self.what} ({len(self)} rows); pass the "
                    "rows and the tokenizer that it was made with"
                )
            found.append(_checked(*self.find(place), len(row), self.what))
        return found

    def __len__(self) -> int:
        return len(self._places)

    def has(self, batch: Batch) -> bool:
        """Whether all rows of a batch are stored."""
        return all(key_of(row) in self._places for row in self.rows_of(batch.teacher or batch))

    def configuration(self) -> dict[str, Any]:
        """The rows, their number of tokens, and the temperature."""
        rows = hashlib.blake2b(b"".join(sorted(self._places)), digest_size=16).hexdigest()
        return {"rows": rows, "top_k": self.top_k, "temperature": self.temperature}


class TopKFiles(TopKRows):
    """A folder of top-k log-probabilities as a Distiller's teacher; see the module.

    Rows are found by their tokens, in any order, batch or padding, and read when a batch has them.

    Args:
        folder: directory of ``*.safetensors`` or ``*.parquet``.
        columns: names of the token ids, of the most probable ids and of their log-probabilities.
        temperature: temperature of the log-probabilities; the method's soft targets must have it.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: a file without these columns, or with another K.
        SourceError: at a batch, a row that is in no file, or values that are no log-probabilities.

    >>> teacher = TopKFiles("runs/top_k")  # doctest: +SKIP
    >>> distiller = Distiller(teacher, student, SoftTargets(temperature=1))  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        columns: Sequence[str] = COLUMNS,
        temperature: float = 1.0,
    ) -> None:
        self.folder = Path(folder)
        super().__init__(str(self.folder), temperature)
        if len(columns) != len(COLUMNS):
            raise ValueError(f"columns must name {', '.join(COLUMNS)}, got {list(columns)}")
        self.columns = tuple(columns)
        self._paths = sorted([*self.folder.glob("*.safetensors"), *self.folder.glob("*.parquet")])
        if not self._paths:
            raise FileNotFoundError(f"{self.folder} has no *.safetensors and no *.parquet")
        for number in range(len(self._paths)):
            shard = self._shard(number)
            if self.top_k not in (None, shard.k):
                raise ValueError(
                    f"{self._paths[number]}: has {shard.k} tokens a position, other files "
                    f"{self.top_k}"
                )
            self.top_k = shard.k
            for i, row in enumerate(shard.rows()):
                self._places.setdefault(key_of(row), (number, i))

    top_k: int | None = None

    def _shard(self, number: int) -> "_Safetensors | _Parquet":
        return _shard_of(self._paths[number], self.columns)

    def find(self, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        number, i = place
        return self._shard(number).top_k(i)


@functools.lru_cache(maxsize=64)
def _shard_of(path: Path, columns: tuple[str, ...]) -> "_Safetensors | _Parquet":
    return (_Parquet if path.suffix == ".parquet" else _Safetensors)(path, columns)


def _check_columns(path: Path, columns: Iterable[str], present: Iterable[str]) -> None:
    if missing := sorted({*columns} - {*present}):
        raise ValueError(
            f"{path}: has no {missing[0]!r}, but {', '.join(sorted(present))}; pass columns"
        )


class _Safetensors:
    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.file = require("safetensors", "train").safe_open(path, "pt")
        self.names = columns
        _check_columns(path, columns, self.file.keys())
        names = set(self.file.keys())
        self.flat, self.masked = "lengths" in names, "attention_mask" in names
        self.k = self.file.get_slice(columns[1]).get_shape()[-1]
        if self.flat:
            self.lengths = self.file.get_tensor("lengths").tolist()
            self.starts = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    def rows(self) -> Iterator[list[int]]:
        ids = self.file.get_tensor(self.names[0])
        if self.flat:
            yield from (x.tolist() for x in ids.split(self.lengths))
        elif self.masked:
            masks = self.file.get_tensor("attention_mask").bool()
            yield from (x[mask].tolist() for x, mask in zip(ids, masks, strict=True))
        else:
            yield from ids.tolist()

    def top_k(self, i: int) -> tuple[Tensor, Tensor]:
        ids, log_probs = (self.file.get_slice(name) for name in self.names[1:])
        if self.flat:
            part = slice(self.starts[i], self.starts[i + 1])
            return ids[part], log_probs[part]
        ids, log_probs = ids[i : i + 1][0], log_probs[i : i + 1][0]
        if self.masked:
            mask = self.file.get_slice("attention_mask")[i : i + 1][0].bool()[: len(ids)]
            ids, log_probs = ids[mask], log_probs[mask]
        return ids, log_probs


class _Parquet:
    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        parquet: Any = require("pyarrow.parquet", "train")
        self.path, self.file, self.names = path, parquet.ParquetFile(path), columns
        _check_columns(path, columns, self.file.schema_arrow.names)
        sizes = [self.file.metadata.row_group(n).num_rows for n in range(self.file.num_row_groups)]
        self.starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        # The longest list of the first rows. Shorter ones are filled up.
        self.k = max((len(x) for row in self._group(0)[1] for x in row), default=1)

    def rows(self) -> Iterator[list[int]]:
        for n in range(self.file.num_row_groups):
            yield from self.file.read_row_group(n, [self.names[0]])[self.names[0]].to_pylist()

    @functools.lru_cache(maxsize=2)  # noqa: B019 - shards are few, and kept
    def _group(self, n: int) -> list[list[list[Any]]]:
        table = self.file.read_row_group(n, list(self.names))
        return [table[name].to_pylist() for name in self.names]

    def top_k(self, i: int) -> tuple[Tensor, Tensor]:
        n = next(n for n, end in enumerate(self.starts[1:]) if i < end)
        _, ids, log_probs = (column[i - self.starts[n]] for column in self._group(n))
        if longer := [x for x in ids if len(x) > self.k]:
            raise SourceError(
                f"{self.path}: a position has {len(longer[0])} tokens, the first ones {self.k}; "
                "store equally many at each position"
            )
        filled = ((0, ids), (-torch.inf, log_probs))
        first, second = (
            torch.tensor([[*x, *[fill] * (self.k - len(x))] for x in rows]) for fill, rows in filled
        )
        return first.long(), second


def key_of(row: Sequence[int]) -> bytes:
    """Digest of a row's tokens."""
    data = torch.tensor(row, dtype=torch.int64).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def _checked(ids: Tensor, log_probs: Tensor, length: int, where: str) -> TopK:
    """Token ids and log-probabilities (T − 1, K) of a row of T tokens, in int64 and float32."""
    if ids.shape != log_probs.shape or len(ids) not in (length, length - 1):
        raise SourceError(
            f"{where}: a row of {length} tokens has ids of shape {tuple(ids.shape)} and "
            f"log-probabilities of {tuple(log_probs.shape)}; both need one list a position"
        )
    ids, log_probs = ids[: length - 1].long(), log_probs[: length - 1].float()
    excess = log_probs.logsumexp(-1).amax().item() if length > 1 else 0.0
    if log_probs.isnan().any() or excess > ROUNDED:
        raise SourceError(
            f"{where}: its values aren't log-probabilities (they add up to "
            f"{torch.tensor(excess).exp():.4g}); store log_softmax of all logits"
        )
    # Rounded to half precision they may add up to more than 1.
    log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True).clamp(min=SLACK).sub(SLACK)
    return TopK(ids, log_probs)


def write(
    rows: Iterable[tuple[Sequence[int], TopK]],
    folder: str | os.PathLike[str],
    *,
    shard_rows: int = 1024,
) -> None:
    """Write rows, their token ids (T,) and a `TopK` (T, K) or (T − 1, K), for `TopKFiles`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    for tokens, top in rows:
        more = len(tokens) - len(top.ids)
        ids = torch.nn.functional.pad(top.ids.cpu().int(), (0, 0, 0, more))
        values = top.log_probs.cpu().float()
        values = torch.nn.functional.pad(values, (0, 0, 0, more), value=-torch.inf)
        held.append((torch.tensor(tokens, dtype=torch.int32), ids, values))
        if len(held) == shard_rows:
            _write_shard(held, Path(folder))
            held = []
    if held:
        _write_shard(held, Path(folder))


def _write_shard(rows: list[tuple[Tensor, Tensor, Tensor]], folder: Path) -> None:
    columns: Any = zip(*rows, strict=True)
    tensors = dict(zip(COLUMNS, map(torch.cat, columns), strict=True))
    tensors["lengths"] = torch.tensor([len(tokens) for tokens, *_ in rows])
    data = require("safetensors.torch", "train").save(tensors)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    write_file(folder / f"shard-{digest}.safetensors", data, shared=True)


def export(
    distiller: Distiller,
    batches: Iterable[Mapping[str, Any]],
    folder: str | os.PathLike[str],
) -> None:
    """Write the top k that a Distiller's teacher has of each row, for `TopKFiles`.

    Args:
        distiller: its teacher is a `TeacherCache` with ``top_k``, or a `ServedTeacher`.
        batches: dicts of arguments as in ``Distiller.forward``.
        folder: a new directory, or one that several processes write.

    Raises:
        ValueError: the teacher stores no top k.
    """
    (teacher,) = distiller.teachers.each
    write(rows_of(teacher.module, map(distiller.read, batches), distiller.method), folder)


def rows_of(source: Any, batches: Iterable[Batch], method: Any) -> Iterator[tuple[list[int], TopK]]:
    """Different rows of batches: their token ids (T,), and the ``source``'s top k (T, K)."""
    stored = source.about["top_k"] if isinstance(source, TeacherCache) else None
    if not (stored or (isinstance(source, RowSource) and source.top_k)):
        raise ValueError("teacher: it stores no top k of tokens; write a cache with top_k")
    seen: set[bytes] = set()
    for batch in batches:
        own = batch.teacher or batch
        top = source.outputs(own, teacher_request(method), torch.device("cpu")).top_k
        real, documents = own.token_mask.cpu(), own.documents
        lengths = (real if documents is None else documents.mask).sum(1).tolist()
        found = own.inputs["input_ids"].cpu(), top.ids, top.log_probs
        parts = (x[real].split(lengths) for x in found)
        for tokens, ids, log_probs in zip(*parts, strict=True):
            if len(tokens) and key_of(tokens.tolist()) not in seen:
                seen.add(key_of(tokens.tolist()))
                yield tokens.tolist(), TopK(ids, log_probs)
