"""A training: transformers' Trainer, its arguments, evaluations, best model and checkpoints."""

import contextlib
import functools
import math
import signal
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.training_args import TrainingArguments

from fastkd._core.extras import require
from fastkd.distill.distiller import Distiller
from fastkd.distill.labelled_order import LabelledOrder, has_label
from fastkd.distill.trainer import SHARE, DistillationTrainer
from fastkd.distributed import world_size
from fastkd.integrations._rows import SourceError
from fastkd.integrations.served_teacher import ServedTeacher
from fastkd.models.inputs import without_adapters
from fastkd.train import lora, processes, sharding
from fastkd.train.arrow_rows import Encoded
from fastkd.train.config import Config
from fastkd.train.errors import InputError, Interrupted, Stopped, TrainingFailed, nearest
from fastkd.train.launcher import receiving_signals
from fastkd.train.models import attention_for
from fastkd.train.options import as_json, check_types
from fastkd.train.processes import Computation
from fastkd.train.progress import Track, format_scores
from fastkd.train.run_directory import CHECKPOINTS, NEW, Checkpoints, Training
from fastkd.train.saving import discard, find_damage, replacing, save_tokenizer, saving
from fastkd.train.scoring import judge
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


@dataclass(eq=False)
class StepSampler(Sampler[ProcessRows]):
    """The rows of one process for each step; seed and epoch alone determine the order.

    ``epoch()`` returns the epoch that begins, or that a resumed run continues.
    """

    order: LabelledOrder
    seed: int
    rank: int = 0
    ranks: int = 1
    epoch: Callable[[], int] = int

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


@dataclass(eq=False)
class _BatchDataset(Dataset):
    examples: Any
    collate: Callable
    may_be_empty: bool

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


def is_on_policy(step: int, share: float) -> bool:
    """Whether ``step`` (from 0) is one of a fraction ``share`` of the steps, spread evenly."""
    return int((step + 1) * share + ROUNDING) > int(step * share + ROUNDING)


