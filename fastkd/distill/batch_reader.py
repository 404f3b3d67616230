"""Reading arguments into a batch: student inputs, teacher inputs, labels, spans, documents.

A model that reads packed rows is tested once: does each document get the result of its own row?
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkd._core.checks import check_floating, check_no_grad, check_shape
from fastkd._core.numerics import values_readable
from fastkd.distill.batch import (
    DECODER_TOKENS,
    SPAN_LABELS,
    Batch,
    Documents,
    decoder_tokens,
    split_inputs,
)
from fastkd.distill.method import Method
from fastkd.distill.prediction_losses import countable
from fastkd.distill.spans import check_paired_tokens, paired_positions
from fastkd.distill.teachers import Teachers
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.models.backbone import Backbone, placed_for
from fastkd.models.inputs import IGNORED, in_eval_mode, rotate
from fastkd.models.outputs import LayerRequest, model_outputs
from fastkd.models.vocabulary import other_vocabulary

# Largest change of a document's hidden states, relative to their norm, if its neighbour's tokens
# change but it doesn't read them. Rounding errors are below this, even in bfloat16.
SAME = 1e-2
# Fresh weights respond less. A change is then significant if it exceeds float32's rounding error
# and this fraction of the change that the document's own tokens cause.
ROUNDING, FRACTION = 1e-5, 0.05


class MixedDocuments(ValueError):
    """A model's tokens read tokens of other documents in their row."""


