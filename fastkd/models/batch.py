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
from fastkd.models.inputs import IGNORED, frames_mask, in_eval_mode
from fastkd.models.outputs import HeadOutput, LayerRequest, Outputs, model_outputs
from fastkd.models.spans import Spans, single_tokens

# Largest change of a document's hidden states, relative to their norm, if its neighbour's tokens
# change but it doesn't read them. Rounding errors are below this, even in bfloat16.
SAME = 1e-2
# Fresh weights respond less. A change is then significant if it exceeds float32's rounding error
# and this fraction of the change that the document's own tokens cause.
ROUNDING, FRACTION = 1e-5, 0.05
# Inputs that hold a vector (D,) or a box for each token.
TOKEN_VECTORS = ("inputs_embeds", "input_features", "bbox")


class MixedDocuments(ValueError):
    """A model's tokens read tokens of other documents in their row."""


@dataclass
class Documents:
    """Tokens of S documents, each starting at position 0.

    ``index`` (S, L) are the tokens' positions in the flattened batch (B·N), ``mask`` (S, L) marks
    real tokens, ``document_ids`` (B, N) is the document of each token (S for padding).
    """

    index: Tensor
    mask: Tensor
    document_ids: Tensor
    packed: bool

    def unpack(self, x: Tensor) -> Tensor:
        """Features (B, N, ...) as (S, L, ...)."""
        rows = x.flatten(0, 1).index_select(0, self.index.flatten())
        return rows.unflatten(0, self.index.shape)

    def unpack_maps(self, x: Tensor) -> Tensor:
        """Attention maps (B, H, N, N) as (S, H, L, L)."""
        N = x.shape[-1]
        rows = self.index[:, :, None] // N
        queries, keys = self.index[:, :, None] % N, self.index[:, None, :] % N
        return x.permute(0, 2, 3, 1)[rows, queries, keys].permute(0, 3, 1, 2)

    def norms(self, x: Tensor) -> Tensor:
        """Euclidean norm (B, N, 1) over the document of each token of ``x`` (B, N, D)."""
        squares = x.square().sum(-1).flatten()
        totals = squares.new_zeros(len(self.mask) + 1)
        totals = totals.index_put((self.document_ids.flatten(),), squares, accumulate=True)
        return totals.sqrt()[self.document_ids][..., None]

    def unpack_outputs(self, outputs: Outputs) -> Outputs:
        """Outputs whose features have each document in a row of its own."""

        def unpack(x: Tensor, tokens: int) -> Tensor:
            if tokens == 2:
                return self.unpack_maps(x)
            # Hidden states (B, N, D); queries, keys or values (B, H, N, D).
            return (
                self.unpack(x) if x.dim() == 3 else self.unpack(x.transpose(1, 2)).transpose(1, 2)
            )

        return outputs.features(unpack)


def find_documents(
    shape: tuple[int, int] | None,
    mask: Tensor | None,
    batch: dict[str, Any],
    segments: Tensor | None,
    *,
    at_front: bool = False,
) -> Documents | None:
    """Documents of a (B, N) batch; None if each row is one document that starts at position 0.

    ``segments`` (B, N) are document ids. Without them the documents come from a padding-free
    collator's ``seq_idx``, ``cu_seq_lens_q``, or ``position_ids`` that restart. With ``at_front``
    no row has left padding.
    """
    if shape is None:
        return None
    if segments is None:
        ends = batch.get("cu_seq_lens_q")
        if isinstance(batch.get("seq_idx"), Tensor):
            segments = batch["seq_idx"].expand(shape)
        elif isinstance(ends, Tensor):
            tokens = torch.arange(shape[0] * shape[1], device=ends.device, dtype=ends.dtype)
            segments = torch.bucketize(tokens, ends, right=True).view(shape)
    elif tuple(segments.shape) != shape:
        raise ValueError(
            f"segments must have the tokens' shape {shape}, got {tuple(segments.shape)}"
        )
    given, positions = batch.get("position_ids"), None
    if segments is None and isinstance(given, Tensor):
        # One per token (M-RoPE has several); `in` is not evaluated by Dynamo for dynamic sizes.
        one = given.numel() == shape[1] or given.numel() == shape[0] * shape[1]
        positions = given.reshape(-1, shape[1]).expand(shape) if one else None
    if segments is None and positions is None:
        if mask is None or at_front:
            return None
        if not values_readable(mask):
            return _moved_to_front(mask)
        if bool(mask[:, 0].all()):
            return None
    sample = next(x for x in (segments, positions, mask) if x is not None)
    real = torch.ones(shape, dtype=torch.bool, device=sample.device) if mask is None else mask
    rows, columns = real.nonzero(as_tuple=True)
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[1:] = rows[1:] != rows[:-1]
    first_of_row = starts.clone()
    if segments is not None:
        values = segments[rows, columns]
        starts[1:] |= values[1:] != values[:-1]
    elif positions is not None:
        values = positions[rows, columns]
        starts[1:] |= values[1:] <= values[:-1]
    packed = bool((starts != first_of_row).any())
    if not packed and not bool((columns[starts] > 0).any()):
        return None
    if not packed:
        return _moved_to_front(real)
    numbers = starts.cumsum(0) - 1
    offsets = columns - columns[starts][numbers]
    size = int(starts.sum()), int(offsets.max()) + 1
    index = torch.zeros(size, dtype=torch.int64, device=sample.device)
    index[numbers, offsets] = rows * shape[1] + columns
    real_tokens = torch.zeros(size, dtype=torch.bool, device=sample.device)
    real_tokens[numbers, offsets] = True
    document_ids = torch.full(shape, size[0], dtype=torch.int64, device=sample.device)
    document_ids[rows, columns] = numbers
    return Documents(index, real_tokens, document_ids, packed)


