"""Checks that the gradient of a batch is the same under other splits and settings."""

import contextlib
import copy
import functools
import io
import logging
import math
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fastkd.distill.distiller import Distiller
from fastkd.distill.prediction_losses import Lists
from fastkd.distill.teachers import averaging_teachers
from fastkd.models.batch import MixedDocuments, find_documents, rotate
from fastkd.models.inputs import IGNORED

__all__ = ["Check", "table", "verify"]

TOLERANCE = 1e-12
ROUNDING = 1e-6  # for models that compute parts in float32, whatever their dtype

Gradients = dict[str, Tensor]
Way = Callable[[], Gradients | tuple[Gradients, Gradients]]  # those found, and those expected


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without Dynamo's warnings of graph breaks and without FutureWarning."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


class _CannotDo(Exception):
    """A check that is impossible with this model or batch; the message is the reason."""


@dataclass(frozen=True)
class Check:
    """Result of one way to compute the step: its gradient's deviation from the whole batch's.

    ``deviation`` is the largest difference of any gradient entry over the largest entry; None if
    the check is impossible. ``verdict`` is one of

    - "equal": up to 1e-12
    - "rounding": up to 1e-6, as for models that compute parts in float32
    - "by definition": expected to differ, since the loss compares samples, or is a mean over
      documents and the micro-batches have unequal numbers of them
    - "differs": the gradient is wrong, NaN or infinite
    - "not here": the check is impossible or all gradients are zero; ``why`` is the reason
    """

    name: str
    deviation: float | None
    verdict: str
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether the gradient is as expected."""
        return self.verdict != "differs"


def verify(
    distiller: Distiller,
    batch: dict[str, Tensor],
    *,
    ranks: int | Sequence[int] = 2,
    compile_backend: str | None = "aot_eager",
) -> list[Check]:
    """Compute the gradient of one batch under other splits and settings, in float64.

    A copy without dropout runs with: another order of the samples, wider and left padding, packed
    rows, accumulation in a plain loop and by `Distiller.accumulate`, gathering processes (gloo on
    the CPU; Linux only, since they are forks), a cached teacher, activation checkpointing, a
    compiled distiller, a saved and loaded state, and a run resumed from a checkpoint.

    Args:
        distiller: the distiller with the method to train; it is not changed.
        batch: arguments of `Distiller.forward`: rows padded on the right, with one document each
            or with ``position_ids`` that start again.
        ranks: number of processes, or several such numbers; 0 omits the check. If there are more
            processes than rows, the last ones have no rows. Without Linux the verdict is
            "not here".
        compile_backend: backend of ``torch.compile``; "inductor" takes longer, None omits the
            check.

    Returns:
        One `Check` per way; `table` formats them.

    Raises:
        ValueError: ``batch`` has fewer than two rows.
    """
    return list(begin(distiller, batch, ranks=ranks, compile_backend=compile_backend)[1])


def begin(
    distiller: Distiller,
    batch: dict[str, Tensor],
    *,
    ranks: int | Sequence[int] = 2,
    compile_backend: str | None = "aot_eager",
) -> tuple[int, Iterator[Check]]:
    """Number of checks of `verify`, and an iterator that runs them."""
    tokens = batch["input_ids"]
    if len(tokens) < 2:
        raise ValueError("batch: it has fewer than two rows; pass at least two, to split them")
    step = _Step(distiller, batch)
    # No rows stay neighbours, as far as their number allows it.
    shuffled = torch.cat([torch.arange(start, len(tokens), 2) for start in (1, 0)])
    ways: dict[str, Way] = {
        "the same again": lambda: step.gradients(step.batch),
        "other order of samples": lambda: step.gradients(step.select(shuffled)),
        "wider padding": step.wider,
        "left padding": step.left_padded,
        "packed rows": step.packed,
        "accumulated in a plain loop": step.accumulated,
        "Distiller.accumulate": lambda: step.gradients(
            [step.select(slice(0, 1)), step.select(slice(1, None))]
        ),
        "cached teacher": step.cached,
        "checkpointed activations": step.checkpointed,
        "saved and loaded": step.reloaded,
        "resumed in the middle": step.resumed,
    }
    if compile_backend is not None:
        ways[f"compiled ({compile_backend})"] = lambda: step.compiled(compile_backend)
    for count in (ranks,) if isinstance(ranks, int) else ranks:
        if count:
            ways[f"{count} processes, gather=True"] = functools.partial(step.processes, count)
    return len(ways), (_check(name, way, step) for name, way in ways.items())


def taken(
    distiller: Distiller,
    given: dict[str, Any] | list[dict[str, Any]],
    model: nn.Module | None = None,
) -> tuple[dict[str, Tensor], Gradients]:
    """Terms, including "loss", and gradients of a step on one batch or on a list of micro-batches.

    ``model`` is called instead of the distiller, such as DistributedDataParallel around it.
    """
    distiller.zero_grad()
    if isinstance(given, list):
        outs = distiller.accumulate(given, model)
    else:
        outs = iter([(distiller if model is None else model)(**given)])
    terms: dict[str, Tensor] = {}
    for out in outs:
        out.loss.backward()
        for name, value in {**out.terms, "loss": out.loss.detach()}.items():
            terms[name] = terms[name] + value if name in terms else value
    return terms, gradients_of(distiller)


def gradients_of(module: nn.Module) -> Gradients:
    """Copies of all gradients, by the parameter's name."""
    named = module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def table(checks: list[Check]) -> str:
    """The checks as a text table."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'the same step':<{width}}  largest deviation of a gradient"]
    for check in checks:
        number = "" if check.deviation is None else f"{check.deviation:.1e}"
        why = f": {check.why}" if check.why else ""
        lines.append(f"{check.name:<{width}}  {number:>8}  {check.verdict}{why}")
    return "\n".join(lines)


def _check(name: str, way: Way, step: "_Step") -> Check:
    try:
        found = way()
    except _CannotDo as reason:
        return Check(name, None, "not here", str(reason))
    gradients, expected = found if isinstance(found, tuple) else (found, step.expected)
    different = _largest(_differences(gradients, expected))
    if not math.isfinite(different):
        bad = [key for g in (expected, gradients) for key, x in g.items() if not x.isfinite().all()]
        return Check(name, different, "differs", f"the gradient of {bad[0]} is NaN or infinite")
    largest = _largest(expected.values())
    if not largest and not different:
        return Check(name, None, "not here", "all gradients are zero; nothing was compared")
    deviation = different / largest if largest else different
    if deviation <= TOLERANCE:
        return Check(name, deviation, "equal")
    if name == "accumulated in a plain loop" and (why := step.why_parts_differ()):
        return Check(name, deviation, "by definition", why)
    return Check(name, deviation, "rounding" if deviation <= ROUNDING else "differs")


def _differences(found: Gradients, expected: Gradients) -> Iterator[Tensor]:
    """Difference of each parameter's gradients; a missing gradient is zero."""
    for key, g in {**found, **expected}.items():
        other = found.get(key) if key in expected else None
        yield g if other is None else other.to(g.device) - g


