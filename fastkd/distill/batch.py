"""One batch: inputs of student and teacher, token mask, documents and spans."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastkd.analysis.model_inputs import frames_mask, pad_right, rotate
from fastkd.distill.backbone import Backbone
from fastkd.distill.documents import DECODER_TOKENS, Documents, decoder_tokens, find_documents
from fastkd.distill.spans import Spans, counterparts

SPAN_LABELS = ("start_positions", "end_positions")


@dataclass
class Batch:
    """Inputs of a batch with the labels, token mask, documents and spans derived from them."""

    inputs: dict[str, Any]
    labels: Tensor | tuple[Tensor, Tensor] | None
    num_items: float | Tensor | None
    shape: tuple[int, int] | None  # (B, N) of the tokens
    mask: Tensor | None
    documents: Documents | None
    teacher: "Batch | None" = None  # the teacher's batch, if it has inputs of its own
    spans: Spans | None = None
    loss_weights: Tensor | None = None  # (B, N) factors of the tokens' losses, in labels' order
    first: Tensor | None = None  # (B, 1) first token before rotation; None if not rotated

    @classmethod
    def of(
        cls,
        inputs: dict[str, Any],
        labels: Tensor | None = None,
        num_items: float | Tensor | None = None,
        segments: Tensor | None = None,
        first: Tensor | None = None,
        *,
        student: Backbone,
        unmasks: bool,
        rotates: bool,
    ) -> "Batch":
        """Batch of one model's inputs.

        ``unmasks`` removes the mask of packed rows. ``rotates`` moves left padding behind the
        tokens. ``first`` (B, 1) is the position of the first label before its rotation, if the
        decoder's inputs derive from the labels.
        """
        rotated = None
        if rotates:
            inputs, rotated = pad_right(inputs)
            if any(inputs.get(name) is not None for name in DECODER_TOKENS):
                inputs, rotated = pad_right(inputs, "decoder_")  # labels belong to these
        if rotated is not None:
            if student.per_token and labels is not None and labels.dim() == 2:
                labels = rotate(labels, rotated, 1)
            segments = None if segments is None else rotate(segments, rotated, 1)
            inputs.update(_moved_answers(inputs, rotated))
        decoded = decoder_tokens(inputs, labels)
        if decoded is None:
            mask = frames_mask(student.inner, inputs, _token_mask(inputs))
            shape = _batch_shape(inputs, mask)
            documents = find_documents(shape, mask, inputs, segments, at_front=rotated is not None)
        elif segments is not None:
            raise ValueError("segments: a decoder's row is one document; leave segments out")
        else:
            mask, shape = decoded
            documents = find_documents(shape, mask, {}, None)
        if documents is not None and documents.packed and unmasks:
            # With a mask transformers reads each row as one document. Without it real tokens must
            # not attend to padding: at the largest position, no padding continues a document.
            inputs = {name: x for name, x in inputs.items() if name != "attention_mask"}
            positions = inputs.get("position_ids")
            if mask is not None and isinstance(positions, Tensor) and positions.shape == mask.shape:
                inputs["position_ids"] = positions.masked_fill(~mask, positions.max())
        targets: Tensor | tuple[Tensor, Tensor] | None = labels
        if labels is None and all(inputs.get(name) is not None for name in SPAN_LABELS):
            targets = inputs["start_positions"], inputs["end_positions"]
        return cls(
            inputs,
            targets,
            num_items,
            shape,
            mask,
            documents,
            first=rotated if first is None else first,
        )

    @property
    def device(self) -> torch.device:
        """Device of the inputs; sharded or offloaded parameters may be on another one."""
        return next(x.device for x in self.inputs.values() if isinstance(x, Tensor))

    @property
    def feature_mask(self) -> Tensor | None:
        """Mask of real tokens of features, with each document in a row of its own."""
        return self.mask if self.documents is None else self.documents.mask

    @property
    def document_ids(self) -> Tensor | None:
        """Document of each token if rows are packed, else None."""
        documents = self.documents
        return documents.document_ids if documents is not None and documents.packed else None

    @property
    def empty(self) -> bool:
        """Whether there are no rows, as in the last batch of a process without data left."""
        return any(isinstance(x, Tensor) and x.dim() and not len(x) for x in self.inputs.values())

    @property
    def token_mask(self) -> Tensor:
        """`mask`, all True if it is None."""
        if self.mask is not None:
            return self.mask
        assert self.shape is not None
        return torch.ones(self.shape, dtype=torch.bool)

    @property
    def read_by_teacher(self) -> "Batch":
        """The teacher's own batch, or this one."""
        return self.teacher or self

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Inputs without targets."""
        return {name: value for name, value in self.inputs.items() if name not in SPAN_LABELS}

    def align(self, spans: tuple[Tensor, Tensor]) -> None:
        """Set the spans of the student's and the teacher's tokens."""
        batches = list(zip((self, self.read_by_teacher), spans, strict=True))
        self.spans = Spans.of(*(batch._unpacked_spans(x) for batch, x in batches))
        rows = (x if b.first is None else rotate(x, b.first, 1) for b, x in batches)
        self.spans.paired = counterparts(*rows)

    def _unpacked_spans(self, spans: Tensor) -> Tensor:
        """Span of each token of the features."""
        if spans.shape != self.shape:
            raise ValueError(
                f"spans have shape {tuple(spans.shape)}, but the tokens {self.shape}; pass one "
                "span number per token"
            )
        if self.first is not None:
            spans = rotate(spans, self.first, 1)
        if self.documents is None:
            return spans
        if self.documents.packed:
            raise ValueError(
                "spans: packed rows can't have spans; put each document in its own row"
            )
        return self.documents.unpack(spans).masked_fill(~self.documents.mask, -1)


def split_inputs(
    batch: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], tuple[Tensor, Tensor] | None]:
    """The student's inputs, the teacher's own inputs, and the spans of student and teacher."""
    student, own = {}, {}
    for name, x in batch.items():
        if name.startswith("teacher_"):
            own[name.removeprefix("teacher_")] = x
        else:
            student[name] = x
    spans = student.pop("student_spans", None), own.pop("spans", None)
    if (spans[0] is None) != (spans[1] is None) or (spans[0] is not None and not own):
        raise ValueError(
            "student_spans, teacher_spans: one is missing, or the teacher has no teacher_ inputs; "
            "pass all three"
        )
    return student, own, None if spans[0] is None else (spans[0], spans[1])  # type: ignore[return-value]


def put_back(logits: Any, first: Tensor | None) -> Any:
    """One or more tensors of token logits (B, N, ...), in the token order before rotation."""
    # Waiting for the device once costs less than a copy of all logits.
    if first is None or (not torch.compiler.is_compiling() and not bool(first.any())):
        return logits
    return tree_map_only(Tensor, lambda x: rotate(x, (-first).to(x.device), 1), logits)


def _moved_answers(batch: dict[str, Any], first: Tensor) -> dict[str, Tensor]:
    """Answer positions in rotated rows; ignored positions outside the row stay as they are."""
    moved = {}
    for name in SPAN_LABELS:
        x = batch.get(name)
        if isinstance(x, Tensor):
            inside = (x >= 0) & (x < batch["attention_mask"].shape[-1])
            moved[name] = torch.where(inside, (x - first.view(x.shape)).clamp(min=0), x)
    return moved


def _token_mask(batch: dict[str, Any]) -> Tensor | None:
    """attention_mask as bool (B, N), with one row per choice of a question."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if mask.dim() not in (2, 3):
        raise ValueError(f"attention_mask must be (B, N), got shape {tuple(mask.shape)}")
    return mask.bool().flatten(0, -2)


def _batch_shape(batch: dict[str, Any], mask: Tensor | None) -> tuple[int, int] | None:
    """Shape (B, N) of the tokens; None if the inputs don't show it."""
    tokens = mask if mask is not None else batch.get("input_ids")
    if not isinstance(tokens, Tensor):
        tokens = batch.get("inputs_embeds")
        tokens = tokens[..., 0] if isinstance(tokens, Tensor) else None
    if tokens is None or tokens.dim() < 2:
        return None
    rows, length = tokens.flatten(0, -2).shape
    return rows, length
