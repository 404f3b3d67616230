"""Trainer of a job, whose steps have the same rows for any number of processes."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from fastkd.distill.distiller import Distiller
from fastkd.distill.labelled_order import LabelledOrder
from fastkd.distill.trainer import SHARE, DistillationTrainer
from fastkd.integrations.served_teacher import ServedTeacher
from fastkd.models.batch import split_inputs
from fastkd.train import processes, sharding
from fastkd.train.arrow_rows import TEACHER_PREFIX
from fastkd.train.saving import saving
from fastkd.train.tasks.base import Task

# Entry of the log with the number of steps of each loss term: some terms are not of every step.
COUNTS = "counts"
# Shares of steps add up to whole ones, to rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class ProcessRows:
    """One process's rows of a step.

    ``share`` is their number divided by the mean number of rows of a process, so that the mean over
    the processes of share · mean loss is the mean over the step's rows. A process without rows gets
    one row with share 0. ``draw`` is (seed, epoch), for a collator that draws at random.
    """

    rows: list[int]
    share: float
    draw: tuple[int, int] = (0, 0)


class StepSampler(Sampler[ProcessRows]):
    """The rows of one process for each step; seed and epoch alone determine the order.

    ``epoch()`` returns the epoch that begins, or that a resumed run continues.
    """

    def __init__(
        self,
        order: LabelledOrder,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        epoch: Callable[[], int] = int,
    ):
        self.order, self.seed = order, seed
        self.rank, self.ranks = rank, ranks
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.order.rows // self.order.batch)

    def __iter__(self) -> Iterator[ProcessRows]:
        draw = self.seed, self.epoch()
        rows = self.order.draw(np.random.default_rng(draw))
        for start in range(0, len(rows), self.order.batch):
            step = rows[start : start + self.order.batch]
            own = np.array_split(step, self.ranks)[self.rank]
            share = len(own) * self.ranks / len(step)
            rows_here = (own if len(own) else step[:1]).tolist()
            yield ProcessRows(rows_here, share, draw)


class _BatchDataset(Dataset):
    def __init__(self, examples: Any, collate: Callable, may_be_empty: bool):
        self.examples, self.collate, self.may_be_empty = examples, collate, may_be_empty

    def __getitems__(self, part: ProcessRows) -> dict[str, Any]:
        for_epoch = getattr(self.collate, "for_epoch", None)  # see `Task.collator`
        collate = self.collate if for_epoch is None else for_epoch(part.draw)
        batch = dict(collate(self.examples.__getitems__(part.rows)))
        if self.may_be_empty:  # the loss gathers and weights the rows itself
            return batch if part.share else {name: x[:0] for name, x in batch.items()}
        return {**batch, SHARE: part.share}


class _Ahead(DataLoader):
    """Batches, of which the next ones are requested from a teacher in a server."""

    def __init__(self, distiller: Distiller, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.distiller = distiller

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: Iterator[Any] = super().__iter__()
        for teacher in self.distiller.teachers.each:
            if isinstance(teacher.module, ServedTeacher):
                batches = teacher.module.ahead(batches, self.distiller, left_out=(SHARE,))
        return batches


class TwoTokenizerCollator:
    """Collator of batches with two tokenizers: the teacher's tokens are in ``teacher_...``."""

    def __init__(self, task: Task, tokenizer: Any, teachers: Any):
        self.student, self.teacher = task.collator(tokenizer), task.collator(teachers)
        #: Side on which each model's spans are padded, as its tokens are.
        self.sides = {
            "student_spans": type(tokenizer).padding_side,
            "teacher_spans": type(teachers).padding_side,
        }

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        both = [split_inputs(row) for row in rows]
        batch = dict(self.student([own for own, _, _ in both]))
        theirs = self.teacher([theirs for _, theirs, _ in both])
        batch |= {f"{TEACHER_PREFIX}{name}": x for name, x in theirs.items()}
        spans = zip(*(spans for _, _, spans in both if spans is not None), strict=True)
        for (name, side), numbers in zip(self.sides.items(), spans, strict=False):
            batch[name] = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row) for row in numbers], True, -1, side
            )
        return batch


def is_on_policy(step: int, share: float) -> bool:
    """Whether ``step`` (from 0) is one of a fraction ``share`` of the steps, spread evenly."""
    return int((step + 1) * share + ROUNDING) > int(step * share + ROUNDING)