def _largest(tensors: Iterable[Tensor]) -> float:
    """Largest absolute entry, or NaN if an entry is NaN."""
    largest = [x.abs().max().double().cpu() for x in tensors if x.numel()]
    return float(torch.stack(largest).max()) if largest else 0.0


class _Step:
    """A batch, and a distiller in float64 without dropout that computes its gradient."""

    def __init__(self, distiller: Distiller, batch: dict[str, Tensor]) -> None:
        self.distiller = _exact_copy(distiller)
        self.batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        self.rows = len(batch["input_ids"])
        method = self.distiller.method
        weights = method.weights(self.distiller.progress)
        self.across_samples = [term for term in method.across_samples if weights.get(term)]
        self.expected = self.gradients(self.batch)

    def gradients(
        self, given: dict[str, Any] | list[dict[str, Any]], distiller: Distiller | None = None
    ) -> Gradients:
        # A step changes the state of a method with a memory: each begins with the same state.
        return taken(copy.deepcopy(self.distiller) if distiller is None else distiller, given)[1]

    def select(self, rows: Any) -> dict[str, Tensor]:
        if isinstance(rows, slice):
            self._check_no_lists()
        return {name: x[rows] for name, x in self.batch.items()}

    def _check_no_lists(self) -> None:
        one = getattr(self.distiller.config, "num_labels", None) == 1
        if one and Lists.of(self.batch.get("labels"), self.batch["input_ids"][:, 0]):
            raise _CannotDo("the rows of a list stay together")

    def _mask(self) -> Tensor:
        mask = self.batch.get("attention_mask")
        mask = torch.ones_like(self.batch["input_ids"]) if mask is None else mask
        if mask.dim() != 2:
            raise _CannotDo("the batch has several choices per row")
        if "start_positions" in self.batch:
            raise _CannotDo("the labels are positions in the padded row")
        if not bool(mask[:, 0].all()):
            raise _CannotDo("the batch is padded on the left or has an empty row")
        return mask

    def wider(self) -> Gradients:
        mask = self._mask()
        wide = {"attention_mask": F.pad(mask, (0, 3))}
        for name, x in self._of_tokens():
            wide[name] = F.pad(x, (0, 3), value=_padding_of(name, self.distiller))
        return self.gradients({**self.batch, **wide})

    def _of_tokens(self) -> list[tuple[str, Tensor]]:
        # The teacher's own inputs are not padded, even if they have the same shape.
        own = [(n, x) for n, x in self.batch.items() if not n.startswith("teacher_")]
        shape = self.batch["input_ids"].shape
        return [(n, x) for n, x in own if x.shape == shape and n != "attention_mask"]

    def _positions(self, lengths: Tensor) -> Tensor:
        """``position_ids`` for tokens at 0, 1, ... of their documents."""
        distiller, starts = self.distiller, set()
        for model in (distiller.student_model, *distiller.teachers.live):
            if not model.takes("position_ids"):
                raise _CannotDo(f"{model.class_name} takes no position_ids")
            starts.add(model.first_position)
        if len(starts) > 1:
            raise _CannotDo("teacher and student count positions from different numbers")
        return lengths + starts.pop()

    def left_padded(self) -> Gradients:
        mask = self._mask()
        if self.distiller.student_model.reads_last_position(self.batch):
            raise _CannotDo("the head reads the last position, padding or not")
        if bool(mask.all()):
            raise _CannotDo("no row is padded")
        lengths = mask.sum(1, keepdim=True)
        left = {name: rotate(x, lengths, 1) for name, x in self._of_tokens()}
        left["attention_mask"] = rotate(mask, lengths, 1)
        return self.gradients({**self.batch, **left})

    def packed(self) -> Gradients:
        mask = self._mask().bool()
        student = self.distiller.student_model
        if student.has_head and not student.per_token:
            raise _CannotDo("the head makes one prediction per row")
        if "student_spans" in self.batch:
            raise _CannotDo("spans belong to rows of one document")
        row = {name: x[mask][None] for name, x in self._of_tokens()}
        if "position_ids" not in row:
            starts = self._positions(mask.long().cumsum(1) - 1)
            row["position_ids"] = starts[mask][None]
        own = {*row, "attention_mask"}
        others = {name: x for name, x in self.batch.items() if name not in own}
        try:
            return self.gradients({**others, **row})
        except MixedDocuments as error:
            raise _CannotDo(str(error).partition(";")[0]) from error

    def _equal_micro_batches(self) -> list[dict[str, Tensor]]:
        count = next(n for n in range(2, self.rows + 1) if self.rows % n == 0)
        size = self.rows // count
        return [self.select(slice(i, i + size)) for i in range(0, self.rows, size)]

    def why_parts_differ(self) -> str:
        """Why equal micro-batches are expected to have another mean loss than the batch, or ""."""
        if self.across_samples:
            return (
                f"{', '.join(self.across_samples)} compares the samples of one micro-batch; "
                "Distiller.accumulate compares all"
            )
        counts = set()
        for micro_batch in self._equal_micro_batches():
            ids, mask = micro_batch["input_ids"], micro_batch.get("attention_mask")
            shape = (ids.shape[0], ids.shape[1]) if ids.dim() == 2 else None
            documents = find_documents(shape, mask, micro_batch, micro_batch.get("segments"))
            counts.add(len(ids) if documents is None else len(documents.index))
        if len(counts) == 1:
            return ""
        return (
            f"micro-batches of {min(counts)} and {max(counts)} documents have equal weight; "
            "Distiller.accumulate counts documents"
        )

    def accumulated(self) -> Gradients:
        micro_batches: list[dict[str, Any]] = list(self._equal_micro_batches())
        if self.distiller.counts_positions and not {"labels", "input_ids"}.isdisjoint(self.batch):
            items = int(self.distiller.count_items(self.batch)) / len(micro_batches)
            micro_batches = [{**x, "num_items": items} for x in micro_batches]
        twin = copy.deepcopy(self.distiller)
        twin.zero_grad()
        for micro_batch in micro_batches:
            (twin(**micro_batch).loss / len(micro_batches)).backward()
        return gradients_of(twin)

    def cached(self) -> Gradients:
        try:
            self.distiller.teachers.to_cache()
        except ValueError as error:
            reason = str(error).removeprefix("teacher: ").partition(";")[0]
            raise _CannotDo(reason) from error
        if any(name.startswith("teacher_") for name in self.batch):
            raise _CannotDo("the batch has inputs of the teacher only")
        wanted = self.distiller.method.layer_request("teacher")
        if wanted.attentions or wanted.qkv:
            raise _CannotDo("a cache stores no attention maps")
        with tempfile.TemporaryDirectory() as folder:
            cache = self.distiller.cache_teacher([self.batch], folder)
            method = copy.deepcopy(self.distiller.method)
            twin = Distiller(cache, copy.deepcopy(self.distiller.student), method)
            twin.set_progress(self.distiller.progress)
            return self.gradients(self.batch, twin)

    def checkpointed(self) -> Gradients:
        if not getattr(self.distiller.student, "supports_gradient_checkpointing", False):
            raise _CannotDo("the student doesn't support activation checkpointing")
        twin = copy.deepcopy(self.distiller)
        with _quiet():
            twin.gradient_checkpointing_enable()
        return self.gradients(self.batch, twin)

    def reloaded(self) -> Gradients:
        twin = copy.deepcopy(self.distiller)
        state = copy.deepcopy(self.distiller.state_dict())
        averages = averaging_teachers(twin.teacher).values()
        with torch.no_grad():
            for module in (twin.student, twin.method, *averages):
                for parameter in module.parameters():
                    parameter.zero_()
        twin.load_state_dict(state)
        return self.gradients(self.batch, twin)

    def resumed(self) -> tuple[Gradients, Gradients]:
        """Gradients after two steps with a checkpoint between them, and of an unbroken run."""
        whole = copy.deepcopy(self.distiller)
        self._train(whole, _optimizer(whole), 2)
        first, again = copy.deepcopy(self.distiller), copy.deepcopy(self.distiller)
        optimizers = _optimizer(first), _optimizer(again)
        self._train(first, optimizers[0], 1)
        checkpoint = io.BytesIO()
        torch.save((first.state_dict(), optimizers[0].state_dict()), checkpoint)
        checkpoint.seek(0)
        states = torch.load(checkpoint)
        again.load_state_dict(states[0])
        optimizers[1].load_state_dict(states[1])
        self._train(again, optimizers[1], 1)
        return self.gradients(self.batch, again), self.gradients(self.batch, whole)

    def _train(self, distiller: Distiller, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            self.gradients(self.batch, distiller)
            optimizer.step()
            for average in averaging_teachers(distiller.teacher).values():
                average.update()

    def compiled(self, backend: str) -> Gradients:
        if self.distiller.perturbs:
            raise _CannotDo("the method perturbs the embeddings inside the student")
        twin = copy.deepcopy(self.distiller)
        try:
            with _quiet():
                compiled: Any = torch.compile(twin, backend=backend)
                return taken(twin, self.batch, compiled)[1]
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _CannotDo(f"torch.compile fails: {str(error).splitlines()[0]}") from error

    def processes(self, ranks: int) -> Gradients:
        """Gradient with the rows split over processes; the last ones may have fewer or no rows."""
        self._check_no_lists()
        if sys.platform != "linux":
            raise _CannotDo(f"processes are forked, which needs Linux; this is {sys.platform}")
        if not dist.is_available() or not dist.is_gloo_available():
            raise _CannotDo("this torch has no gloo")
        with tempfile.TemporaryDirectory() as folder:
            twin = copy.deepcopy(self.distiller).cpu()
            # transformers' hooks that record hidden states can't be pickled; it adds them again.
            for module in twin.modules():
                vars(module).pop("_output_capturing_hooks_installed", None)
                for key, hook in list(module._forward_hooks.items()):
                    if getattr(hook, "__module__", "").startswith("transformers."):
                        del module._forward_hooks[key]
            try:
                batch = {name: x.cpu() for name, x in self.batch.items()}
                torch.save((twin, batch), f"{folder}/step.pt")
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise _CannotDo(f"the distiller can't be pickled for a process: {error}") from error
            _run_processes(folder, ranks)
            gradients: Gradients = torch.load(f"{folder}/gradients.pt")
            return gradients


def _exact_copy(distiller: Distiller) -> Distiller:
    """Copy in float64 and training mode, without dropout."""
    twin = copy.deepcopy(distiller).double()
    twin.train()
    for module in twin.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(module, name, 0.0)
    twin.set_progress(distiller.progress)
    twin.gather = False
    # A router's loss is not a mean over samples, so it changes with the split.
    if hasattr(twin.student_model.config, "output_router_logits"):
        twin.student_model.config.output_router_logits = False
    for model in (twin.student_model, *twin.teachers.live):
        if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
            model.inner.set_experts_implementation("eager")  # type: ignore[operator]
    return twin


def _optimizer(distiller: Distiller) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=1e-3)


