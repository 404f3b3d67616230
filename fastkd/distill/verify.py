"""Is it the same step? The gradient of one batch, taken in every other way that promises it."""

import contextlib
import copy
import functools
import io
import logging
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fastkd.analysis.model_inputs import IGNORED, rotate
from fastkd.distill.batch import find_documents
from fastkd.distill.distiller import Distiller
from fastkd.distill.documents import MixedDocuments

__all__ = ["Check", "table", "verify"]

TOLERANCE = 1e-12
ROUNDING = 1e-6  # of models that compute parts of themselves in float32, whatever their dtype

Gradients = dict[str, Tensor]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Graph breaks and transformers' new names are no news of this table."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


class Comparison(NamedTuple):
    """Gradients of a later step than the first, and what they should be."""

    found: Gradients
    expected: Gradients


class _CannotDo(Exception):
    """The model or the batch has no such split; the message says why."""


@dataclass(frozen=True)
class Check:
    """One way to take the step, and how far its gradient is from the whole batch's.

    ``deviation`` is the largest difference of a gradient's entry, over the largest entry; None
    where there is no such split. ``verdict`` is one of

    - "equal": to 1e-12
    - "rounding": to 1e-6, as models show that compute parts of themselves in float32
    - "by definition": this split is another loss: one that compares samples, or a mean over
      documents of which the parts have unequal numbers
    - "differs": it should not; also where a gradient is NaN or infinite
    - "not here": ``why`` says what the model or the batch lacks, or that all gradients are zero
    """

    name: str
    deviation: float | None
    verdict: str
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict != "differs"


def verify(
    distiller: Distiller,
    batch: dict[str, Tensor],
    *,
    ranks: int | Sequence[int] = 2,
    compile_backend: str | None = "aot_eager",
) -> list[Check]:
    """Take the gradient of one batch under other splits and settings, in float64.

    On a copy without dropout: another order of the samples, wider and left padding, packed rows,
    accumulation in a plain loop and by `Distiller.accumulate`, processes that gather (gloo, on the
    CPU; Linux only, as they are forks of one process), a cached teacher, checkpointed activations,
    a compiled distiller, a saved and loaded state, a run resumed in the middle.

    Args:
        distiller: with the method that will train; its weights and state stay as they are.
        batch: arguments of `Distiller.forward`: rows padded on the right, of one document each or
            with ``position_ids`` that start again.
        ranks: processes to start, or several such numbers; 0 leaves them out. Where there are more
            than rows the last ones get none. Elsewhere than on Linux their check says "not here".
        compile_backend: of ``torch.compile``; "inductor" takes longer, None leaves it out.

    Returns:
        One `Check` for each; `table` prints them.

    Raises:
        ValueError: fewer than two rows.
    """
    return list(begin(distiller, batch, ranks=ranks, compile_backend=compile_backend)[1])


def begin(
    distiller: Distiller,
    batch: dict[str, Tensor],
    *,
    ranks: int | Sequence[int] = 2,
    compile_backend: str | None = "aot_eager",
) -> tuple[int, Iterator[Check]]:
    """How many checks `verify` makes, and each of them as it is done."""
    tokens = batch["input_ids"]
    if len(tokens) < 2:
        raise ValueError("batch has fewer than two rows; there is nothing to split")
    step = _Step(distiller, batch)
    backwards = torch.arange(len(tokens) - 1, -1, -1)
    uneven: list[dict[str, Any]] = [step.part(slice(0, 1)), step.part(slice(1, None))]
    ways: dict[str, Callable[[], Gradients | Comparison]] = {
        "the same again": step.again,
        "other order of samples": lambda: step.gradients(step.part(backwards)),
        "wider padding": step.wider,
        "left padding": step.left_padded,
        "packed rows": step.packed,
        "accumulated in a plain loop": step.accumulated,
        "Distiller.accumulate": lambda: step.gradients(uneven),
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
    """Terms, "loss" among them, and gradients of a step: of a batch, or of all of its parts.

    ``model``: what is called in the distiller's place, such as DistributedDataParallel around it.
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
    """Copies, by parameter."""
    named = module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def table(checks: list[Check]) -> str:
    """The checks as lines of text."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'the same step':<{width}}  largest deviation of a gradient"]
    for check in checks:
        number = "" if check.deviation is None else f"{check.deviation:.1e}"
        why = f": {check.why}" if check.why else ""
        lines.append(f"{check.name:<{width}}  {number:>8}  {check.verdict}{why}")
    return "\n".join(lines)