class StepTrainer(DistillationTrainer):
    """`DistillationTrainer` of batches in a given ``order``, the same for any number of processes.

    An epoch has ``in_epoch`` steps, and a batch ``accumulate`` micro-batches.

    In a fraction ``on_policy`` of the steps the student trains on text that it generates by
    ``generated``, see `Task.generated`. The text depends on weights, seed, step and row alone.
    """

    def __init__(
        self,
        *args: Any,
        order: LabelledOrder,
        in_epoch: int,
        accumulate: int,
        say: Callable[[str], None],
        on_policy: float = 0.0,
        generated: Callable[..., list[dict[str, Any]]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        config = self.args
        self.steps = StepSampler(
            order, config.seed, config.process_index, config.world_size, self._epoch
        )
        self.say, self.accumulate, self.in_epoch = say, accumulate, in_epoch
        self.on_policy, self.generated = on_policy, generated

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")

    def _larger_batch(self) -> str:
        batches, rows = self.args.gradient_accumulation_steps, self.steps.order.batch
        return f"--batch-size {rows * batches} --accumulate {batches} compares all rows of a step"

    def _epoch(self) -> int:
        """The epoch of the next step."""
        return self.state.global_step // self.in_epoch

    def _loader(self, steps: StepSampler) -> DataLoader:
        """DataLoader over the steps of a sampler."""
        args = self.args
        loader = DataLoader if self.on_policy else functools.partial(_Ahead, self.distiller)
        return loader(
            _BatchDataset(self.train_dataset, self.data_collator, self.distiller.gather),
            batch_sampler=steps,  # type: ignore[arg-type]
            collate_fn=dict,  # the batch itself
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def get_train_dataloader(self) -> DataLoader:
        """See ``transformers.Trainer.get_train_dataloader``."""
        return self._loader(self.steps)

    def _preparation_batches(self) -> Iterator[dict[str, Any]]:
        """Whole steps, the same in all processes."""
        for batch in self._loader(StepSampler(self.steps.order, self.steps.seed)):
            yield {name: x for name, x in batch.items() if name != SHARE}

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; an error of any process is raised as SaveFailed in all."""
        with processes.errors_on_all(), saving(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """See `DistillationTrainer.get_batch_samples`; on-policy batches have generated text."""
        return super().get_batch_samples(self._on_policy_batches(epoch_iterator), *args, **kwargs)

    def _on_policy_batches(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        step, method = self.state.global_step, self.distiller.method
        own = is_on_policy(step, self.on_policy)
        # Generated text is no label.
        method.left_out = frozenset({"task"} if own else ())
        sequence = np.random.SeedSequence((self.args.seed, step))
        (seed,) = sequence.generate_state(1, np.uint64).tolist()
        for batch in batches:
            if not (own and len(batch["input_ids"])):
                yield batch
                continue
            assert self.generated is not None
            with torch.random.fork_rng(), self.compute_loss_context_manager():
                torch.manual_seed(seed)
                rows = self.generated(self.distiller.student, batch, seed=seed)
            yield {**batch, **self.data_collator(rows)}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `DistillationTrainer.log`; the state's log also has each term's number of steps."""
        counts = {name: count for name, (_, count) in self._logged.items()}
        super().log(logs, *args, **kwargs)
        if "loss" in logs and counts:
            self.state.log_history[-1][COUNTS] = counts


class ShardedTrainer(StepTrainer):
    """`StepTrainer` of sharded models, with checkpoints of full models."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the shards are on their devices."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        model = super()._wrap_model(model, *args, **kwargs)
        # Autocast only: FSDP averages the gradients itself.
        model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        vars(model)["_is_accelerate_prepared"] = True
        return model

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        distiller = self.distiller
        places = (distiller, "student"), (distiller, "method"), (self, "optimizer")
        full = [sharding.full_state(getattr(*place)) for place in places]  # all processes gather
        with contextlib.ExitStack() as stack:
            for place, value in zip(places, full, strict=True) if processes.first() else ():
                stack.enter_context(sharding.replaced(*place, value))
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any) -> None:
        distiller = self.distiller
        student, full = distiller.student, sharding.unread(distiller.student)
        method = sharding.StateDictProxy(distiller.method)
        with (
            sharding.replaced(distiller, "student", full),
            sharding.replaced(distiller, "method", method),
        ):
            super()._load_from_checkpoint(resume_from_checkpoint, *args)
        sharding.take(student, full)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        read = functools.partial(torch.load, map_location="cpu", weights_only=True)
        sharding.load_optimizer(self.optimizer, read(Path(checkpoint) / OPTIMIZER_NAME, mmap=True))
        self.lr_scheduler.load_state_dict(read(Path(checkpoint) / SCHEDULER_NAME))
