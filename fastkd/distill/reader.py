"""Reading arguments into a batch: student inputs, teacher inputs, labels, spans, documents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkd._core.checks import check_floating, check_no_grad, check_shape
from fastkd._core.numerics import values_readable
from fastkd.analysis.model_inputs import IGNORED, rotate
from fastkd.distill.backbone import Backbone
from fastkd.distill.batch import SPAN_LABELS, Batch, split_inputs
from fastkd.distill.documents import DECODER_TOKENS, decoder_tokens
from fastkd.distill.method import Method
from fastkd.distill.predictions import countable
from fastkd.distill.spans import check_paired_tokens, counterparts
from fastkd.distill.teachers import (
    Teachers,
    check_documents,
    check_side,
    check_tokens,
    check_vocabularies,
)


@dataclass(eq=False)
class BatchReader:
    """Reads batches for a student, its teachers and their method."""

    student: Backbone
    teachers: Teachers
    method: Method

    def read(self, inputs: Mapping[str, Any], num_items: float | Tensor | None = None) -> Batch:
        """Read arguments as in `Distiller.forward`; ``num_items`` in ``inputs`` is ignored."""
        batch, own, spans = self._split(inputs, num_items)
        if own and self.method.uses_teacher:
            batch.teacher = self._batch(own, self.teachers.live)
            per_token = self.student.per_token or isinstance(batch.labels, tuple)
            paired = spans is not None and self._pairs_tokens
            for teacher, method in self.teachers.with_methods(self.method):
                teacher.check_own_inputs(method, per_token, spans is not None, paired)
            if spans is not None and paired:
                ids = inputs.get("input_ids"), own.get("input_ids")
                check_paired_tokens(type(self.method).__name__, spans, ids, batch.labels)
            if spans is not None:
                batch.align(spans)
        if self.method.uses_teacher:
            check_vocabularies(self.student, self.teachers, batch)
        check_tokens(self.student, "student", "", batch.inputs)
        check_documents("student", self.student, batch)
        for teacher, method in self.teachers.with_methods(self.method):
            for backbone in teacher.live if method.uses_teacher else ():
                prefix = "teacher_" if batch.teacher else ""
                check_tokens(backbone, "teacher", prefix, batch.read_by_teacher.inputs)
                check_documents("teacher", backbone, batch.read_by_teacher)
        return batch

    def _split(self, inputs: Mapping[str, Any], num_items: Any = None) -> tuple[Batch, Any, Any]:
        """The student's batch, the teacher's own inputs, and the spans of student and teacher."""
        student, own, spans = split_inputs(inputs)
        labels, segments, _ = (student.pop(x, None) for x in ("labels", "segments", "num_items"))
        loss_weights = student.pop("loss_weights", None)
        if spans is not None and isinstance(labels, Tensor) and self._pairs_tokens:
            # Predictions are compared where both models read the token.
            labels = labels.masked_fill(counterparts(*spans) < 0, IGNORED)
        student, labels, first = self._from_front(student, labels)
        student = self.student.with_decoder_inputs(student, labels)
        readers = [self.student, *([] if own else self.teachers.live)]
        batch = self._batch(student, readers, labels, num_items, segments, first)
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

    @property
    def _pairs_tokens(self) -> bool:
        """Whether predictions for tokens are compared, those of a teacher's own inputs by spans."""
        methods = (method for _, method in self.teachers.with_methods(self.method))
        per_token = self.student.per_token and not self.student.encoder_decoder
        return per_token and any(
            method.uses_teacher and method.compares_logits(0.0, 1.0) for method in methods
        )

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

    def _batch(self, inputs: dict[str, Any], readers: list[Backbone], *targets: Any) -> Batch:
        # Only transformers' models are known to separate packed documents without a mask.
        unmasks = all(model.shows_states for model in (self.student, *self.teachers.live))
        rotates = not any(model.reads_last_position(inputs) for model in readers)
        if not rotates:
            check_side(readers, inputs)
        return Batch.of(inputs, *targets, student=self.student, unmasks=unmasks, rotates=rotates)

    def read_student(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Batch:
        """Read the student's inputs alone, without those of a teacher."""
        inputs, labels, first = self._from_front(inputs, labels)
        return self._batch(inputs, [self.student], labels, None, None, first)

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
        valid = torch.ones_like(labels, dtype=torch.bool) if batch.mask is None else batch.mask
        counted, _ = countable(labels, valid, batch.document_ids, self.student.causal)
        return counted.sum()
