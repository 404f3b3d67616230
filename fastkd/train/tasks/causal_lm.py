"""Language models that read from left to right: the next token of running text."""

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fastkd._core.extras import require
from fastkd.distill.spans import align_spans
from fastkd.models.inputs import reads_whole_rows
from fastkd.train import files
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.files import Columns
from fastkd.train.tasks.base import TEXT, Prepared, Task, Tokens, logits, token_loss_sums


def documents(path: Path, option: str, header: bool, blank: bool) -> files.Records:
    """Texts of several lines, separated by empty lines."""
    numbered = files.text_lines(path, option)
    for empty, group in itertools.groupby(numbered, lambda line: not line[1].strip()):
        lines = list(group)
        if not empty:
            yield lines[0][0], {"text": "\n".join(text.rstrip("\r\n") for _, text in lines)}


@dataclass(frozen=True)
class Decoder(Task):
    """A task of models that read from left to right; a row may have several texts."""

    head = "AutoModelForCausalLM"
    head_name = "language model head"
    pipeline = "text-generation"

    two_tokenizers = "spans"
    of_model = ("separate_documents",)
    # The collator for language models masks end tokens where they are the padding token.
    collator_class = "DataCollatorForTokenClassification"

    #: Whether the model reads each text of a row as if alone.
    separate_documents: bool = True
    #: Whether rows are for predictions: single documents, or conversations without an answer.
    predicting: bool = False

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> "Decoder":
        transformers: Any = require("transformers", "train")
        model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        arguments = set() if model is None else {*inspect.signature(model.forward).parameters}
        # Models without a key cache have masks of their own; stateful models keep earlier texts.
        caches = arguments & {"past_key_values", "cache"}  # until transformers 5.23, and from 5.24
        fits = "position_ids" in arguments and caches and not model._is_stateful
        return cls(separate_documents=bool(fits) and not reads_whole_rows(config))

    def prepare(self, rows: Rows, labelled: bool = True, order: str | None = None) -> Prepared:
        task = replace(self, predicting=not labelled)
        return super().prepare(rows, labelled, order)._replace(task=task)


@dataclass(frozen=True)
class CausalLM(Decoder):
    """Documents: in ``.txt`` separated by an empty line, else one a row; files or folders.

    Their tokens, with an end token after each document, are cut into rows of --max-length. Models
    that separate documents by positions that start again read each document of a row as if alone,
    and do not predict its first token. Other models read a row as one document. Bits per byte are
    over the UTF-8 bytes of the predicted tokens.
    """

    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte")
    lower_is_better = frozenset(metrics)
    columns = Columns("text", None, None)
    stored: ClassVar[Mapping[str, Any]] = {"text": TEXT}
    optional = ()
    readers: ClassVar[files.Readers] = {**files.READERS, ".txt": documents}
    folders = True
    evaluation_columns: ClassVar[tuple[str, ...]] = ("bytes",)
    usage = (
        "from transformers import pipeline\n\n"
        'write = pipeline("$pipeline", "$directory")\nprint(write("Once upon a time"))'
    )

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        found: dict[str, list[Any]] = {
            name: []
            for name in ("input_ids", "attention_mask", "labels", "bytes", "number", "position_ids")
        }
        for row in self._rows(batch, tokenizer, max_length):
            ids, sizes, documents = zip(*row, strict=True)
            begins = [
                True,
                *(self.separate_documents and a != b for a, b in itertools.pairwise(documents)),
            ]
            pieces = list(zip(ids, sizes, begins, strict=True))
            found["input_ids"].append(list(ids))
            found["attention_mask"].append([1] * len(ids))
            found["labels"].append([UNLABELLED if first else token for token, _, first in pieces])
            found["bytes"].append(sum(size for _, size, first in pieces if not first))
            found["number"].append(batch["number"][documents[0]])
            at = -1
            found["position_ids"].append([at := 0 if first else at + 1 for first in begins])
        if not self.separate_documents:
            del found["position_ids"]
        return found

    def _rows(
        self, batch: dict[str, list], tokenizer: Any, max_length: int
    ) -> list[list[tuple[int, int, int]]]:
        """Tokens in rows, each with its number of bytes and the number of its document."""
        documents = []
        for i, text in enumerate(batch["text"]):
            ids, spans = _with_offsets(text, tokenizer)
            sizes = _token_bytes(text, spans)
            documents.append([(token, size, i) for token, size in zip(ids, sizes, strict=True)])
        if self.predicting:
            return [document[:max_length] for document in documents]
        stream = [token for document in documents for token in document]
        cuts = [*range(0, len(stream), max_length), len(stream)]
        if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1 and max_length > 2:
            cuts[-2] -= 1  # a single last token would not be predicted
        return [stream[start:end] for start, end in itertools.pairwise(cuts) if end - start > 1]

    def encode_both(
        self, batch: dict[str, list], tokenizer: Any, teachers: Any, max_length: int
    ) -> Tokens:
        """Pieces of single documents, cut where a token of both models ends."""
        columns = "input_ids", "student_spans", "teacher_input_ids", "teacher_spans", "number"
        found: dict[str, list[Any]] = {name: [] for name in columns}
        for number, text in zip(batch["number"], batch["text"], strict=True):
            sides = [_with_offsets(text, each) for each in (tokenizer, teachers)]
            for rows in aligned_rows(sides, max_length):
                (ids, spans), (ids_t, spans_t) = rows
                if len(ids) > 1:
                    parts: tuple[Any, ...] = ids, spans, ids_t, spans_t, number
                    for name, x in zip(columns, parts, strict=True):
                        found[name].append(x)
        own = found["input_ids"]
        return {
            **found,
            "attention_mask": [[1] * len(row) for row in own],
            "labels": [[UNLABELLED, *row[1:]] for row in own],  # a first token is not predicted
            "teacher_attention_mask": [[1] * len(row) for row in found["teacher_input_ids"]],
            "bytes": [0] * len(own),  # of evaluation rows
        }

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        if "position_ids" in batch and not hasattr(model, "generate"):
            raise InputError(
                f"--onnx: --task {self.name()} separates documents by positions, which ONNX files "
                "don't read; leave it out"
            )
        return next_token_loss_sums(model, batch)

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        loss = math.fsum(loss for loss, _ in answers)
        size = sum(examples.evaluation_columns["bytes"][:])
        return {
            "perplexity": perplexity(loss / max(1, sum(count for _, count in answers))),
            "bits_per_byte": loss / math.log(2) / max(1, size),
        }

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        """Number of tokens and perplexity of each document up to --max-length."""
        return [
            {"tokens": count + 1, "perplexity": perplexity(loss / count) if count else None}
            for loss, count in answers
        ]