def _check(name: str, way: Callable[[], "Gradients | Comparison"], step: "_Step") -> Check:
    try:
        found = way()
    except _CannotDo as reason:
        return Check(name, None, "not here", str(reason))
    gradients, expected = found if isinstance(found, Comparison) else (found, step.expected)
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
    if name == "accumulated in a plain loop" and step.across_samples:
        terms = ", ".join(step.across_samples)
        return Check(
            name, deviation, "by definition",
            f"{terms} compares the samples of a part only; Distiller.accumulate sees all",
        )  # fmt: skip
    if name == "accumulated in a plain loop" and len(counts := set(step.documents_of_parts())) > 1:
        return Check(
            name, deviation, "by definition",
            f"parts of {min(counts)} and {max(counts)} documents count alike; Distiller.accumulate "
            "counts documents",
        )  # fmt: skip
    return Check(name, deviation, "rounding" if deviation <= ROUNDING else "differs")


def _differences(found: Gradients, expected: Gradients) -> Iterator[Tensor]:
    """Of each parameter; a gradient that only one side has is compared with zeros."""
    for key, g in {**found, **expected}.items():
        other = found.get(key) if key in expected else None
        yield g if other is None else other.to(g.device) - g


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest absolute entry; NaN if there is one."""
    largest = [x.abs().max().double().cpu() for x in tensors if x.numel()]
    return float(torch.stack(largest).max()) if largest else 0.0


class _Step:
    """One batch, and a distiller in float64 without dropout that takes its gradient."""

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
        return taken(self.distiller if distiller is None else distiller, given)[1]

    def part(self, rows: Any) -> dict[str, Tensor]:
        """Some rows of the batch."""
        return {name: x[rows] for name, x in self.batch.items()}

    def again(self) -> Gradients:
        return self.gradients(self.batch)

    def _mask(self) -> Tensor:
        mask = self.batch.get("attention_mask")
        mask = torch.ones_like(self.batch["input_ids"]) if mask is None else mask
        if mask.dim() != 2:
            raise _CannotDo("the batch holds the choices of questions")
        if "start_positions" in self.batch:
            raise _CannotDo("answers are positions in the padded row")
        if not bool(mask[:, 0].all()):
            raise _CannotDo("the batch is padded on the left, or holds an empty row")
        return mask

    def wider(self) -> Gradients:
        mask = self._mask()
        wide = {"attention_mask": F.pad(mask, (0, 3))}
        for name, x in self._of_tokens():
            wide[name] = F.pad(x, (0, 3), value=_padding_of(name, self.distiller))
        return self.gradients({**self.batch, **wide})

    def _of_tokens(self) -> list[tuple[str, Tensor]]:
        # A teacher's own tokens stay as they are, though they may be as many.
        own = [(n, x) for n, x in self.batch.items() if not n.startswith("teacher_")]
        shape = self.batch["input_ids"].shape
        return [(n, x) for n, x in own if x.shape == shape and n != "attention_mask"]

    def _positions(self, lengths: Tensor) -> Tensor:
        """position_ids of tokens that stand at 0, 1, ... in their documents."""
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
            raise _CannotDo("the head gives one prediction a row")
        row = {name: x[mask][None] for name, x in self._of_tokens()}
        if "position_ids" not in row:
            starts = self._positions(mask.long().cumsum(1) - 1)
            row["position_ids"] = starts[mask][None]
        others = {
            name: x
            for name, x in self.batch.items()
            if name not in row and name != "attention_mask"
        }
        try:
            return self.gradients({**others, **row})
        except MixedDocuments as error:
            raise _CannotDo(str(error).partition(";")[0]) from error

    def _equal_parts(self) -> list[dict[str, Tensor]]:
        count = next(n for n in range(2, self.rows + 1) if self.rows % n == 0)
        size = self.rows // count
        return [self.part(slice(i, i + size)) for i in range(0, self.rows, size)]

    def documents_of_parts(self) -> list[int]:
        """How many documents each of the equal parts has, where a row may have several."""
        found = []
        for part in self._equal_parts():
            ids, mask = part["input_ids"], part.get("attention_mask")
            shape = (ids.shape[0], ids.shape[1]) if ids.dim() == 2 else None
            documents = find_documents(shape, mask, part, part.get("segments"))
            found.append(len(ids) if documents is None else len(documents.index))
        return found

    def accumulated(self) -> Gradients:
        parts: list[dict[str, Any]] = list(self._equal_parts())
        if self.distiller.counts_positions and "labels" in self.batch:
            items = int(self.distiller.count_items(self.batch))
            parts = [{**part, "num_items": items / len(parts)} for part in parts]
        self.distiller.zero_grad()
        for part in parts:
            (self.distiller(**part).loss / len(parts)).backward()
        return gradients_of(self.distiller)

    def cached(self) -> Gradients:
        try:
            self.distiller.teachers.to_cache()
        except ValueError as error:
            raise _CannotDo(re.split("[;:]", str(error))[0]) from error
        if any(name.startswith("teacher_") for name in self.batch):
            raise _CannotDo("the teacher has inputs of its own")
        wanted = self.distiller.method.layer_request("teacher")
        if wanted.attentions or wanted.qkv:
            raise _CannotDo("a cache keeps no attention maps")
        with tempfile.TemporaryDirectory() as folder:
            cache = self.distiller.cache_teacher([self.batch], folder)
            method = copy.deepcopy(self.distiller.method)
            twin = Distiller(cache, copy.deepcopy(self.distiller.student), method)
            twin.set_progress(self.distiller.progress)
            return self.gradients(self.batch, twin)

    def checkpointed(self) -> Gradients:
        if not getattr(self.distiller.student, "supports_gradient_checkpointing", False):
            raise _CannotDo("the student doesn't support it")
        twin = copy.deepcopy(self.distiller)
        with _quiet():
            twin.gradient_checkpointing_enable()
        return self.gradients(self.batch, twin)

    def reloaded(self) -> Gradients:
        twin = copy.deepcopy(self.distiller)
        state = copy.deepcopy(self.distiller.state_dict())
        with torch.no_grad():
            for parameter in twin.student.parameters():
                parameter.zero_()
        twin.load_state_dict(state)
        return self.gradients(self.batch, twin)

    def resumed(self) -> Comparison:
        """The gradient after two steps, the second of them in a run that a checkpoint begins."""
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
        return Comparison(*(self.gradients(self.batch, twin) for twin in (again, whole)))

    def _train(self, distiller: Distiller, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            self.gradients(self.batch, distiller)
            optimizer.step()

    def compiled(self, backend: str) -> Gradients:
        if self.distiller.perturbs:
            raise _CannotDo("the method moves the embeddings inside the student")
        twin = copy.deepcopy(self.distiller)
        try:
            with _quiet():
                compiled: Any = torch.compile(twin, backend=backend)
                return taken(twin, self.batch, compiled)[1]
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _CannotDo(f"torch.compile fails: {str(error).splitlines()[0]}") from error

    def processes(self, ranks: int) -> Gradients:
        """The rows dealt out to processes, the last of which may have fewer or none."""
        if sys.platform != "linux":
            raise _CannotDo(f"processes are forked, which needs Linux; this is {sys.platform}")
        if not dist.is_available() or not dist.is_gloo_available():
            raise _CannotDo("this torch has no gloo")
        with tempfile.TemporaryDirectory() as folder:
            twin = copy.deepcopy(self.distiller).cpu()
            _without_recorders(twin)
            try:
                batch = {name: x.cpu() for name, x in self.batch.items()}
                torch.save((twin, batch), f"{folder}/step.pt")
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise _CannotDo(f"this can't be sent to a process: {error}") from error
            _run_processes(folder, ranks)
            gradients: Gradients = torch.load(f"{folder}/gradients.pt")
            return gradients


def _exact_copy(distiller: Distiller) -> Distiller:
    """In float64, in training mode without dropout, with its own state."""
    twin = copy.deepcopy(distiller).double()
    twin.train()
    for module in twin.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(module, name, 0.0)
    twin.set_progress(distiller.progress)
    twin.gather = False
    # A router's loss is not a mean over samples: of parts it is another one.
    if hasattr(twin.student_model.config, "output_router_logits"):
        twin.student_model.config.output_router_logits = False
    for side in (twin.student_model, *twin.teachers.live):
        if side.groups_experts:
            side.inner.set_experts_implementation("eager")  # type: ignore[operator]
    return twin


def _without_recorders(distiller: Distiller) -> None:
    """Without transformers' hooks of a run with hidden states, which stay and can't be pickled.

    It puts them in again where it needs them.
    """
    for module in distiller.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", "").startswith("transformers."):
                del module._forward_hooks[key]


def _optimizer(distiller: Distiller) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=1e-3)


def _padding_of(name: str, distiller: Distiller) -> int:
    if name in ("labels", "student_spans"):
        return IGNORED if name == "labels" else -1
    padding = getattr(distiller.config, "pad_token_id", None) or 0
    return padding if name == "input_ids" else 0


def _run_processes(folder: str, world: int) -> None:
    """In a new process, which has no threads that forks of it would lose; wait for it."""
    command = [sys.executable, "-m", "fastkd.distill.verify", folder, str(world)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"a process of the check failed:\n{done.stderr}")


def _fork(folder: str, world: int) -> None:
    """One process a rank; where one fails the others are ended, which would wait for it in vain."""
    step = torch.load(f"{folder}/step.pt", weights_only=False)
    start_processes(_rank, (folder, world, *step), nprocs=world, start_method="fork")


def _rank(
    rank: int, folder: str, world: int, distiller: Distiller, batch: dict[str, Tensor]
) -> None:
    """What one of the processes does."""
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
    # Taking the group down has hung, with nothing left to do.
    os._exit(0)


if __name__ == "__main__":
    _fork(sys.argv[1], int(sys.argv[2]))
