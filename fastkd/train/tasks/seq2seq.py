"""A text written after another: translations, summaries."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fastkd._core.extras import require
from fastkd.train.arrow_rows import Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.evaluation import rouge_l
from fastkd.train.input_columns import Columns, holds_text, text_of
from fastkd.train.tasks.base import (
    LABEL,
    Collate,
    DefaultPaddingSide,
    Task,
    Tokens,
    token_loss_sums,
)

SOURCE, TARGET = "source", "target"
# New tokens of a generated text at most.
LONGEST = 128


@dataclass(frozen=True)
class Seq2Seq(Task):
    """A column ``source`` and one ``target``, each up to --max-length tokens, or others by name.

    Texts are generated greedily. chrF is sacrebleu's of the whole set, 0 to 100; it compares
    characters, whatever the script, and picks the best student. ROUGE-L is the mean F-measure as
    rouge-score has it, without stemming. The loss is the mean over the tokens of the targets.
    """

    metrics: ClassVar[tuple[str, ...]] = ("chrf", "rouge_l", "loss")
    default_metrics: ClassVar[tuple[str, ...]] = metrics
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss"})
    percent: ClassVar[frozenset[str]] = frozenset({"chrf"})
    head: ClassVar[str] = "AutoModelForSeq2SeqLM"
    head_name: ClassVar[str] = "language model head"
    pipeline: ClassVar[str] = "text2text-generation"
    columns: ClassVar[Columns] = Columns(SOURCE, None, TARGET)

    @classmethod
    def features(cls, columns: Columns) -> dict[str, Any]:
        parts = {SOURCE: columns.text, LABEL: columns.label}
        return {name: "large_string" for name, there in parts.items() if there is not None}

    @classmethod
    def has_text(cls, row: Mapping[str, Any]) -> bool:
        return holds_text(row[SOURCE])

    @classmethod
    def texts(cls, rows: Rows) -> list[str]:
        return rows.data[SOURCE][:]

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        row = {SOURCE: text_of(record, columns.text, where)}
        if columns.label is not None:
            row[LABEL] = text_of(record, columns.label, where)
            if not holds_text(row[LABEL]):
                raise InputError(f"{where}: column {columns.label!r} is empty")
        return row

    def without_labels(self, rows: Rows) -> Rows:
        return rows.without(LABEL)

    def unlabelled(self, rows: Rows) -> Rows:
        raise InputError(
            f"--unlabelled: a decoder reads the words before each of its own, and rows of --task "
            f"{self.name()} without a target have none; let `fastkd predict` write the teacher's"
        )

    def added_tokens(self, tokenizer: Any, rows: Rows) -> tuple[int, str]:
        return tokenizer.num_special_tokens_to_add(pair=False), "a text"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        short = {"truncation": True, "max_length": max_length}
        found = dict(tokenizer(batch[SOURCE], **short))
        found.pop("token_type_ids", None)
        if LABEL in batch:
            found["labels"] = tokenizer(text_target=batch[LABEL], **short)["input_ids"]
        return found

    def collator(self, tokenizer: Any) -> Collate:
        transformers: Any = require("transformers", "train")
        collate = DefaultPaddingSide(transformers.DataCollatorForSeq2Seq(tokenizer), tokenizer)

        def batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            return {name: x for name, x in collate(rows).items() if x is not None}

        return batch

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """A row's text, the sum of -log p of its target's tokens, and how many they are."""
        writer: Any = model
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        longest = min(LONGEST, tokenizer.model_max_length)
        ids = writer.generate(**inputs, max_new_tokens=longest, do_sample=False, num_beams=1)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        targets = batch.get("labels")
        if targets is None:
            return [(text, 0.0, 0) for text in texts]
        found = token_loss_sums(writer(**batch).logits, targets)
        return [(text, *one) for text, one in zip(texts, found, strict=True)]

    def finite(self, answers: Any) -> bool:
        return all(math.isfinite(loss) for _, loss, _ in answers)

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        if not self.finite(answers):
            return dict.fromkeys(metrics, math.nan)
        bleu: Any = require("sacrebleu.metrics", "tasks")
        texts = [text for text, _, _ in answers]
        true = [target for (target,) in examples.rows.columns(LABEL)]
        compute = {
            "rouge_l": lambda: rouge_l(texts, true),
            "chrf": lambda: bleu.CHRF().corpus_score(texts, [true]).score,
            "loss": lambda: math.fsum(x for _, x, _ in answers) / sum(n for _, _, n in answers),
        }
        return {name: float(compute[name]()) for name in metrics}

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        texts = {text for text, _, _ in answers}
        return f"are all {texts.pop()!r:.60}" if len(texts) == 1 else None

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        return [{TARGET: text} for text, _, _ in answers]

    def shown_columns(self, rows: Rows) -> Iterator[dict[str, Any]]:
        return ({SOURCE: text} for (text,) in rows.columns(SOURCE))

    @classmethod
    def usage(cls, report: Mapping[str, Any], directory: str) -> str:
        return (
            f"{cls.loading_code(directory)}"
            'ids = model.generate(**tokenizer("...", return_tensors="pt"), max_new_tokens=128)\n'
            "print(tokenizer.decode(ids[0], skip_special_tokens=True))"
        )


TASK = Seq2Seq
