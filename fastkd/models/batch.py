"""One batch: inputs of student and teacher, token mask, documents of packed rows, and spans."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastkd._core.numerics import values_readable
from fastkd.models.backbone import Backbone, Model, last_of, placed_for
from fastkd.models.documents import Documents, check_apart, find_documents
from fastkd.models.inputs import IGNORED, frames_mask, pad_right, rotate
from fastkd.models.outputs import HeadOutput, LayerRequest, Outputs, model_outputs
from fastkd.models.spans import Spans, single_tokens

SPAN_LABELS = ("start_positions", "end_positions")
# Arguments of a batch that no model reads.
NOT_INPUTS = ("labels", "segments", "num_items", "loss_weights")
# A decoder's own inputs.
DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds")


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
    #: With a teacher for each row: by its number its rows (b,), and the batch of these.
    parts: "dict[int, tuple[Tensor, Batch]] | None" = None

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
        readers: Sequence[Backbone],
        unmasks: bool,
    ) -> "Batch":
        """Batch of one model's inputs.

        ``readers`` are the models that read them. Left padding is moved behind the tokens, unless a
        reader's head reads the last position. ``unmasks`` removes the mask of packed rows.
        ``first`` (B, 1) is the position of the first label before its rotation, if the decoder's
        inputs derive from the labels.
        """
        rotated = None
        has_decoder_inputs = any(inputs.get(name) is not None for name in DECODER_TOKENS)
        if any(model.reads_last_position(inputs) for model in readers):
            check_side(readers, inputs)
        else:
            inputs, rotated = pad_right(inputs)
            if has_decoder_inputs:
                inputs, rotated = pad_right(inputs, "decoder_")  # labels belong to these
        if rotated is not None:
            if student.per_token and labels is not None and labels.dim() == 2:
                labels = rotate(labels, rotated, 1)
            segments = None if segments is None else rotate(segments, rotated, 1)
            inputs.update(_moved_answers(inputs, rotated))
        decoded = decoder_tokens(inputs, labels) if has_decoder_inputs else None
        if decoded is None:
            mask, shape = _token_mask(inputs, student)
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
        first = rotated if first is None else first
        return cls(inputs, targets, num_items, shape, mask, documents, first=first)

    @property
    def feature_mask(self) -> Tensor | None:
        """Mask of the real tokens of features, with each document in a row of its own."""
        return self.mask if self.documents is None else self.documents.mask

    @property
    def document_ids(self) -> Tensor | None:
        """Document (B, N) of each token if rows are packed."""
        if self.documents is None or not self.documents.packed:
            return None
        return self.documents.document_ids

    @property
    def device(self) -> torch.device:
        """Device of the inputs; sharded or offloaded parameters may be elsewhere."""
        tensors = (x for x in self.inputs.values() if isinstance(x, Tensor))
        return next((x.device for x in tensors), torch.device("cpu"))

    @property
    def empty(self) -> bool:
        """Whether there are no rows, as in the last batch of a process without data left."""
        tensors = (x for x in self.inputs.values() if isinstance(x, Tensor))
        return any(x.dim() and not len(x) for x in tensors)

    @property
    def token_mask(self) -> Tensor:
        """`mask`, all True if it is None."""
        if self.mask is not None:
            return self.mask
        assert self.shape is not None
        return torch.ones(self.shape, dtype=torch.bool)

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {name: value for name, value in self.inputs.items() if name not in SPAN_LABELS}

    def align(self, spans: tuple[Tensor, Tensor], causal: bool, several: bool = True) -> None:
        """Set the spans of the student's and the teacher's tokens.

        ``causal``: the heads predict the next token. Without ``several``, tokens of a span that has
        several on either side have no pair.
        """
        batches = list(zip((self, self.teacher or self), spans, strict=True))
        self.spans = Spans.of(*(batch._unpacked_spans(x) for batch, x in batches))
        rows = [x if b.first is None else rotate(x, b.first, 1) for b, x in batches]
        self.spans.rows = rows[0], rows[1]
        self.spans.ids = self.inputs.get("input_ids"), batches[1][0].inputs.get("input_ids")
        student, teacher = rows if several else map(single_tokens, rows)
        self.spans.pair(student, teacher, causal)

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


def from_front(
    model: Backbone, inputs: dict[str, Any], labels: Any
) -> tuple[dict[str, Any], Any, Tensor | None]:
    """Rotate labels that a decoder's inputs derive from to each row's first real label.

    Returns inputs, labels and the position (B, 1) of the first real label, None if unchanged.
    """
    given = any(inputs.get(name) is not None for name in DECODER_TOKENS)
    if not model.writes or given or not isinstance(labels, Tensor) or not len(labels):
        return inputs, labels, None
    known = labels != IGNORED
    if values_readable(known) and bool(known[:, 0].all()):
        return inputs, labels, None
    first = known.to(torch.uint8).argmax(1, keepdim=True)
    mask = inputs.get("decoder_attention_mask")
    if mask is not None:
        inputs = {**inputs, "decoder_attention_mask": rotate(mask, first, 1)}
    return inputs, rotate(labels, first, 1), first


def batch_of(model: Backbone, inputs: Mapping[str, Any], name: str) -> Batch:
    """Batch of a model that runs by itself, whose head isn't read; ``name`` is its name in errors.

    ``segments`` are document ids. ``labels`` give an encoder-decoder its decoder's inputs.
    """
    given = dict(inputs)
    labels, segments, *_ = (given.pop(x, None) for x in NOT_INPUTS)
    given, labels, first = from_front(model, given, labels)
    given = model.with_decoder_inputs(given, labels)
    batch = Batch.of(
        given, labels, None, segments, first, student=model, readers=(), unmasks=model.shows_states
    )
    check_tokens(batch, "", [(name, model)])
    return batch


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


def check_side(readers: Sequence[Backbone], batch: dict[str, Any]) -> None:
    """Raise for padding that stays in place, if a model counts it as positions or reads it."""
    mask = batch.get("attention_mask")
    if torch.compiler.is_compiling() or not isinstance(mask, Tensor) or not mask.numel():
        return
    behind = mask.any(-1) & (mask[..., -1] == 0)
    for reader in readers:
        if (
            reader.head_padding is not None
            and reader.reads_last_position(batch)
            and bool(behind.any())
        ):
            raise ValueError(
                f"attention_mask: {reader.class_name} reads the last position of a row, and rows "
                'are padded on the right; pad on the left (tokenizer.padding_side = "left")'
            )
        # XLNet's positions are relative; those of `Blocks` are unknown.
        known = reader.shows_states and reader.config.model_type != "xlnet"
        if known and "position_ids" not in batch and not bool(mask[..., 0].all()):
            raise ValueError(
                f"attention_mask: rows are padded on the left for a head that reads the last "
                f"position, and {reader.class_name} may count positions from the padding; pass "
                "position_ids"
            )


def _token_mask(
    batch: dict[str, Any], model: Backbone
) -> tuple[Tensor | None, tuple[int, int] | None]:
    """Mask and shape (B, N) of the tokens, one row per choice of a question.

    Either is None if the inputs don't have it. Tokens of an audio model are its frames.
    """
    mask = batch.get("attention_mask")
    if mask is not None:
        if mask.dim() not in (2, 3):
            raise ValueError(f"attention_mask must be (B, N), got shape {tuple(mask.shape)}")
        mask = mask.bool().flatten(0, -2)
        if "input_values" in batch:
            mask = frames_mask(model.inner, batch, mask)
    tokens = mask if mask is not None else batch.get("input_ids")
    if not isinstance(tokens, Tensor):
        tokens = batch.get("inputs_embeds")
        tokens = tokens[..., 0] if isinstance(tokens, Tensor) else None
    if tokens is None or tokens.dim() < 2:
        return mask, None
    rows, length = tokens.flatten(0, -2).shape
    return mask, (rows, length)


def decoder_tokens(
    batch: dict[str, Any], labels: Any
) -> tuple[Tensor | None, tuple[int, int]] | None:
    """Mask and shape (B, M) of a decoder's own input tokens; None if the batch has none.

    A token is real if ``decoder_attention_mask`` and its label, other than −100, say so.
    """
    given = (batch.get(name) for name in DECODER_TOKENS)
    tokens = next((x for x in given if isinstance(x, Tensor)), None)
    if tokens is None:
        return None
    rows, length = tokens.shape[:2]
    mask = batch.get("decoder_attention_mask")
    mask = None if mask is None else mask.bool()
    if isinstance(labels, Tensor) and labels.shape == (rows, length):
        known = labels != IGNORED
        mask = known if mask is None else mask & known
    return mask, (rows, length)


def check_tokens(batch: Batch, prefix: str, readers: Sequence[tuple[str, Backbone]]) -> None:
    """Raise for ids outside a reader's vocabulary, and for packed rows that it can't read.

    ``readers``: models with their names in errors. Ids are not checked if reading them waits for
    the device.
    """
    ids, documents, largest = batch.inputs.get("input_ids"), batch.documents, -1
    # Multimodal models may have image tokens beyond their vocabulary.
    others = any(isinstance(x, Tensor) and x.is_floating_point() for x in batch.inputs.values())
    if isinstance(ids, Tensor) and ids.numel() and not others and values_readable(ids):
        largest = int(ids.max())
    for name, model in readers:
        if model.num_tokens is not None and largest >= model.num_tokens:
            raise ValueError(
                f"{prefix}input_ids: the id {largest} is not one of the {model.num_tokens} tokens "
                f"of the {name} ({model.class_name}); pass ids of its own tokenizer"
            )
        if documents is not None and documents.packed:
            inputs = placed_for(model.uncompiled, batch.model_inputs)
            check_apart(model, name, inputs, documents)


def batch_outputs(
    backbone: Backbone,
    inputs: dict[str, Any],
    request: LayerRequest,
    batch: Batch,
    head: HeadOutput = "logits",
) -> Outputs:
    """Outputs of a model on a batch, each document of packed rows in a row of its own."""
    if batch.empty:
        inputs = _one_row(inputs)
        outputs = model_outputs(backbone, inputs, request, head)
        return with_sentence(outputs, backbone, inputs, None).samples(lambda x: x[:0])
    outputs = model_outputs(backbone, inputs, request, head)
    if batch.documents is not None:
        outputs = batch.documents.unpack_outputs(outputs)
    return with_sentence(outputs, backbone, inputs, batch.documents)


def with_sentence(
    outputs: Outputs, model: Model, inputs: dict[str, Any], documents: Documents | None
) -> Outputs:
    """Outputs with the positions of the tokens that heads for whole rows read, where known."""
    tokens = model.head_tokens(inputs)
    if tokens is None or (documents is not None and documents.packed):
        return outputs
    if documents is not None:
        tokens = documents.unpack(tokens) & documents.mask
    return dataclasses.replace(outputs, sentence=last_of(tokens))


def all_layers(model: Backbone, batch: Batch) -> Outputs:
    """Hidden states of every layer of a model, embeddings first; see `batch_outputs`."""
    request = LayerRequest(tuple(range(model.num_layers + 1)))
    inputs = placed_for(model.uncompiled, batch.model_inputs)
    return batch_outputs(model, inputs, request, batch, "none")


def _one_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of one row of zeros, without padding, in place of an empty batch.

    Models can't run on no rows, and data-parallel training needs every parameter in the loss.
    """
    row = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.dim() and not len(x):
            shape = [1, *(max(1, size) for size in x.shape[1:])]
            row[name] = x.new_ones(shape) if "mask" in name else x.new_zeros(shape)
    return row