def _padding_of(name: str, distiller: Distiller) -> int:
    if name in ("labels", "student_spans"):
        return IGNORED if name == "labels" else -1
    padding = getattr(distiller.config, "pad_token_id", None) or 0
    return padding if name == "input_ids" else 0


def _run_processes(folder: str, world: int) -> None:
    """Start the ranks from a new process, since forks lose the threads of this one, and wait."""
    command = [sys.executable, "-m", "fastkd.distill.verify", folder, str(world)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"a process of the check failed:\n{done.stderr}")


def _fork(folder: str, world: int) -> None:
    """Fork one process per rank. If one fails, the other processes are ended."""
    step = torch.load(f"{folder}/step.pt", weights_only=False)
    start_processes(_rank, (folder, world, *step), nprocs=world, start_method="fork")


def _rank(
    rank: int, folder: str, world: int, distiller: Distiller, batch: dict[str, Tensor]
) -> None:
    """Compute the gradient of one rank's rows; rank 0 saves it."""
    size = -(-len(batch["input_ids"]) // world)
    rows = slice(rank * size, (rank + 1) * size)
    distiller.gather = True
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = DistributedDataParallel(distiller, find_unused_parameters=True)
    _, gradients = taken(distiller, {name: x[rows] for name, x in batch.items()}, model)
    if rank == 0:
        torch.save(gradients, f"{folder}/gradients.pt")
    dist.barrier()
    # destroy_process_group can hang here.
    os._exit(0)


if __name__ == "__main__":
    _fork(sys.argv[1], int(sys.argv[2]))