class BatchReader:
    """Reads batches for a student, its teachers and their method."""

    def __init__(self, student: Backbone, teachers: Teachers, method: Method) -> None:
        self.student, self.teachers = student, teachers
        self.method_name = type(method).__name__
        #: Whether predictions for tokens are compared; spans pair those of a teacher's own inputs.
        self.pairs_tokens = (
            student.per_token
            and not student.encoder_decoder
            and any(m.uses_teacher and m.compares_logits(0.0, 1.0) for _, m in teachers.pairs)
        )
        #: Whether a teacher has another vocabulary: soft targets then are at paired tokens alone.
        self.two_vocabularies = any(
            isinstance(teacher.model.vocabulary, VocabularyMatch) for teacher in teachers.each
        )
        # Only transformers' models are known to separate packed documents without a mask.
        self.unmasks = all(model.shows_states for model in (student, *teachers.live))
        #: Warnings of teachers with a vocabulary of another size, until a batch shows that they
        #: read the student's ids. Tokenizers and the heads' vocabularies were compared already.
        self.vocabulary_warnings = [
            other_vocabulary(student.num_tokens, teacher.model.num_tokens)
            for teacher, method in teachers.pairs
            if method.uses_teacher
            and teacher.live
            and student.num_tokens is not None
            and teacher.model.num_tokens not in (None, student.num_tokens)
            and student.tokenizer is None
            and teacher.model.vocabulary is None
        ]

    def read(self, inputs: Mapping[str, Any], num_items: float | Tensor | None = None) -> Batch:
        """Read arguments as in `Distiller.forward`; ``num_items`` in ``inputs`` is ignored."""
        batch, own, spans = self._split(inputs, num_items)
        teaching = [(t, method) for t, method in self.teachers.pairs if method.uses_teacher]
        if self.two_vocabularies and self.pairs_tokens and spans is None:
            raise ValueError(
                "teacher_spans: the teacher has another vocabulary; pass its inputs and both "
                "spans, as TwoTokenizers returns them"
            )
        if own and teaching:
            batch.teacher = Batch.of(
                own, student=self.student, readers=self.teachers.live, unmasks=self.unmasks
            )
            per_token = self.student.per_token or isinstance(batch.labels, tuple)
            paired = spans is not None and self.pairs_tokens
            for teacher, method in self.teachers.pairs:
                teacher.check_own_inputs(method, per_token, spans is not None, paired)
            if spans is not None and paired and not self.two_vocabularies:
                ids = inputs.get("input_ids"), own.get("input_ids")
                check_paired_tokens(self.method_name, spans, ids, batch.labels)
            if spans is not None:
                batch.align(spans, self.student.causal, several=not self.two_vocabularies)
        elif self.vocabulary_warnings and "input_ids" in batch.inputs:
            for warning in self.vocabulary_warnings:
                warnings.warn(
                    f"the student: {warning} (tokenizers=... has that checked; TwoTokenizers gives "
                    "each side its own)",
                    stacklevel=2,
                )
            self.vocabulary_warnings = []
        teachers = [("teacher", model) for teacher, _ in teaching for model in teacher.live]
        check_tokens(batch, "", [("student", self.student), *([] if batch.teacher else teachers)])
        if batch.teacher is not None:
            check_tokens(batch.teacher, "teacher_", teachers)
        return batch

    def _split(self, inputs: Mapping[str, Any], num_items: Any = None) -> tuple[Batch, Any, Any]:
        """The student's batch, the teacher's own inputs, and the spans of student and teacher."""
        student, own, spans = split_inputs(inputs)
        labels, segments, _ = (student.pop(x, None) for x in ("labels", "segments", "num_items"))
        loss_weights = student.pop("loss_weights", None)
        pairs_labels = self.pairs_tokens and not self.two_vocabularies
        if spans is not None and isinstance(labels, Tensor) and pairs_labels:
            # Predictions are compared where both models read the token.
            labels = labels.masked_fill(
                paired_positions(*spans) < int(self.student.causal), IGNORED
            )
        student, labels, first = self._from_front(student, labels)
        student = self.student.with_decoder_inputs(student, labels)
        batch = Batch.of(
            student,
            labels,
            num_items,
            segments,
            first,
            student=self.student,
            readers=[self.student, *([] if own else self.teachers.live)],
            unmasks=self.unmasks,
        )
        if loss_weights is not None:
            batch.loss_weights = self._checked_loss_weights(loss_weights, batch)
        return batch, own, spans

    def _checked_loss_weights(self, loss_weights: Any, batch: Batch) -> Tensor:
        """``loss_weights`` (B, N), in the token order of the labels."""
        if not self.student.per_token:
            raise ValueError(
                "loss_weights are factors of the predictions of tokens, and the head of "
                f"{self.student.class_name} gives one prediction a row; leave them out"
            )
        check_floating("loss_weights", loss_weights)
        check_no_grad("loss_weights", loss_weights)
        shape = batch.shape if batch.labels is None else getattr(batch.labels, "shape", ())
        check_shape("loss_weights", loss_weights, tuple(shape or ()), "one for each label")
        return loss_weights if batch.first is None else rotate(loss_weights, batch.first, 1)

    def _from_front(
        self, inputs: dict[str, Any], labels: Any
    ) -> tuple[dict[str, Any], Any, Tensor | None]:
        """Rotate labels that a decoder's inputs derive from to each row's first real label.

        Returns inputs, labels and the position (B, 1) of the first real label, None if unchanged.
        """
        given = any(inputs.get(name) is not None for name in DECODER_TOKENS)
        if not self.student.writes or given or not isinstance(labels, Tensor) or not len(labels):
            return inputs, labels, None
        known = labels != IGNORED
        if values_readable(known) and bool(known[:, 0].all()):
            return inputs, labels, None
        first = known.to(torch.uint8).argmax(1, keepdim=True)
        mask = inputs.get("decoder_attention_mask")
        if mask is not None:
            inputs = {**inputs, "decoder_attention_mask": rotate(mask, first, 1)}
        return inputs, rotate(labels, first, 1), first

    def read_student(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Batch:
        """Read the student's inputs alone, without those of a teacher."""
        inputs, labels, first = self._from_front(inputs, labels)
        return Batch.of(
            inputs,
            labels,
            first=first,
            student=self.student,
            readers=[self.student],
            unmasks=self.unmasks,
        )

    def teacher_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's inputs in a batch: its ``teacher_`` inputs, or else the student's."""
        student, own, _ = split_inputs(inputs)
        if own:
            return own
        student, labels, _ = self._from_front(student, student.get("labels"))
        read = self.student.with_decoder_inputs(student, labels)
        mask, _ = decoder_tokens(read, labels) or (None, None)
        targets = {"labels", "segments", "num_items", "loss_weights", *SPAN_LABELS}
        read = {name: x for name, x in read.items() if name not in targets}
        return read if mask is None else {**read, "decoder_attention_mask": mask.long()}

    def count_items(self, inputs: Mapping[str, Any]) -> Tensor:
        """See `Distiller.count_items`."""
        batch = self._split(inputs)[0]
        labels: Any = batch.labels
        if labels is not None and batch.mask is None:
            valid = torch.ones_like(labels, dtype=torch.bool)
        else:
            valid = batch.token_mask
        counted, _ = countable(labels, valid, batch.document_ids, self.student.causal)
        return counted.sum()


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
