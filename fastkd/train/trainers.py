"""Trainer of a run, whose steps have the same rows for any number of processes."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from fastkd.distill.distiller import Distiller, DistillerOutput
from fastkd.distill.labelled_order import LabelledOrder
from fastkd.distill.trainer import LABEL_SHARE, DistillationTrainer
from fastkd.integrations.served_teacher import ServedTeacher
from fastkd.models.batch import split_inputs
from fastkd.train import processes
from fastkd.train.arrow_rows import TEACHER_PREFIX
from fastkd.train.saving import saving
from fastkd.train.tasks.base import Task
from fastkd.train.training import COUNTS

# Key in a batch: weight of its mean loss in the mean over the processes.
SHARE = "share_of_step"
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


@dataclass(frozen=True)
class OnPolicy:
    """Training on text that the student generates, in a fraction ``share`` of the steps.

    ``draw(student, batch, seed=...)`` is `Task.generated`, which returns the rows. The text depends
    on weights, seed, step and row alone.
    """

    share: float
    draw: Callable[..., list[dict[str, Any]]]

    def at(self, step: int) -> bool:
        """Whether ``step`` (from 0) trains on generated text; such steps are spread evenly."""
        return int((step + 1) * self.share + ROUNDING) > int(step * self.share + ROUNDING)


class StepTrainer(DistillationTrainer):
    """`DistillationTrainer` of batches in a given ``order``, the same for any number of processes.

    A process computes its rows of a batch in ``accumulate`` micro-batches.
    """

    def __init__(
        self,
        *args: Any,
        order: LabelledOrder,
        say: Callable[[str], None],
        accumulate: int = 1,
        on_policy: OnPolicy | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        given = self.args
        self.steps = StepSampler(
            order, given.seed, given.process_index, given.world_size, self._epoch
        )
        self.say, self.accumulate, self.on_policy = say, accumulate, on_policy
        self.gather = self.distiller.gather
        #: Weight of the mean loss of the rows in work.
        self.share: Any = 1.0
        # Losses of the micro-batches of a step, which add up to the whole step's, and their number.
        self.losses: Iterator[DistillerOutput] | None = None
        self.parts = 1

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")

    def _epoch(self) -> int:
        """The epoch of the next step."""
        _, in_epoch = self.args.steps(self.steps.order.rows)
        return self.state.global_step // in_epoch

    def _loader(self, steps: StepSampler) -> DataLoader:
        """DataLoader over the steps of a sampler."""
        args = self.args
        loader = DataLoader if self.on_policy else functools.partial(_Ahead, self.distiller)
        return loader(
            _BatchDataset(self.train_dataset, self.data_collator, self.gather),
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

    def _warn_of_accumulation(self) -> None:
        """Print a line that names the command's options, instead of a warning."""
        batches, rows = self.args.gradient_accumulation_steps, self.steps.order.batch
        method = self.distiller.method
        weights = [method.weights(progress) for progress in (0.0, 1.0)]
        terms = [x for x in method.across_samples if any(each.get(x) for each in weights)]
        if batches > 1 and terms:
            self.say(
                f"gradient_accumulation_steps: {' and '.join(terms)} compares the {rows} rows of a "
                f"batch, not the {rows * batches} of a step; --batch-size {rows * batches} "
                f"--accumulate {batches} compares them all"
            )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; an error of any process is raised as SaveFailed in all."""
        with processes.errors_on_all(), saving(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """See `DistillationTrainer.get_batch_samples`; on-policy batches have generated text."""
        return super().get_batch_samples(self._on_policy_batches(epoch_iterator), *args, **kwargs)

    def _on_policy_batches(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        step, method = self.state.global_step, self.distiller.method
        own = self.on_policy is not None and self.on_policy.at(step)
        # Generated text is no label.
        method.left_out = frozenset({"task"} if own else ())
        sequence = np.random.SeedSequence((self.args.seed, step))
        (seed,) = sequence.generate_state(1, np.uint64).tolist()
        for batch in batches:
            if not (own and len(batch["input_ids"])):
                yield batch
                continue
            assert self.on_policy is not None
            with torch.random.fork_rng(), self.compute_loss_context_manager():
                torch.manual_seed(seed)
                rows = self.on_policy.draw(self.distiller.student, batch, seed=seed)
            yield {**batch, **self.data_collator(rows)}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """See ``transformers.Trainer.training_step``; runs the micro-batches of a batch."""
        inputs = self._prepare_inputs(dict(inputs))
        self.share = inputs.pop(SHARE, 1.0)
        label_share = inputs.pop(LABEL_SHARE, None)
        if label_share is not None:
            label_share = label_share / (self.share or 1)
        self.distiller.method.label_share = label_share
        if self.accumulate == 1:
            return super().training_step(model, inputs, *args)
        rows = len(next(iter(inputs.values())))
        # The same number in all processes.
        self.parts = max(1, min(self.accumulate, -processes.largest(-rows)))
        split = (x.tensor_split(self.parts) for x in inputs.values())
        parts = [dict(zip(inputs, part, strict=True)) for part in zip(*split, strict=True)]
        self.losses = self.distiller.accumulate(parts, model)
        losses = [super(StepTrainer, self).training_step(model, part, *args) for part in parts]
        self.losses = None
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of this process's rows, times their share.

        For a micro-batch it is the micro-batch's term of the whole step's loss.
        """
        if self.losses is not None:
            self._set_progress()
            output = next(self.losses)
            self._note(output.terms, self.parts)
            return output.loss
        if num_items_in_batch is not None:
            # A loss divided by the number of items of all processes already has its share.
            num_items_in_batch = num_items_in_batch * self.share
        return self.share * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _count_labels(self, batch: dict[str, Any]) -> tuple[int, int]:
        # A process without rows left repeats some, with a share of 0.
        return super()._count_labels(batch) if batch.get(SHARE, 1.0) > 0 else (0, 0)

    def _items(self, batch: dict[str, Any]) -> Tensor:
        return super()._items(batch) * (batch.get(SHARE, 1.0) > 0)

    def _note(self, terms: dict[str, Tensor], parts: int = 1) -> None:
        super()._note({name: value * self.share for name, value in terms.items()}, parts)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `DistillationTrainer.log`; the state's log also has each term's number of steps."""
        counts = {name: count for name, (_, count) in self._logged.items()}
        super().log(logs, *args, **kwargs)
        if "loss" in logs and counts:
            self.state.log_history[-1][COUNTS] = counts