class StepTrainer(DistillationTrainer):
    """`DistillationTrainer` of batches in a given ``order``, the same for any number of processes.

    An epoch has ``in_epoch`` steps, and a batch ``accumulate`` micro-batches.

    In a fraction ``on_policy`` of the steps the student trains on text that it generates by
    ``generated``, see `Task.generated`. The text depends on weights, seed, step and row alone.
    """

    control: Any

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
            order,
            config.seed,
            config.process_index,
            config.world_size,
            lambda: self.state.global_step // in_epoch,
        )
        self.say, self.accumulate = say, accumulate
        self.on_policy, self.generated = on_policy, generated

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")

    def _larger_batch(self) -> str:
        batches, rows = self.args.gradient_accumulation_steps, self.steps.order.batch
        return f"--batch-size {rows * batches} --accumulate {batches} compares all rows of a step"

    def get_train_dataloader(self, steps: StepSampler | None = None) -> DataLoader:
        """See ``transformers.Trainer.get_train_dataloader``; of other ``steps`` than its own."""
        args = self.args
        loader: Any = DataLoader
        if servers_of(self.distiller.teacher) and not self.on_policy:
            loader = functools.partial(_Ahead, self.distiller)
        return loader(
            _BatchDataset(self.train_dataset, self.data_collator, self.distiller.gather),
            batch_sampler=self.steps if steps is None else steps,  # type: ignore[arg-type]
            collate_fn=dict,  # the batch itself
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _preparation_batches(self) -> Iterator[dict[str, Any]]:
        """Whole steps, the same in all processes."""
        for batch in self.get_train_dataloader(StepSampler(self.steps.order, self.steps.seed)):
            yield {name: x for name, x in batch.items() if name != SHARE}

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See ``transformers.Trainer._evaluate``; `TrainingCallback` scores the student."""
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
        return {}

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; an error of any process is raised as SaveFailed in all."""
        with processes.errors_on_all(), saving(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """See `DistillationTrainer.get_batch_samples`; on-policy batches have generated text."""
        if self.on_policy:
            epoch_iterator = self._on_policy_batches(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

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
            for place, value in zip(places, full, strict=True) if processes.rank() == 0 else ():
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


# What the log has beside the losses.
NOT_A_LOSS = {"epoch", "step", "learning_rate", "grad_norm", "total", COUNTS}


def fit(
    run: Training,
    distiller: Distiller,
    target: Path,
    rows: Encoded,
    report: Mapping[str, Any],
    measure: Callable[[Training, Any], Mapping[str, Any]] | None = None,
) -> list[dict]:
    """Train the student of ``distiller`` on ``rows``; returns its evaluations.

    An evaluation has ``measure`` of run and student beside the scores.

    They follow each epoch. Where the method leaves out unlabelled rows, they are as far apart as
    those of a method that reads them. The best state is saved to ``target``, with ``report`` in its
    manifest. The training can be cut off at any time and continued to the same result.
    """
    config, computation, out = run.config, run.computation, run.out
    is_student = target == out.student
    checkpoints = Checkpoints(out.work / CHECKPOINTS[target.name], out.manifest["run"])
    processes.on_first_process(lambda: _clear_damage(run, target, checkpoints))
    if not config.shard:
        distiller.to(computation.device)
    order, in_epoch, between = _epoch_of(run, rows, run.data.unread if is_student else 0)
    title = config.method if is_student else target.name
    callback = TrainingCallback(
        run, distiller, target, title, between, checkpoints, report, measure
    )
    generated, collate = run.data.task.generated, run.sets.collate
    last = None
    if config.resume:
        last = processes.on_first_process(lambda: checkpoints.newest(run.display.say))
    with receiving_signals(callback.request_stop):
        trainer = (ShardedTrainer if config.shard else StepTrainer)(
            model=distiller,
            args=arguments_of(config, computation, checkpoints.directory / NEW, order.rows),
            train_dataset=rows,
            # A cache holds the outputs of undrawn rows: the partial hides `for_epoch`.
            data_collator=functools.partial(collate) if run.data.cached else collate,
            order=order,
            in_epoch=in_epoch,
            accumulate=config.accumulate,
            say=run.display.say,
            on_policy=config.on_policy if is_student else 0.0,
            generated=generated and functools.partial(generated, tokenizer=run.data.tokenizer),
        )
        trainer.add_callback(callback)  # after the method has prepared itself
        for chatty in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(chatty)
        for each in trainer.callback_handler.callbacks:
            if getattr(each, "logging_dir", "") is None:  # TensorBoard's, without its variable
                each.logging_dir = str(config.out / "logs" / target.name)
        # Dropout differs between the processes.
        set_seed((config.seed + processes.rank()) % 2**32)
        try:
            if last is not None and (ended := ended_state(last)) is not None:
                trainer.state = ended
                trainer._load_from_checkpoint(str(last))
            else:
                trainer.train(resume_from_checkpoint=None if last is None else str(last))
            callback.sync_signals()
        except SourceError as error:
            raise TrainingFailed(str(error)) from error
        finally:
            callback.track.stop()
    if callback.signum is not None:  # received in the last step
        raise Interrupted(trainer.state.global_step, callback.signum)
    return history_of(trainer.state.log_history)


def _epoch_of(run: Training, rows: Encoded, unread: int) -> tuple[LabelledOrder, int, int]:
    """Order of an epoch's ``rows``, its number of steps, and the steps between two evaluations.

    A method that reads the ``unread`` rows too would have them in its epochs.
    """
    config, size = run.config, run.computation.batch_size
    # Without numbers, the first part of the rows is labelled.
    labels = rows.labels
    labelled = np.arange(len(rows)) < rows.ends[0] if labels is None else has_label(labels)
    grouped = config.passed.get("train_sampling_strategy") == GROUPED
    lengths = rows.lengths if grouped else None
    order = LabelledOrder(labelled, size, config.labelled_share, lengths)
    _, in_epoch = steps_of(config, size, order.rows)
    everything = np.concatenate([labelled, np.zeros(unread, bool)])
    longer = LabelledOrder(everything, size, config.labelled_share).rows
    between = in_epoch * max(1, round(steps_of(config, size, longer)[1] / in_epoch))
    return order, in_epoch, between


def _clear_damage(run: Training, target: Path, checkpoints: Checkpoints) -> None:
    """Remove a damaged best model; its training starts again."""
    why = find_damage(target) if target.exists() else None
    if why:
        run.display.say(f"{target} is damaged ({why}); its training starts again")
        discard(target)
        checkpoints.clear()


def load_best(run: Training, target: Path, model: nn.Module) -> Any:
    """The saved best model, of the class of ``model`` without adapters and shards."""
    model = vars(model).get(sharding.EMPTY, model)
    kind: Any = type(without_adapters(model))
    # Teacher and student are timed with the same attention.
    return kind.from_pretrained(target, **attention_for(run.config.method, run.config.attention))


def servers_of(teacher: nn.Module) -> list[ServedTeacher]:
    """The teachers that run in a server."""
    return [module for module in teacher.modules() if isinstance(module, ServedTeacher)]


def save_model(
    target: Path, model: PreTrainedModel, tokenizer: Any, report: dict[str, Any], task: Task
) -> None:
    """Save model, tokenizer, report and the task's own files to ``target``, atomically."""
    with replacing(target, report) as directory:
        if hasattr(model, "peft_config"):
            lora.save(model, directory)
        else:
            model.save_pretrained(directory)
        save_tokenizer(tokenizer, directory)
        task.save(directory, model.config)


@dataclass(eq=False, repr=False)
class TrainingCallback(TrainerCallback):
    """Shows progress, evaluates, saves the best model, completes checkpoints, stops on signals.

    The student is scored every ``steps_between`` steps (whole epochs) and after the last step, and
    a line is printed. After the best evaluation so far it is saved to ``target`` with ``report``; a
    head that no step has trained yet is never the best. The evaluations are stored in the trainer's
    own log, so that a resumed run has them.
    """

    run: Training
    distiller: Distiller
    target: Path
    title: str
    steps_between: int
    checkpoints: Checkpoints
    report: Mapping[str, Any]
    measure: Callable[[Training, Any], Mapping[str, Any]] | None = None
    #: Signal that this process received, and that any process did.
    received: int | None = None
    signum: int | None = None
    track: Track = field(default_factory=Track)
    started: float = 0.0

    def request_stop(self, signum: int, frame: object) -> None:
        """Handle a signal: the first stops after a checkpoint, a second one at once."""
        if self.received is not None:
            raise Stopped(signum)
        self.received = signum
        again = " (Ctrl-C again stops at once)" if signum == signal.SIGINT else ""
        self.run.display.say(f"stopping after this step{again}")

    @property
    def remedy(self) -> str:
        """What may help where a loss or an output isn't finite."""
        in_half = self.run.config.precision != "fp32"
        return "try a lower learning rate" + (" or --precision fp32" if in_half else "")

    def sync_signals(self) -> None:
        """Share a signal with all processes, so that they stop at the same step."""
        self.signum = processes.largest(self.received or 0) or None

    def on_train_begin(self, args, state, control, **_):
        self.track = self.run.display.track(self.title, state.global_step, state.max_steps)
        past = history_of(state.log_history)
        self.started = time.perf_counter() - (past[-1]["seconds"] if past else 0.0)

    def on_log(self, args, state, control, logs=None, **_):
        losses = {k: v for k, v in (logs or {}).items() if k not in NOT_A_LOSS}
        if "train_runtime" in losses or "loss" not in losses:
            return
        if not math.isfinite(losses["loss"]):
            raise TrainingFailed(
                f"the loss became {losses['loss']} by step {state.global_step} "
                f"({format_scores(losses)}); {self.remedy}"
            )
        note = ", ".join(x.throughput() for x in servers_of(self.distiller.teacher))
        self.track.advance(state.global_step, losses, note)

    def on_step_end(self, args, state, control, **_):
        self.track.advance(state.global_step)
        self.sync_signals()
        step, every = state.global_step, self.run.config.checkpoint_every
        control.should_evaluate = step % self.steps_between == 0 or step == state.max_steps
        due = every and step % every == 0
        control.should_save = bool(due or self.signum or control.should_evaluate)
        # An evaluation reports the losses of all steps before it, also after resuming.
        control.should_log |= control.should_save

    def on_save(self, args, state, control, **_):
        complete = functools.partial(self.checkpoints.complete, state.global_step)
        processes.on_first_process(complete)
        self.run.display.event("checkpoint", title=self.title, step=state.global_step)
        if self.signum is not None:
            raise Interrupted(state.global_step, self.signum)

    def _head_is_trained(self, step: int, steps: int) -> bool:
        """Whether a step before has trained the head, or none ever does."""
        method = self.distiller.method
        now, end = (
            any(method.weights((at - 1) / steps).get(term) for term in method.head_terms)
            for at in (step, steps)
        )
        return now or not end

    def on_evaluate(self, args, state, control, **_):
        began = time.perf_counter()
        past = history_of(state.log_history)
        run, student = self.run, cast(Any, self.distiller.student)
        entry = {
            "step": state.global_step,
            "epoch": round(state.epoch or 0.0, 6),
            "scores": judge(run, student).scores,
            "losses": losses_of(state.log_history),
            "seconds": began - self.started,
            **(self.measure(run, student) if self.measure else {}),
        }
        metric, task = run.data.corpus.metrics[0], run.data.task
        sign = -1 if metric in task.lower_is_better else 1
        main = entry["scores"][metric]
        if math.isnan(main):
            raise TrainingFailed(
                f"the model's outputs are not finite after step {state.global_step}; {self.remedy}"
            )
        ready = self._head_is_trained(state.global_step, state.max_steps)
        before = [x for x in past if self._head_is_trained(x["step"], state.max_steps)]
        entry["best"] = ready and all(sign * main > sign * old["scores"][metric] for old in before)
        if entry["best"]:
            found = {"complete": False, "student": entry["scores"], "best": entry}
            manifest = {**run.out.manifest, **self.report, **found, "history": [*past, entry]}
            whole = sharding.whole(student) if run.config.shard else student
            save = functools.partial(save_model, self.target, whole, run.data.tokenizer)
            processes.on_first_process(lambda: save(manifest, task))
        # Seconds are those of training alone.
        self.started += time.perf_counter() - began
        # Logged after the model is saved, so that a checkpoint's best model is on the disk.
        state.log_history.append({"evaluation": entry})
        run.display.event("evaluation", title=self.title, **entry)
        mark = "  (best so far)" if entry["best"] else "" if ready else "  (head not trained yet)"
        run.display.say(
            f"{self.title}  epoch {entry['epoch']:g}:  {format_scores(entry['scores'])}"
            f"  [{format_scores(entry['losses'])}]{mark}"
        )
        self.sync_signals()


def history_of(log: list[dict]) -> list[dict]:
    """The evaluations in a trainer's log, oldest first."""
    return [entry["evaluation"] for entry in log if "evaluation" in entry]


def losses_of(log: list[dict]) -> dict[str, float]:
    """Mean losses over the steps since the last evaluation, from a trainer's log."""
    totals: dict[str, tuple[float, float]] = {}
    last = 0
    for entry in log:
        if "evaluation" in entry:
            totals = {}
        elif "loss" in entry:
            steps, last = entry["step"] - last, entry["step"]
            counts = entry.get(COUNTS, {})
            for name, value in entry.items():
                if name not in NOT_A_LOSS:
                    total, count = totals.get(name, (0.0, 0.0))
                    own = counts.get(name, steps)
                    totals[name] = total + own * value, count + own
    return {name: total / count for name, (total, count) in totals.items()}


def ended_state(checkpoint: Path) -> TrainerState | None:
    """State of a checkpoint after the last step, with which Trainer would continue wrongly."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    history = history_of(state.log_history)
    return state if history and history[-1]["step"] >= state.max_steps else None


# The arguments of transformers' Trainer


@dataclass
class Arguments(TrainingArguments):
    """Arguments of transformers' Trainer, and the ``options`` of the run, which trackers record."""

    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """See ``TrainingArguments.to_dict``."""
        found = super().to_dict()
        return {**found.pop("options"), **found}


def settled(config: Config) -> Config:
    """``config`` with the content of the file --trainer-args, after all arguments are checked.

    Joins the process group of a launched process.

    Raises:
        InputError: an argument of the trainer, a tracker or the device cannot be used.
    """
    processes.join(config.device_name)
    computation = Computation.of(config)
    if config.report_to is not None:
        integrations: Any = require("transformers.integrations", "train")
        known = integrations.get_available_reporting_integrations()
        for name in filter(None, config.report_to.split(",")):
            if name not in known:
                have = f"installed: {', '.join(known)}" if known else "none is installed"
                raise InputError(f"--report-to {name}: this tracker is not installed; {have}")
    passed = {} if config.trainer_args is None else read_trainer_args(config.trainer_args)
    if config.schedule is not None:
        if passed.get("lr_scheduler_type", config.schedule) != config.schedule:
            raise InputError("--schedule and lr_scheduler_type of --trainer-args differ")
        passed["lr_scheduler_type"] = config.schedule
    found = replace(config, trainer_args=passed)
    try:
        arguments = arguments_of(found, computation, config.out)
        if passed:
            _try(arguments, passed)
    except (TypeError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, InputError) or config.trainer_args is config.schedule is None:
            raise
        given = f"--schedule {config.schedule}"
        if config.trainer_args is not None:
            given = f"--trainer-args {config.trainer_args}"
        raise InputError(f"{given}: {error}") from error
    several = arguments.gradient_accumulation_steps > 1
    if config.accumulate > 1 and several:
        raise InputError(
            "--accumulate and gradient_accumulation_steps of --trainer-args exclude each other"
        )
    if config.accumulate > 1 and world_size() > 1 and not config.gather:
        raise InputError(
            "--accumulate: several processes share a step; pass --gather, which computes the "
            "loss over all its rows"
        )
    return found


def arguments_of(
    config: Config, computation: Computation, folder: Path, rows: int = 1
) -> Arguments:
    """The arguments of one training on this number of ``rows``, with checkpoints in ``folder``."""
    total, _ = steps_of(config, computation.batch_size, rows)
    found = Arguments(
        **{
            "options": as_json(config),
            "output_dir": str(folder),
            "num_train_epochs": config.num_train_epochs,
            "max_steps": config.training_steps or -1,
            "per_device_train_batch_size": computation.own_rows,
            "learning_rate": config.learning_rate,
            "weight_decay": config.weight_decay,
            "warmup_steps": round(config.warmup * total),
            "logging_steps": max(1, min(10, total // 50)),
            "seed": config.seed,
            "bf16": config.precision == "bf16",
            "fp16": config.precision == "fp16",
            "use_cpu": computation.device.type == "cpu",
            "report_to": [*filter(None, (config.report_to or "").split(","))],
            "save_strategy": "no",  # `fastkd.train.fitting.TrainingCallback` says when
            "logging_nan_inf_filter": False,  # a NaN is reported, not smoothed over
            "remove_unused_columns": False,
            "disable_tqdm": True,
            **config.passed,
        }
    )
    # One device per process: each replica of DataParallel would see a part of a batch.
    found._n_gpu = min(found._n_gpu, 1)
    return found


def steps_of(config: Config, batch_size: int, rows: int) -> tuple[int, int]:
    """Steps in all, and steps of an epoch, for this number of rows."""
    batches = math.ceil(rows / batch_size)
    per_epoch = math.ceil(batches / config.passed.get("gradient_accumulation_steps", 1))
    total = config.training_steps or config.num_train_epochs * per_epoch
    return math.ceil(total), per_epoch


# Fields of TrainingArguments that an option of fastkd sets, and this option.
OURS = {
    "output_dir": "--out",
    "num_train_epochs": "--epochs",
    "max_steps": "--steps",
    "per_device_train_batch_size": "--batch-size",
    "learning_rate": "--learning-rate",
    "weight_decay": "--weight-decay",
    "warmup_steps": "--warmup",
    "bf16": "--precision",
    "fp16": "--precision",
    "use_cpu": "--device",
    "seed": "--seed",
    "data_seed": "--seed",
    "report_to": "--report-to",
    "save_strategy": "--checkpoint-every",
    "save_steps": "--checkpoint-every",
    "resume_from_checkpoint": "--resume",
    "metric_for_best_model": "--metric",
}
#: Value of train_sampling_strategy: batches of rows of similar length.
GROUPED = "group_by_length"
# Fields that --trainer-args may set. All others concern work that fastkd does itself (evaluation,
# saving, the order of the rows), or would change the loss without the method's knowledge.
PASSED = (
    "lr_scheduler_type", "lr_scheduler_kwargs", "optim", "optim_args", "optim_target_modules",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "gradient_accumulation_steps",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
    "activation_checkpointing_kwargs", "tf32", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "torch_empty_cache_steps", "neftune_noise_alpha", "full_determinism",
    "logging_steps", "logging_first_step", "run_name", "project", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_static_graph", "ddp_timeout", "train_sampling_strategy",
)  # fmt: skip


def read_trainer_args(given: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TrainingArguments from --trainer-args: a file, or a dictionary in Python."""
    found: Any = given
    option = f"--trainer-args {given}" if isinstance(given, Path) else "--trainer-args"
    if isinstance(given, Path):
        yaml: Any = require("yaml", "train")
        try:
            found = yaml.safe_load(given.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InputError(f"{option}: can't be read ({error})") from None
    if not found:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InputError(f"{option}: must hold names and values, one 'name: value' a line")
    kinds = typing.get_type_hints(TrainingArguments)
    known = [name for name in PASSED if name in kinds]
    for name in found:
        if name in OURS:
            raise InputError(f"{option}: {name} is what {OURS[name]} sets")
        if name not in kinds:
            raise InputError(f"{option}: {name} is no training argument; {nearest(name, known)}")
        if name.startswith("fsdp"):
            raise InputError(f"{option}: {name} is what --fsdp sets")
        if name not in known:
            raise InputError(f"{option}: {name} is settled by fastkd itself; leave it out")
    check_types(f"{option}: ", found, TrainingArguments)
    if found.get("gradient_accumulation_steps", 1) < 1:
        raise InputError(f"{option}: gradient_accumulation_steps must be at least 1")
    if found.get("train_sampling_strategy", "random") not in ("random", GROUPED):
        raise InputError(f"{option}: train_sampling_strategy must be random or {GROUPED}")
    if found.get("dataloader_num_workers", 0) < 0:
        raise InputError(f"{option}: dataloader_num_workers must be at least 0")
    if found.get("dataloader_persistent_workers") and not found.get("dataloader_num_workers"):
        raise InputError(f"{option}: dataloader_persistent_workers needs dataloader_num_workers")
    return dict(found)


def _try(arguments: TrainingArguments, passed: Mapping[str, Any]) -> None:
    """Raise now the errors of optimizer, schedule and compiler, which would be raised later."""
    transformers: Any = require("transformers", "train")
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    if kind.__module__.startswith(("torch.", "transformers.")):  # others need groups of weights
        kind([torch.zeros(1)], **options)
    if passed.get("torch_compile_backend") is not None:
        accelerate: Any = require("accelerate.utils", "train")
        accelerate.DynamoBackend(str(arguments.torch_compile_backend).upper())
    transformers.get_scheduler(
        arguments.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)]),
        num_warmup_steps=1,
        num_training_steps=10,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