def next_token_loss_sums(
    model: nn.Module, batch: dict[str, torch.Tensor]
) -> list[tuple[float, int]]:
    """The sum of -log p of a row's labels but the first, and their number."""
    return token_loss_sums(logits(model, batch)[:, :-1], batch["labels"][:, 1:])


def perplexity(loss: float) -> float:
    """Perplexity of a mean of -log p."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


#: Token ids, and the start and end character of each token; equal for a token without text.
IdsWithOffsets = tuple[list[int], list[tuple[int, int]]]
#: Token ids, and the span of each token.
IdsWithSpans = tuple[list[int], list[int]]


def aligned_rows(sides: Sequence[IdsWithOffsets], max_length: int) -> Iterator[list[IdsWithSpans]]:
    """Rows of the student's and of the teacher's tokens of one text, cut where spans end.

    Tokens of a span that is longer than ``max_length`` are cut off.
    """
    offsets = [torch.tensor([x or [(0, 0)]]) for _, x in sides]
    spans = [x[0].tolist() for x in align_spans(*offsets)]
    count = max(1 + max(x) for x in spans)
    # Tokens of no span are in the row of the span before them.
    ends = [np.searchsorted(np.maximum.accumulate(x), range(count), "right") for x in spans]
    start, begins = 0, [0, 0]
    while start < count or begins == [0, 0]:
        fitting = min(
            np.searchsorted(e, b + max_length, "right") for e, b in zip(ends, begins, strict=True)
        )
        stop = max(start + 1, int(fitting))
        stops = [
            int(e[stop - 1]) if stop < count else len(s) for e, s in zip(ends, spans, strict=True)
        ]
        yield [
            (
                ids[begin:stop_at][:max_length],
                [x - start if x >= 0 else -1 for x in own[begin:stop_at][:max_length]],
            )
            for (ids, _), own, begin, stop_at in zip(sides, spans, begins, stops, strict=True)
        ]
        start, begins = stop, stops


def _with_offsets(text: str, tokenizer: Any) -> IdsWithOffsets:
    """Tokens of a document; its end token counts as one more character.

    With a slow tokenizer all tokens count as equally long.
    """
    fast = bool(tokenizer.is_fast)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids, count, length = found["input_ids"], len(found["input_ids"]), len(text)
    offsets = found.get("offset_mapping")
    if offsets is None:
        offsets = [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return (ids, offsets) if end is None else ([*ids, end], [*offsets, (length, length + 1)])


def _token_bytes(text: str, spans: list[tuple[int, int]]) -> list[int]:
    """Number of UTF-8 bytes of each token, which has the characters from ``start`` to ``stop``.

    Characters of no token, such as spaces, count with the next token, or with the last. Where
    tokens are parts of one character, its bytes are divided among them, because a row may begin
    within a character.
    """
    inside = [range(start, min(stop, len(text))) for start, stop in spans]
    parts = Counter(itertools.chain(*inside))
    seen, at, sizes = Counter[int](), 0, []
    for (start, stop), own in zip(spans, inside, strict=True):
        size = len(text[at:start].encode())
        for i in own:
            whole = len(text[i].encode())
            size += whole * (seen[i] + 1) // parts[i] - whole * seen[i] // parts[i]
        seen.update(own)
        sizes.append(size)
        at = max(at, stop)
    if sizes:
        sizes[-1] += len(text[at:].encode())
    return sizes


TASK = CausalLM
