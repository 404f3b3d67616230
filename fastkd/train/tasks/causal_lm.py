"""Language models that read from left to right: the next token of running text."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from fastkd._core.extras import require
from fastkd.train import files
from fastkd.train.columns import Columns
from fastkd.train.errors import InputError
from fastkd.train.rows import UNLABELLED, Encoded, Rows
from fastkd.train.tasks.task import Task, logits


@dataclass(frozen=True)
class CausalLM(Task):
    """Documents: of a ``.txt`` those apart by an empty line, else of a column; files or folders.

    Their tokens, each document's followed by the end token, are cut into rows of --max-length. The
    first token of a row is only read. Bits per byte are over the UTF-8 bytes of the others.
    """

    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte")
    usual: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte")
    smaller: ClassVar[frozenset[str]] = frozenset(metrics)
    head: ClassVar[str] = "AutoModelForCausalLM"
    head_name: ClassVar[str] = "language model head"
    pipeline: ClassVar[str] = "text-generation"
    columns: ClassVar[Columns] = Columns("text", None, None)
    beside: ClassVar[tuple[str, ...]] = ("bytes",)

    #: Each document is a row of its own, cut off at --max-length.
    apart: bool = False

    @classmethod
    def check_file(cls, path: Path, option: str) -> None:
        if not path.is_dir():
            super().check_file(path, option)
        elif not any(cls._files(path)):
            raise InputError(f"{option} {path}: the folder holds no file that could be read")

    @staticmethod
    def _files(path: Path) -> Iterator[Path]:
        kinds = (*files.READERS, ".parquet")
        inside = sorted(part for part in path.rglob("*") if part.is_file())
        return (part for part in inside if files.kind_of(part) in kinds)

    @classmethod
    def records(cls, path: Path, header: bool, option: str, every: bool = False) -> files.Records:
        if path.is_dir():
            parts = (cls.records(part, header, option) for part in cls._files(path))
            yield from (record for part in parts for record in part)
        elif files.is_text(path):
            yield from _documents(path, option)
        else:
            yield from files.records(path, header, option, every)

    def predicting(self) -> Task:
        return replace(self, apart=True)

    def room(self, tokenizer: Any, rows: Rows) -> tuple[int, str]:
        return 1, "a document"

    def encode(
        self, batch: dict[str, list], tokenizer: Any, max_length: int
    ) -> Mapping[str, list[Any]]:
        stream: list[Any] = []
        rows: list[list[tuple[int, int, int]]] = []
        for number, text in zip(batch["number"], batch["text"], strict=True):
            document = [(token, size, number) for token, size in _tokens(text, tokenizer)]
            stream += [document[:max_length]] if self.apart else document
        if self.apart:
            rows = stream
        else:
            cuts = range(0, len(stream), max_length)
            rows = [row for at in cuts if len(row := stream[at : at + max_length]) > 1]
        ids = [[token for token, _, _ in row] for row in rows]
        return {
            "input_ids": ids,
            "attention_mask": [[1] * len(row) for row in rows],
            "labels": ids,
            "bytes": [sum(size for _, size, _ in row[1:]) for row in rows],
            "number": [row[0][2] for row in rows],
        }

    def collator(self, tokenizer: Any) -> Callable[[list[dict[str, Any]]], Mapping[str, Any]]:
        # The one for language models takes end tokens for padding where these are the same.
        transformers: Any = require("transformers", "train")
        return transformers.DataCollatorForTokenClassification(tokenizer)

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        return sums_of_losses(model, batch)

    def finite(self, answers: Any) -> bool:
        return all(math.isfinite(loss) for loss, _ in answers)

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        loss = math.fsum(loss for loss, _ in answers)
        size = sum(examples.beside["bytes"][:])
        compute = {
            "perplexity": lambda: perplexity(loss / max(1, sum(count for _, count in answers))),
            "bits_per_byte": lambda: loss / math.log(2) / max(1, size),
        }
        return {name: compute[name]() for name in metrics}

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        """Of each document up to --max-length."""
        return [
            {"tokens": count + 1, "perplexity": perplexity(loss / count) if count else None}
            for loss, count in answers
        ]

    @classmethod
    def usage(cls, report: Mapping[str, Any], directory: str) -> str:
        return (
            "from transformers import pipeline\n\n"
            f'write = pipeline("{cls.pipeline}", "{directory}")\n'
            'print(write("Once upon a time"))'
        )


def sums_of_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[tuple[float, int]]:
    """The sum of -log p of a row's labels but the first, and how many they are."""
    found = logits(model, batch).float()[:, :-1]
    targets = batch["labels"][:, 1:]
    losses = F.cross_entropy(
        found.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=UNLABELLED
    )
    sums = losses.view_as(targets).double().sum(-1).tolist()
    return list(zip(sums, (targets != UNLABELLED).sum(-1).tolist(), strict=True))


def perplexity(loss: float) -> float:
    """That of a mean of -log p."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


def _tokens(text: str, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Token ids of a document and its end, with the bytes that each stands for."""
    end = tokenizer.eos_token_id
    end = tokenizer.sep_token_id if end is None else end
    found = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=bool(tokenizer.is_fast),
        verbose=False,
    )
    ids = found["input_ids"]
    spans = found.get("offset_mapping")
    if spans is None:  # a slow tokenizer doesn't say; as if all tokens were as long
        spans = [(0, round((i + 1) * len(text) / len(ids))) for i in range(len(ids))]
    at = 0
    for i, (token, (_, stop)) in enumerate(zip(ids, spans, strict=True), 1):
        if end is None and i == len(ids):
            stop = len(text)
        yield token, len(text[at : max(at, stop)].encode())
        at = max(at, stop)
    if end is not None:
        yield end, len(text[at:].encode())


def _documents(path: Path, option: str) -> files.Records:
    """Texts of lines, apart by an empty one."""
    lines: list[str] = []
    began = 0
    for number, line in files.text_lines(path, option):
        if line.strip():
            began = began if lines else number
            lines.append(line.rstrip("\r\n"))
        elif lines:
            yield began, {"text": "\n".join(lines)}
            lines = []
    if lines:
        yield began, {"text": "\n".join(lines)}


TASK = CausalLM
