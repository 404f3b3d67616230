"""The step: a student, its teachers and a batch, turned into loss terms."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastkd._core.numerics import upcast, values_readable, zero_padding
from fastkd.analysis.layers import IGNORED, rotate
from fastkd.distill.batch import SPAN_LABELS, Part, put_back, split_inputs
from fastkd.distill.capture import Backbone, replaced_embeddings
from fastkd.distill.documents import DECODER_TOKENS, decoder_tokens
from fastkd.distill.method import Method, Only
from fastkd.distill.predictions import countable
from fastkd.distill.sides import (
    Teachers,
    check_documents,
    check_side,
    check_tokens,
    check_vocabularies,
    run,
)
from fastkd.distill.step import Items, Outputs, SeveralOutputs, Step
from fastkd.distributed import Ranks


@dataclass
class DistillerOutput:
    """Result of a `Distiller`.

    ``loss`` to call backward on; its ``terms`` by name, detached and before weighting, with their
    weighted sum as "total"; the student's ``logits``, detached, those of start and end for question
    answering; None without a head, and for a language model unless ``keep_logits``.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    logits: Tensor | tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, loss: Tensor, terms: dict[str, Tensor], step: Step) -> "DistillerOutput":
        """Of a step that was taken."""
        # Attached, logits that no term uses would make DistributedDataParallel wait for them.
        logits = tree_map_only(Tensor, Tensor.detach, step.student.logits)
        if step.student_model.per_token or isinstance(logits, tuple):
            logits = put_back(logits, step.first)
        return cls(loss, terms, logits)


# DistributedDataParallel(static_graph=True) and FSDP2 find the loss as a leaf of the output.
torch.utils._pytree.register_dataclass(DistillerOutput)


