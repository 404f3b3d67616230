"""A text generated from another: translations, summaries."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from fastkd._core.extras import require
from fastkd.train.arrow_rows import Encoded
from fastkd.train.errors import InputError
from fastkd.train.files import Columns, holds_text, text_of
from fastkd.train.generation import GREEDY, Generation, rouge_l
from fastkd.train.tasks.base import LOADING, TEXT, Task, Tokens, token_loss_sums

SOURCE, TARGET = "source", "target"


@dataclass(frozen=True)
class Seq2Seq(Task):
    """Columns ``source`` and ``target``, each up to --max-length tokens.

    Texts are generated greedily unless `generation` samples them. chrF is sacrebleu's of the whole
    set, 0 to 100; it compares characters of any script and selects the best student. ROUGE-L is
    rouge-score's mean F-measure, without stemming. The loss is the mean over the targets' tokens.
    """

    metrics = ("chrf", "rouge_l", "loss")
    lower_is_better = frozenset({"loss"})
    percent = frozenset({"chrf"})
    head = "AutoModelForSeq2SeqLM"
    head_name = "language model head"
    pipeline = "text2text-generation"
    columns = Columns(SOURCE, None, TARGET)
    stored: ClassVar[Mapping[str, Any]] = {"text": TEXT, "label": TEXT}
    optional = ("label",)
    short_column = TARGET
    collator_class = "DataCollatorForSeq2Seq"
    usage = (
        f"{LOADING}"
        'ids = model.generate(**tokenizer("...", return_tensors="pt"), max_new_tokens=128)\n'
        "print(tokenizer.decode(ids[0], skip_special_tokens=True))"
    )

    generation: Generation = field(default=GREEDY, kw_only=True, repr=False)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        row = {"text": text_of(record, columns.text, where)}
        if columns.label is not None:
            row["label"] = text_of(record, columns.label, where)
            if not holds_text(row["label"]):
                raise InputError(f"{where}: column {columns.label!r} is empty")
        return row

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        short = {"truncation": True, "max_length": max_length}
        found = dict(tokenizer(batch["text"], **short))
        found.pop("token_type_ids", None)
        if "label" in batch:
            found["labels"] = tokenizer(text_target=batch["label"], **short)["input_ids"]
        return found

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The generated text of a row, the sum of -log p of its target's tokens, their number."""
        writer: Any = model
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        options = self.generation.options([ids[real].tolist() for ids, real in pairs])
        longest = min(self.generation.max_new_tokens, tokenizer.model_max_length)
        ids = writer.generate(**{**inputs, **options, "max_new_tokens": longest})
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        targets = batch.get("labels")
        if targets is None:
            return [(text, 0.0, 0) for text in texts]
        found = token_loss_sums(writer(**batch).logits, targets)
        return [(text, *one) for text, one in zip(texts, found, strict=True)]

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        bleu: Any = require("sacrebleu.metrics", "tasks")
        texts, losses, counts = zip(*answers, strict=True)
        true = list(examples.rows.column("label"))
        return {
            "chrf": bleu.CHRF().corpus_score(texts, [true]).score,
            "rouge_l": rouge_l(texts, true),
            "loss": math.fsum(losses) / sum(counts),
        }

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        return [{TARGET: text} for text, _, _ in answers]


TASK = Seq2Seq
