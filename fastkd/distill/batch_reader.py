"""Reading arguments into a batch: student inputs, teacher inputs, labels, spans, documents."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkd._core import check
from fastkd.distill.method import Method
from fastkd.distill.prediction_losses import countable
from fastkd.distill.spans import check_paired_tokens
from fastkd.distill.teachers import Teachers
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.models.backbone import Backbone
from fastkd.models.batch import (
    SPAN_LABELS,
    Batch,
    check_tokens,
    decoder_tokens,
    from_front,
    split_inputs,
)
from fastkd.models.inputs import IGNORED, rotate
from fastkd.models.spans import paired_positions
from fastkd.models.vocabulary import other_vocabulary


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
            other_vocabulary(student.num_tokens, model.num_tokens)
            for teacher, method in teachers.pairs
            for model in teacher.live
            if method.uses_teacher
            and student.num_tokens is not None
            and model.num_tokens not in (None, student.num_tokens)
            and student.tokenizer is None
            and model.vocabulary is None
        ]

    def read(self, inputs: Mapping[str, Any], num_items: float | Tensor | None = None) -> Batch:
        """Read arguments as in `Distiller.forward`; ``num_items`` in ``inputs`` is ignored."""
        by_row = self.teachers.by_row
        if by_row is None:
            return self._read(inputs, num_items, self.teachers.live)
        split = by_row.module.split(inputs)
        inputs = {name: x for name, x in inputs.items() if name != "teacher_id"}
        others = [model for model in self.teachers.live if model not in by_row.live]
        batch = self._read(inputs, num_items, others)
        batch.parts = {
            number: (rows, self._read(own, num_items, by_row.each[number].live))
            for number, (rows, own) in split.items()
        }
        return batch

    def _read(self, inputs: Mapping[str, Any], num_items: Any, live: Sequence[Backbone]) -> Batch:
        """Read a batch whose rows the models ``live`` read."""
        batch, own, spans = self._split(inputs, num_items)
        teaching = [(t, method) for t, method in self.teachers.pairs if method.uses_teacher]
        if self.two_vocabularies and self.pairs_tokens and spans is None:
            raise ValueError(
                "teacher_spans: the teacher has another vocabulary; pass its inputs and both "
                "spans, as TwoTokenizers returns them"
            )
        if own and teaching:
            batch.teacher = self._batch(own, readers=self.teachers.live)
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
        teachers = [("teacher", model) for teacher, _ in teaching for model in teacher.live
                    if model in live]  # fmt: skip
        check_tokens(batch, "", [("student", self.student), *([] if batch.teacher else teachers)])
        if batch.teacher is not None:
            check_tokens(batch.teacher, "teacher_", teachers)
        return batch

    def _split(self, inputs: Mapping[str, Any], num_items: Any = None) -> tuple[Batch, Any, Any]:
        """The student's batch, the teacher's own inputs, and the spans of student and teacher."""
        student, own, spans = split_inputs(inputs)
        own.pop("id", None)  # teacher_id
        labels, segments, _ = (student.pop(x, None) for x in ("labels", "segments", "num_items"))
        loss_weights = student.pop("loss_weights", None)
        pairs_labels = self.pairs_tokens and not self.two_vocabularies
        if spans is not None and isinstance(labels, Tensor) and pairs_labels:
            # Predictions are compared where both models read the token.
            unpaired = paired_positions(*spans) < int(self.student.causal)
            labels = labels.masked_fill(unpaired, IGNORED)
        student, labels, first = from_front(self.student, student, labels)
        student = self.student.with_decoder_inputs(student, labels)
        readers = [self.student, *([] if own else self.teachers.live)]
        batch = self._batch(student, labels, num_items, segments, first, readers=readers)
        if loss_weights is not None:
            batch.loss_weights = self._checked_loss_weights(loss_weights, batch)
        return batch, own, spans

    def _batch(self, *given: Any, **options: Any) -> Batch:
        return Batch.of(*given, student=self.student, unmasks=self.unmasks, **options)

    def _checked_loss_weights(self, loss_weights: Any, batch: Batch) -> Tensor:
        """``loss_weights`` (B, N), in the token order of the labels."""
        if not self.student.per_token:
            raise ValueError(
                "loss_weights are factors of the predictions of tokens, and the head of "
                f"{self.student.class_name} gives one prediction a row; leave them out"
            )
        check.floating("loss_weights", loss_weights)
        check.no_grad("loss_weights", loss_weights)
        shape = batch.shape if batch.labels is None else getattr(batch.labels, "shape", ())
        check.shape("loss_weights", loss_weights, tuple(shape or ()), "one for each label")
        return loss_weights if batch.first is None else rotate(loss_weights, batch.first, 1)

    def read_student(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Batch:
        """Read the student's inputs alone, without those of a teacher."""
        inputs, labels, first = from_front(self.student, inputs, labels)
        return self._batch(inputs, labels, first=first, readers=[self.student])

    def teacher_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's inputs in a batch: its ``teacher_`` inputs, or else the student's."""
        student, own, _ = split_inputs(inputs)
        if own:
            return own
        student, labels, _ = from_front(self.student, student, student.get("labels"))
        read = self.student.with_decoder_inputs(student, labels)
        mask, _ = decoder_tokens(read, labels) or (None, None)
        targets = {"labels", "num_items", "loss_weights", *SPAN_LABELS}
        read = {name: x for name, x in read.items() if name not in targets}
        return read if mask is None else {**read, "decoder_attention_mask": mask.long()}

    def count_items(self, inputs: Mapping[str, Any]) -> Tensor:
        batch = self._split(inputs)[0]
        labels: Any = batch.labels
        if labels is not None and batch.mask is None:
            valid = torch.ones_like(labels, dtype=torch.bool)
        else:
            valid = batch.token_mask
        counted, _ = countable(labels, valid, batch.document_ids, self.student.causal)
        return counted.sum()