@dataclass(eq=False)
class Engine:
    """Both sides and the method of a `Distiller`, as they are at the moment.

    ``progress`` of the training is 0 to 1; the samples of ``ranks`` count as one batch.
    """

    student: Backbone
    teachers: Teachers
    method: Method
    progress: float = 0.0
    ranks: Ranks | None = None
    keep_logits: bool = False

    @property
    def by_head(self) -> bool:
        """Whether language models are known by their heads, not by their logits."""
        known = self.method.uses_lm_head and not self.student.encoder_decoder
        return known and not self.keep_logits

    @property
    def perturbs(self) -> bool:
        """Whether the student's embeddings are moved in a step."""
        return self.method.perturb and self.student.model.training and torch.is_grad_enabled()

    def read(self, batch: Mapping[str, Any], num_items: float | Tensor | None = None) -> Part:
        """A batch of arguments as in `Distiller.forward`; another ``num_items`` is not read."""
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

    def alone(self, batch: dict[str, Any], labels: Tensor | None = None) -> Part:
        """What a student reads without a teacher: of packed rows, too, each document by itself."""
        batch, labels, first = self._from_front(batch, labels)
        return self._part(batch, [self.student], labels, None, None, first)

    def read_by_teacher(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch's inputs for the teacher, which may be its own."""
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

    def run_teacher(self, part: Part) -> Outputs:
        """What the teachers say about a batch; nothing where the method doesn't ask."""
        parts = tuple(
            teacher.run(part, method, self.progress, self.by_head)
            if method.uses_teacher
            else Outputs({}, None)
            for teacher, method in self.teachers.with_methods(self.method)
        )
        return SeveralOutputs({}, None, parts=parts) if self.teachers.several else parts[0]

    def run_student(self, part: Part) -> Outputs:
        """What the student says about a batch."""
        wanted = self.method.wanted("student")
        outputs = run(self.student, part.batch, wanted, part, by_head=self.by_head)
        if part.spans is None:
            return outputs
        return part.spans.pool(outputs, 0, self.student, part.feature_mask)

    def step(self, part: Part, student: Outputs, teacher: Outputs, items: Items) -> Step:
        """What the method sees."""
        return Step(
            student,
            teacher,
            self.student,
            self.teachers.model,
            part.feature_mask if part.spans is None else part.spans.mask,
            part.labels,
            part.num_items,
            token_mask=part.mask,
            owner=part.owner,
            first=part.first,
            ranks=items.ranks,
            items=items,
        ).among_ranks()

    def losses(
        self, step: Step, only: Only | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weighted loss and terms of the method."""
        device = next(self.student.model.parameters()).device.type
        with torch.autocast(device, enabled=False):
            loss, terms = self.method(step, self.progress, only)
            router = None if only == "features" else step.router_loss()
        if router is None:
            return loss, terms
        weighted = self.student.stack_config.router_aux_loss_coef * router
        return weighted if loss is None else loss + weighted, {**terms, "router": router.detach()}

    def add_up(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and terms, "total" among them."""
        total, terms = self.losses(step)
        if total is None:
            raise ValueError(f"all weights of {type(self.method).__name__} are zero")
        terms = {**terms, "total": total.detach()}
        if step.ranks is not None:
            # Each process has its share of the gradient, and all of the value.
            values = step.ranks.sum(torch.stack(list(terms.values()))) / step.ranks.size
            terms = dict(zip(terms, values, strict=True))
            total = values[-1] + (total - total.detach())
        return total, terms

    def __call__(self, part: Part) -> DistillerOutput:
        """Loss of one batch."""
        teacher = self.run_teacher(part)
        items = Items(self.ranks)

        def learn() -> DistillerOutput:
            step = self.step(part, self.run_student(part), teacher, items)
            return DistillerOutput.of(*self.add_up(step), step)

        if not self.perturbs:
            return learn()
        with self.leaf_embeddings() as embeddings:
            total = learn().loss
        with self.moved_embeddings(self.unit_gradient(total, embeddings, part)):
            return learn()

    def leaf_embeddings(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """The student runs from embeddings that have a gradient."""
        if self.student.compiled:
            raise ValueError(
                f"{type(self.method).__name__} moves the embeddings inside the student, which "
                "compiled code doesn't allow; pass the student uncompiled, or set perturb=False"
            )
        return replaced_embeddings(self.student, lambda emb: emb.detach().requires_grad_())

    def moved_embeddings(
        self, shift: Tensor | None
    ) -> contextlib.AbstractContextManager[list[Tensor]]:
        """The student runs from embeddings that are moved."""
        if shift is None:
            return contextlib.nullcontext([])
        return replaced_embeddings(self.student, lambda emb: emb + shift)

    def unit_gradient(self, total: Tensor, embeddings: list[Tensor], part: Part) -> Tensor:
        """g / ‖g‖ per sample, g the gradient of the loss at the embeddings (LRC-BERT, eqs. 7-8).

        Padding stays where it is: DeBERTa's convolution reads the token behind the last one.
        """
        if not embeddings:
            raise ValueError(
                f"{type(self.method).__name__} moves the embedding layer's output, which the "
                "student didn't compute; pass input_ids, or set perturb=False"
            )
        # float16 gradients vanish without a scale; the norm takes it out again.
        scale = 2.0**12 if torch.float16 in (_autocast_dtype(total), embeddings[0].dtype) else 1.0
        (g,) = torch.autograd.grad(total * scale, embeddings[0])
        samples, documents = self.student.batch_dim, part.documents
        others = [d for d in range(g.dim()) if d != samples]
        mask = part.mask.T if part.mask is not None and samples else part.mask
        if mask is not None and mask.shape == g.shape[:2]:
            g = zero_padding(g, mask)
        if documents is not None and documents.packed:
            norm = documents.norms(upcast(g).transpose(0, samples)).transpose(0, samples)
        else:
            norm = torch.linalg.vector_norm(upcast(g), dim=others, keepdim=True)
        usable = norm.isfinite() & (norm > 0)
        return torch.where(usable, g / norm, 0).to(g.dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
