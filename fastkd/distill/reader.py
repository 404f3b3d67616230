"""Reading a batch of arguments: the student's inputs, the teacher's, labels, spans, documents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkd._core.numerics import values_readable
from fastkd.analysis.model_inputs import IGNORED, rotate
from fastkd.distill.backbone import Backbone
from fastkd.distill.batch import SPAN_LABELS, Part, split_inputs
from fastkd.distill.documents import DECODER_TOKENS, decoder_tokens
from fastkd.distill.method import Method
from fastkd.distill.predictions import countable
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

    def read(self, batch: Mapping[str, Any], num_items: float | Tensor | None = None) -> Part:
        """A batch of arguments as in `Distiller.forward`. ``num_items`` in the batch is ignored."""
        part, own, spans = self._split(batch, num_items)
        if own and self.method.uses_teacher:
            part.teacher = self._part(own, self.teachers.live)
            spanned = self.student.per_token or isinstance(part.labels, tuple)
            for teacher, method in self.teachers.with_methods(self.method):
                teacher.check_own_inputs(method, spanned, spans is not None)
            if spans is not None:
                part.align(spans)
        if self.method.uses_teacher:
            check_vocabularies(self.student, self.teachers, part)
        check_tokens(self.student, "student", "", part.batch)
        check_documents("student", self.student, part)
        for teacher, method in self.teachers.with_methods(self.method):
            for backbone in teacher.live if method.uses_teacher else ():
                prefix = "teacher_" if part.teacher else ""
                check_tokens(backbone, "teacher", prefix, part.read_by_teacher.batch)
                check_documents("teacher", backbone, part.read_by_teacher)
        return part

    def _split(self, batch: Mapping[str, Any], num_items: Any = None) -> tuple[Part, Any, Any]:
        """What the student reads, the teacher's own inputs, and the spans of both."""
        student, own, spans = split_inputs(batch)
        labels, segments, _ = (student.pop(x, None) for x in ("labels", "segments", "num_items"))
        student, labels, first = self._from_front(student, labels)
        student = self.student.with_decoder_inputs(student, labels)
        readers = [self.student, *([] if own else self.teachers.live)]
        part = self._part(student, readers, labels, num_items, segments, first)
        return part, own, spans

    def _from_front(
        self, batch: dict[str, Any], labels: Any
    ) -> tuple[dict[str, Any], Any, Tensor | None]:
        """Labels that a decoder's inputs are made of, from each row's first real one on, and its
        position (B, 1); None where they are unchanged."""
        given = any(batch.get(name) is not None for name in DECODER_TOKENS)
        if not self.student.writes or given or not isinstance(labels, Tensor) or not len(labels):
            return batch, labels, None
        known = labels != IGNORED
        if values_readable(known) and bool(known[:, 0].all()):
            return batch, labels, None
        first = known.to(torch.uint8).argmax(1, keepdim=True)
        mask = batch.get("decoder_attention_mask")
        if mask is not None:
            batch = {**batch, "decoder_attention_mask": rotate(mask, first, 1)}
        return batch, rotate(labels, first, 1), first

    def _part(self, batch: dict[str, Any], readers: list[Backbone], *targets: Any) -> Part:
        # Only transformers' models are known to take packed rows apart without a mask.
        unmasks = all(side.shows_states for side in (self.student, *self.teachers.live))
        rotates = not any(side.reads_last_position(batch) for side in readers)
        if not rotates:
            check_side(readers, batch)
        return Part.of(batch, *targets, student=self.student, unmasks=unmasks, rotates=rotates)

    def read_student(self, batch: dict[str, Any], labels: Tensor | None = None) -> Part:
        """Inputs of the student without a teacher; documents of packed rows stay apart."""
        batch, labels, first = self._from_front(batch, labels)
        return self._part(batch, [self.student], labels, None, None, first)

    def teacher_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of the teacher in a batch: its own ``teacher_`` inputs, or the student's."""
        student, own, _ = split_inputs(batch)
        if own:
            return own
        student, labels, _ = self._from_front(student, student.get("labels"))
        read = self.student.with_decoder_inputs(student, labels)
        mask, _ = decoder_tokens(read, labels) or (None, None)
        targets = {"labels", "segments", "num_items", *SPAN_LABELS}
        read = {name: x for name, x in read.items() if name not in targets}
        return read if mask is None else {**read, "decoder_attention_mask": mask.long()}

    def count_items(self, batch: Mapping[str, Any]) -> Tensor:
        """See `Distiller.count_items`."""
        part = self._split(batch)[0]
        labels: Any = part.labels
        valid = torch.ones_like(labels, dtype=torch.bool) if part.mask is None else part.mask
        counted, _ = countable(labels, valid, part.owner, self.student.causal)
        return counted.sum()