def _moved_to_front(mask: Tensor) -> Documents:
    """Documents that start at each row's first real token, without reading the mask's values.

    Rows are rotated: each token has one place, so that no gradients are added up, and masked
    tokens between others keep theirs.
    """
    B, N = mask.shape
    rows = torch.arange(B, device=mask.device)[:, None]
    first = mask.to(torch.uint8).argmax(1, keepdim=True)  # (B, 1), 0 where none is real
    index = rows * N + (torch.arange(N, device=mask.device) + first) % N  # (B, N)
    return Documents(index, mask.flatten()[index], torch.where(mask, rows, B), packed=False)


@torch.compiler.disable  # `find_documents` has broken the graph already
def check_apart(model: Backbone, name: str, inputs: dict[str, Any], documents: Documents) -> None:
    """Raise unless the model reads each document of packed rows separately.

    Text encoders don't. For other models it depends on family, attention and inputs, and is tested
    once for each set of input names: other tokens in one document must not change the hidden states
    of the next one.
    """
    if model.mixes_documents:
        raise _mixed(model, name, inputs)
    kind = (*sorted(inputs), len(documents.document_ids) == 1)
    if kind in model.known_apart:
        return
    # A sharded model runs in all processes at once, and other processes may have no packed rows.
    if any(hasattr(p, "device_mesh") for p in model.inner.parameters()):
        return
    tokens = "input_ids" if isinstance(inputs.get("input_ids"), Tensor) else "inputs_embeds"
    numbers = {n for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    given = inputs.get(tokens)
    # Other tokens would not fit the images of a multimodal batch.
    if given is None or given.shape[:2] != documents.document_ids.shape or numbers - {tokens}:
        return
    row, first, second = _neighbours(documents, given.device)
    begins = second & (second.cumsum(0) <= second.sum() // 2)
    rest = second & ~begins
    others = _with_other_tokens(given, row, first)
    if torch.equal(others, given):
        return
    last = model.num_layers
    with torch.no_grad(), in_eval_mode(model.model):
        request = LayerRequest((last,))
        seen, by_another, by_itself = (
            model_outputs(model, {**inputs, tokens: x}, request).hidden[last][row, rest].float()
            for x in (given, others, _with_other_tokens(given, row, begins))
        )
    torch.clear_autocast_cache()  # weights cast under no_grad would get no gradient later
    change, norm = (seen - by_another).norm(), seen.norm()
    own = (seen - by_itself).norm()
    if change > SAME * norm or (own > 0 and change > FRACTION * own and change > ROUNDING * norm):
        raise _mixed(model, name, inputs)
    model.known_apart.add(kind)


def _with_other_tokens(given: Tensor, row: int, where: Tensor) -> Tensor:
    """The inputs with other tokens at the positions ``where`` (N,) of a row."""
    changed = given.clone()
    changed[row, where] = given.flatten(0, 1).flip(0)[: int(where.sum())]
    return changed


def _mixed(model: Backbone, name: str, inputs: dict[str, Any]) -> MixedDocuments:
    takes_positions = not model.mixes_documents and model.takes("position_ids")
    lacking = takes_positions and "position_ids" not in inputs
    return MixedDocuments(
        f"rows are packed with several documents, which the {name} ({model.class_name}) reads as "
        f"one; {'pass position_ids that start again, ' if lacking else ''}give each document a row "
        "of its own, or pass segments of zeros if a row is one document"
    )


def _neighbours(documents: Documents, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """A row, and masks (N,) of the tokens of one of its documents and of the next one."""
    document_ids, nobody = documents.document_ids, len(documents.mask)
    border = (
        (document_ids[:, :-1] != document_ids[:, 1:])
        & (document_ids[:, :-1] < nobody)
        & (document_ids[:, 1:] < nobody)
    )
    row, column = border.nonzero()[0].tolist()
    document_ids = document_ids[row].to(device)
    return row, document_ids == document_ids[column], document_ids == document_ids[column + 1]


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
        _check_tokens(inputs, segments)
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


def _check_tokens(inputs: dict[str, Any], segments: Any) -> None:
    """Raise for what a tokenizer gives if it isn't a Tensor of the tokens' shape."""
    ids = inputs.get("input_ids")
    for name in ("segments", "input_ids", "attention_mask", "token_type_ids", "position_ids"):
        x = segments if name == "segments" else inputs.get(name)
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
        if x is None or ids is None or name == "segments" or torch.compiler.is_compiling():
            continue
        if name.endswith("_ids") and (x.is_floating_point() or x.dtype == torch.bool):
            raise TypeError(f"{name} must be integers, got {x.dtype}")
        if ids.dim() < 2:
            raise ValueError(f"input_ids must be (B, N), got shape {tuple(ids.shape)}")
        # Positions may be one row for all, or three for each token.
        of_tokens = x.shape[-1:] == ids.shape[-1:] if "position" in name else x.shape == ids.shape
        if not of_tokens:
            raise ValueError(
                f"{name} must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(x.shape)}"
            )


def pad_right(batch: Mapping[str, Any], side: str = "") -> tuple[dict[str, Any], Tensor | None]:
    """The batch with left padding moved to the right.

    Each row is rotated, so that every model counts positions from the first real token. Where the
    mask's values can't be read, all rows are rotated, by 0 if they have no left padding.

    Args:
        batch: inputs with ``attention_mask`` (B, N), or (B, C, N) for multiple choice.
        side: prefix of the input names: "decoder_" for a decoder's inputs.

    Returns:
        The inputs, and the position (B, 1) that each row's first real token had; None instead of
        positions if the batch is unchanged.
    """
    inputs, name = dict(batch), f"{side}attention_mask"
    mask = inputs.get(name)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 3) or not mask.numel():
        return inputs, None
    # Inputs with an entry, or a vector, for each token of the mask.
    tokens = [
        n
        for n, x in inputs.items()
        if n.startswith(side) and (side or not n.startswith("decoder_")) and isinstance(x, Tensor)
        if x.shape == mask.shape
        or (n.removeprefix(side) in TOKEN_VECTORS and x.shape[:-1] == mask.shape)
    ]
    if len(tokens) == 1 or "cu_seq_lens_q" in inputs:  # the mask alone, or one packed row
        return inputs, None
    if values_readable(mask) and bool(mask[..., 0].all()):
        return inputs, None
    first = mask.bool().to(torch.uint8).argmax(-1, keepdim=True)
    for n in tokens:
        inputs[n] = rotate(inputs[n], first, mask.dim() - 1)
    positions = inputs.get(f"{side}position_ids")
    if isinstance(positions, Tensor) and f"{side}position_ids" not in tokens:
        # One row for all samples, or three positions a token (M-RoPE): (3, B, N).
        positions = positions.expand(*positions.shape[:-2], *mask.shape)
        inputs[f"{side}position_ids"] = rotate(positions, first, -1)
    return inputs, first


def rotate(x: Tensor, first: Tensor, dim: int) -> Tensor:
    """``x`` rotated along ``dim``, so that each row begins with its entry ``first`` (B, 1)."""
    N = x.shape[dim]
    order = (torch.arange(N, device=first.device) + first) % N
    order = order.to(x.device).reshape(*order.shape, *(1,) * (x.dim() - 1 - dim % x.dim()))
    return x.gather(dim, order.expand_as(x))


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
    tensors = (x for x in batch.inputs.values() if isinstance(x, Tensor))
    if any(x.dim() and not len(x) for x in tensors):  # of a process without data left
        inputs = _one_row(inputs)
        outputs = model_outputs(backbone, inputs, request, head)
        return with_sentence(outputs, backbone, inputs, None).samples(lambda x: x[:0])
    outputs = model_outputs(backbone, inputs, request, head)
    if batch.documents is not None:
        outputs = batch.documents.unpack_outputs(outputs)
    if backbone.head_end is backbone.head_padding is None:
        return outputs
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
    """Inputs of one row without padding, in place of an empty batch: ids 0, or unlike numbers.

    Models can't run on no rows, and data-parallel training needs every parameter in the loss. Of
    vectors of zeros the logits would be 0, whatever a model computes after its head.
    """
    row = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.dim() and not len(x):
            shape = [1, *(max(1, size) for size in x.shape[1:])]
            row[name] = x.new_ones(shape) if "mask" in name else x.new_zeros(shape)
            if x.is_floating_point() and "mask" not in name:
                row[name] = torch.linspace(-1, 1, row[name].numel()).to(x).view(shape)
    return row
