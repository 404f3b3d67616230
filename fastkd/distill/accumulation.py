"""One large batch in micro-batches, exactly: GradCache (Gao et al. 2021) for every method."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastkd._core.numerics import working_dtype
from fastkd.analysis.model_inputs import IGNORED
from fastkd.distill.outputs import Outputs
from fastkd.distill.perturbation import leaf_embeddings, perturbed_embeddings, unit_gradient
from fastkd.distill.step import ItemCounts, Step, global_count
from fastkd.distributed import ranks_of


def accumulate(
    distiller: Any, batches: Iterable[dict[str, Any]], model: nn.Module
) -> Iterator[Any]:
    """See `Distiller.accumulate`, whose module imports this one."""
    parts = [MicroBatch(distiller, batch) for batch in batches]
    if not parts:
        raise ValueError("batches is empty; pass at least one micro-batch")
    if distiller.perturbs:
        student = distiller.student_model
        whole = WholeBatch(distiller, parts)
        for i, part in enumerate(parts):
            with leaf_embeddings(student) as embeddings:
                loss = whole.share(i)[0]
            part.shift = unit_gradient(student, loss, embeddings, part.batch)
        for part in parts:
            part.random = None  # the moved embeddings get a dropout of their own
    whole = WholeBatch(distiller, parts)
    for i in range(len(parts)):
        last = i == len(parts) - 1
        with contextlib.nullcontext() if last else _unsynchronised(model):
            yield model(_share=(whole, i))


def _unsynchronised(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """DistributedDataParallel adds gradients over the processes only after the last part."""
    no_sync = getattr(model, "no_sync", None)
    return contextlib.nullcontext() if no_sync is None else no_sync()


class MicroBatch:
    """One part: its inputs, its teacher's outputs, the random state its student ran under."""

    def __init__(self, distiller: Any, batch: dict[str, Any]) -> None:
        self.distiller = distiller
        # The numbers of items of all parts are known here: num_items has nothing to say.
        self.batch = distiller.read(batch)
        self.teacher: Outputs | None = None
        self.shift: Tensor | None = None
        self.random: list[Tensor] | None = None

    def run(self, items: ItemCounts) -> Step:
        """The student on this part; from the second time on with the first one's dropout."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        distiller = self.distiller
        teacher = self.teacher or distiller.teachers.outputs(
            self.batch, distiller.progress, distiller.uses_lm_head
        )
        if not distiller.student_model.per_token:
            self.teacher = teacher
        # Otherwise it runs again: logits over a vocabulary for all micro-batches take much memory.
        with contextlib.ExitStack() as stack:
            if self.random is None:
                self.random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            else:
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(self.random[0])
                for device, state in zip(devices, self.random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            stack.enter_context(perturbed_embeddings(distiller.student_model, self.shift))
            step: Step = distiller.make_step(self.batch, teacher, items)
        return step


class WholeBatch:
    """The loss of all parts: its gradient at what the method compares, and its numbers of items."""

    def __init__(self, distiller: Any, parts: list[MicroBatch]) -> None:
        self.distiller, self.parts = distiller, parts
        ranks = ranks_of(distiller.gather, distiller.group)
        steps: list[Step] = []
        counts: list[list[Tensor]] = []
        with torch.no_grad():
            for part in parts:
                seen: list[Tensor] = []
                step = part.run(ItemCounts(seen=seen))
                distiller.losses(step, "predictions")  # for the numbers of items alone
                counts.append(seen)
                step.student = step.student.without_logits()
                step.teacher = step.teacher.without_logits()
                steps.append(step)
        # torch 2.10 keeps weights that autocast casts here, and would give them no gradient later.
        torch.clear_autocast_cache()
        self.items = [
            global_count(torch.stack(each).sum(0), ranks) for each in zip(*counts, strict=True)
        ]
        self.compared: dict[str, Tensor] = {}  # terms on features, of all parts together
        self.value: Tensor | float = 0.0  # their weighted sum
        self.gradients: list[Tensor | None] = []
        self.of_parameters: list[Tensor | None] = []
        self.rows = [step.rows for step in steps]
        self._compare(concatenate(steps, ItemCounts(ranks)))

    def _compare(self, step: Step) -> None:
        """The terms that compare features, and their gradients where there are any."""
        learning = torch.is_grad_enabled()
        leaves: list[Tensor] = []

        def leaf(x: Tensor, tokens: int) -> Tensor:
            leaves.append(x.to(step.student_model.dtype).requires_grad_(learning))
            return leaves[-1]

        step.student = step.student.features(leaf)
        loss, terms = self.distiller.losses(step.among_ranks(), "features")
        if loss is None:
            return
        if learning:
            found = torch.autograd.grad(loss, [*leaves, *self._parameters()], allow_unused=True)
            self.gradients = list(found[: len(leaves)])
            self.of_parameters = list(found[len(leaves) :])
        values = torch.stack([*terms.values(), loss.detach()])
        if step.ranks is not None:
            values = step.ranks.sum(values) / step.ranks.size
        *compared, self.value = values
        self.compared = dict(zip(terms, compared, strict=True))

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.distiller.method.parameters() if p.requires_grad]

    def share(self, index: int) -> tuple[Tensor, dict[str, Tensor], Step]:
        """Loss of one part, whose gradients add up, its terms, and its step."""
        step = self.parts[index].run(ItemCounts(known=iter(self.items)))
        loss, terms = self.distiller.losses(step, "predictions")
        count = len(self.parts)
        shown = {name: value / count for name, value in self.compared.items()}
        shown.update(terms)
        # All of it in the last part: shares of half precision would add up with a rounding each.
        whole = float(index == count - 1)
        pairs = zip(self._parameters(), self.of_parameters, strict=False)
        linear = [_inner(p, g) * whole for p, g in pairs if g is not None]
        linear += self._linear(step, index)
        value = self.value / count
        loss = torch.as_tensor(value) if loss is None else loss + value
        if linear:
            inner = torch.stack(linear).sum()
            loss = loss + (inner - inner.detach())
        return loss, {**shown, "total": loss.detach()}, step

    def _linear(self, step: Step, index: int) -> list[Tensor]:
        """⟨features of one part, gradient of the whole loss at them⟩."""
        start = sum(self.rows[:index])
        gradients = iter(self.gradients)
        products = []

        def multiply(x: Tensor, tokens: int) -> Tensor:
            gradient = next(gradients, None)
            if gradient is not None:
                gradient = gradient[start : start + self.rows[index]]
                for dim in (-2, -1)[:tokens]:  # not the padding that the whole batch has
                    gradient = gradient.narrow(dim, 0, x.shape[dim])
                products.append(_inner(x.to(gradient.dtype), gradient))
            return x

        step.student.features(multiply)
        return products


def _inner(x: Tensor, gradient: Tensor) -> Tensor:
    return (x * gradient).sum(dtype=working_dtype(x))


def concatenate(steps: list[Step], items: ItemCounts) -> Step:
    """One step of the samples of all, padded to one length; without logits."""
    length = max(step.length for step in steps)
    steps = [step.padded(length) for step in steps]
    first = steps[0]
    sides = []
    for side in ("student", "teacher"):
        features: list[list[Tensor]] = []
        for step in steps:
            features.append(getattr(step, side).all_features())
        joined = iter([torch.cat(parts) for parts in zip(*features, strict=True)])
        sides.append(getattr(first, side).features(lambda x, tokens, joined=joined: next(joined)))
    return dataclasses.replace(
        first,
        student=sides[0],
        teacher=sides[1],
        mask=torch.cat([step.real for step in steps]) if length else None,
        labels=_joined_labels([step.labels for step in steps]),
        token_mask=None,
        document_ids=None,
        items=items,
        ranks=items.ranks,
    )


def _joined_labels(labels: list[Any]) -> Any:
    if any(x is None for x in labels):
        return None
    if isinstance(labels[0], tuple):
        return tuple(torch.cat(ends) for ends in zip(*labels, strict=True))
    if labels[0].dim() == 2:  # of tokens
        length = max(x.shape[1] for x in labels)
        labels = [F.pad(x, (0, length - x.shape[1]), value=IGNORED) for x in labels]
    return torch.cat(labels)
