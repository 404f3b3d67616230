"""Exact loss of a large batch from micro-batches, by GradCache (Gao et al. 2021)."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastkd._core.numerics import working_dtype
from fastkd.distill.step import ItemCounts, Step, global_count, unit_gradients
from fastkd.distributed import ranks_of
from fastkd.models.hooks import replaced_embeddings
from fastkd.models.inputs import IGNORED
from fastkd.models.outputs import Outputs


def accumulate(
    distiller: Any, batches: Iterable[dict[str, Any]], model: nn.Module
) -> Iterator[Any]:
    """Implementation of `Distiller.accumulate`."""
    micro_batches = [MicroBatch(distiller, batch) for batch in batches]
    if not micro_batches:
        raise ValueError("batches: none given; pass at least one micro-batch")
    if distiller.perturbs:
        first = WholeBatch(distiller, micro_batches)
        shifts = unit_gradients(
            distiller.student_model,
            [micro_batch.batch for micro_batch in micro_batches],
            [functools.partial(first.micro_batch_loss, i) for i in range(len(micro_batches))],
            distiller.method.perturb_norm,
            ranks_of(distiller.gather, distiller.group),
        )
        for micro_batch, shift in zip(micro_batches, shifts, strict=True):
            micro_batch.shift = shift
            micro_batch.rng_states = None  # the perturbed run draws new dropout masks
    whole = WholeBatch(distiller, micro_batches)
    for i in range(len(micro_batches)):
        last = i == len(micro_batches) - 1
        # DistributedDataParallel averages gradients over the processes in the last one only.
        apart = getattr(model, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else apart():
            yield model(_micro_batch=(whole, i))


class MicroBatch:
    """A micro-batch: inputs, teacher's outputs, and random states of the student's first run."""

    def __init__(self, distiller: Any, batch: dict[str, Any]) -> None:
        self.distiller = distiller
        # The items of all micro-batches are counted here, so num_items is not passed.
        self.batch = distiller.read(batch)
        self.teacher: Outputs | None = None
        self.shift: Tensor | None = None
        self.rng_states: list[Tensor] | None = None

    def run(self, items: ItemCounts) -> Step:
        """Step with the student's outputs. Later runs repeat the dropout masks of the first run."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        distiller = self.distiller
        teacher = self.teacher or distiller.teachers.outputs(
            self.batch, distiller.progress, distiller.uses_lm_head
        )
        if not distiller.student_model.per_token:
            self.teacher = teacher
        # Per-token logits of all micro-batches would take too much memory: the teacher runs again.
        with contextlib.ExitStack() as stack:
            if self.rng_states is None:
                self.rng_states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            else:
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(self.rng_states[0])
                for device, state in zip(devices, self.rng_states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            if (shift := self.shift) is not None:
                perturbed = replaced_embeddings(distiller.student_model, lambda emb: emb + shift)
                stack.enter_context(perturbed)
            step: Step = distiller.make_step(self.batch, teacher, items)
        return step


class WholeBatch:
    """Feature terms of the whole batch, their gradients, and the numbers of items."""

    def __init__(self, distiller: Any, micro_batches: list[MicroBatch]) -> None:
        self.distiller, self.micro_batches = distiller, micro_batches
        ranks = ranks_of(distiller.gather, distiller.group)
        steps: list[Step] = []
        counts: list[list[Tensor]] = []
        with torch.no_grad():
            for micro_batch in micro_batches:
                seen: list[Tensor] = []
                step = micro_batch.run(ItemCounts(seen=seen))
                distiller.losses(step, "predictions")  # only counts the items
                counts.append(seen)
                step.student = step.student.without_logits()
                step.teacher = step.teacher.without_logits()
                steps.append(step)
        # Autocast caches weights cast under no_grad, which would receive no gradient later.
        torch.clear_autocast_cache()
        self.items = [
            global_count(torch.stack(each).sum(0), ranks) for each in zip(*counts, strict=True)
        ]
        self.feature_terms: dict[str, Tensor] = {}  # of the whole batch
        self.feature_loss: Tensor | float = 0.0  # weighted sum of the feature terms
        self.feature_gradients: list[Tensor | None] = []
        self.parameter_gradients: list[Tensor | None] = []
        self.rows = [step.rows for step in steps]
        self._compute_feature_terms(concatenate(steps, ItemCounts(ranks)))

    def _compute_feature_terms(self, step: Step) -> None:
        """Compute the terms that compare features, and their gradients if gradients are enabled."""
        needs_gradient = torch.is_grad_enabled()
        leaves: list[Tensor] = []

        def leaf(x: Tensor, tokens: int) -> Tensor:
            leaves.append(x.to(step.student_model.dtype).requires_grad_(needs_gradient))
            return leaves[-1]

        step.student = step.student.features(leaf)
        loss, terms = self.distiller.losses(step.among_ranks(), "features")
        if loss is None:
            return
        if needs_gradient:
            found = torch.autograd.grad(loss, [*leaves, *self._parameters()], allow_unused=True)
            self.feature_gradients = list(found[: len(leaves)])
            self.parameter_gradients = list(found[len(leaves) :])
        values = torch.stack([*terms.values(), loss.detach()])
        if step.ranks is not None:
            values = step.ranks.sum(values) / step.ranks.size
        *feature_terms, self.feature_loss = values
        self.feature_terms = dict(zip(terms, feature_terms, strict=True))

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.distiller.method.parameters() if p.requires_grad]

    def micro_batch_loss(self, index: int) -> tuple[Tensor, dict[str, Tensor], Step]:
        """Loss, terms and step of one micro-batch. The gradients add up to the whole batch's."""
        step = self.micro_batches[index].run(ItemCounts(known=iter(self.items)))
        loss, terms = self.distiller.losses(step, "predictions")
        count = len(self.micro_batches)
        shown = {name: value / count for name, value in self.feature_terms.items()}
        shown.update(terms)
        # Added in the last micro-batch only: each fraction would be rounded to half precision.
        whole = float(index == count - 1)
        pairs = zip(self._parameters(), self.parameter_gradients, strict=False)
        linear = [_inner(p, g) * whole for p, g in pairs if g is not None]
        linear += self._feature_products(step, index)
        value = self.feature_loss / count
        loss = torch.as_tensor(value) if loss is None else loss + value
        if linear:
            inner = torch.stack(linear).sum()
            loss = loss + (inner - inner.detach())
        return loss, {**shown, "total": loss.detach()}, step

    def _feature_products(self, step: Step, index: int) -> list[Tensor]:
        """⟨features of a micro-batch, gradient of the feature terms at these features⟩."""
        start = sum(self.rows[:index])
        gradients = iter(self.feature_gradients)
        products = []

        def multiply(x: Tensor, tokens: int) -> Tensor:
            gradient = next(gradients, None)
            if gradient is not None:
                gradient = gradient[start : start + self.rows[index]]
                for dim in (-2, -1)[:tokens]:  # without the padding of the whole batch
                    gradient = gradient.narrow(dim, 0, x.shape[dim])
                products.append(_inner(x.to(gradient.dtype), gradient))
            return x

        step.student.features(multiply)
        return products


def _inner(x: Tensor, gradient: Tensor) -> Tensor:
    return (x * gradient).sum(dtype=working_dtype(x))


def concatenate(steps: list[Step], items: ItemCounts) -> Step:
    """One step with the samples of all steps, padded to one length; without logits."""
    length = max(step.length for step in steps)
    steps = [step.padded(length) for step in steps]
    first = steps[0]
    return dataclasses.replace(
        first,
        student=first.student.joined([step.student for step in steps[1:]]),
        teacher=first.teacher.joined([step.teacher for step in steps[1:]]),
        mask=torch.cat([step.real for step in steps]) if length else None,
        labels=_joined_labels([step.labels for step in steps]),
        token_mask=None,
        document_ids=None,
        items=items,
    )


def _joined_labels(labels: list[Any]) -> Any:
    if any(x is None for x in labels):
        return None
    if isinstance(labels[0], tuple):
        return tuple(torch.cat(ends) for ends in zip(*labels, strict=True))
    if labels[0].dim() == 2:  # one label per token
        length = max(x.shape[1] for x in labels)
        labels = [F.pad(x, (0, length - x.shape[1]), value=IGNORED) for x in labels]
    return torch.cat(labels)
