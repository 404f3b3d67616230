"""A training: transformers' Trainer, its evaluations, best model, checkpoints and signals."""

import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
    set_seed,
)

from fastkd.distill.distiller import Distiller
from fastkd.distill.labelled_order import LabelledOrder
from fastkd.integrations._rows import SourceError
from fastkd.integrations.served_teacher import ServedTeacher
from fastkd.train import lora, processes, sharding
from fastkd.train.arguments import arguments_of, steps_of
from fastkd.train.arrow_rows import Encoded
from fastkd.train.errors import Interrupted, Stopped, TrainingFailed
from fastkd.train.models import attention_for
from fastkd.train.progress import Track, format_scores
from fastkd.train.run_directory import CHECKPOINTS, Checkpoints
from fastkd.train.saving import discard, find_damage, replace_directory, save_tokenizer
from fastkd.train.scoring import Run, judge
from fastkd.train.signals import receiving_signals
from fastkd.train.tasks.base import Task
from fastkd.train.trainers import COUNTS, ShardedTrainer, StepTrainer

# What the log has beside the losses.
NOT_A_LOSS = {"epoch", "step", "learning_rate", "grad_norm", "total", COUNTS}


def fit(
    run: Run, distiller: Distiller, target: Path, rows: Encoded, report: Mapping[str, Any]
) -> list[dict]:
    """Train the student of ``distiller`` on ``rows``; returns its evaluations.

    They follow each epoch. Where the method leaves out unlabelled rows, they are as far apart as
    those of a method that reads them. The best state is saved to ``target``, with ``report`` in its
    manifest. The training can be cut off at any time and continued to the same result.
    """
    config, computation, out = run.config, run.computation, run.out
    assert out is not None
    is_student = target == out.student
    place, every = out.work / CHECKPOINTS[target.name], config.checkpoint_every
    checkpoints = Checkpoints(place, out.manifest["run"], every, config.resume)
    processes.on_first_process(lambda: _clear_damage(run, target, checkpoints))
    kind = ShardedTrainer if config.shard else StepTrainer
    if not config.shard:
        distiller.to(computation.device)
    size, share = computation.batch_size, config.labelled_share
    order = LabelledOrder(rows.labelled, size, share)
    _, in_epoch = steps_of(config, size, order.rows)
    unread = np.zeros(run.data.unread if is_student else 0, bool)
    everything = LabelledOrder(np.concatenate([rows.labelled, unread]), size, share)
    between = in_epoch * max(1, round(steps_of(config, size, everything.rows)[1] / in_epoch))

    def save_best(entry: dict[str, Any], history: list[dict]) -> None:
        found = {"complete": False, "student": entry["scores"], "best": entry, "history": history}
        manifest, data = {**out.manifest, **report, **found}, run.data
        student: Any = distiller.student
        whole = sharding.whole(student) if config.shard else student
        processes.on_first_process(
            lambda: save_model(target, whole, data.tokenizer, manifest, data.task)
        )

    title = config.method if is_student else target.name
    callback = TrainingCallback(run, distiller, title, between, checkpoints, save_best)
    generated = run.data.task.generated
    collate = run.sets.collate
    # Trackers read their directory when the trainer is made.
    with receiving_signals(callback.request_stop), logging_to(config.out / "logs" / target.name):
        trainer = kind(
            model=distiller,
            args=arguments_of(config, computation, checkpoints.incomplete, order.rows),
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
        try:
            _train(run, trainer, checkpoints)
            callback.sync_signals()
        finally:
            callback.track.stop()
    if callback.signum is not None:  # received in the last step
        raise Interrupted(trainer.state.global_step, callback.signum)
    return history_of(trainer.state.log_history)


def _clear_damage(run: Run, target: Path, checkpoints: Checkpoints) -> None:
    """Remove a damaged best model; its training starts again."""
    why = find_damage(target) if target.exists() else None
    if why:
        run.display.say(f"{target} is damaged ({why}); its training starts again")
        discard(target)
        checkpoints.clear()


def _train(run: Run, trainer: StepTrainer, checkpoints: Checkpoints) -> None:
    """Run a trainer from the last checkpoint, if there is one to resume from."""
    last = None
    if checkpoints.resume:
        last = processes.on_first_process(lambda: checkpoints.newest(run.display.say))
    # Dropout differs between the processes.
    set_seed((run.config.seed + processes.rank()) % 2**32)
    ended = ended_state(last)
    if ended is not None:
        trainer.state = ended
        trainer._load_from_checkpoint(str(last))
        return
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    except SourceError as error:
        raise TrainingFailed(str(error)) from error


def load_best(run: Run, target: Path, model: nn.Module) -> Any:
    """The saved best model, of the class of ``model`` without adapters and shards."""
    kind = type(lora.plain(sharding.without_shards(model) if run.config.shard else model))
    # Teacher and student are timed with the same attention.
    return kind.from_pretrained(target, **attention_for(run.config.method, run.config.attention))


def servers_of(teacher: nn.Module) -> list[ServedTeacher]:
    """The teachers that run in a server."""
    return [module for module in teacher.modules() if isinstance(module, ServedTeacher)]


def save_model(
    target: Path, model: PreTrainedModel, tokenizer: Any, report: dict[str, Any], task: Task
) -> None:
    """Save model, tokenizer, report and the task's own files to ``target``, atomically."""

    def write(directory: Path) -> dict[str, Any]:
        lora.save(model, directory)
        save_tokenizer(tokenizer, directory)
        task.save(directory, model.config)
        return report

    replace_directory(target, write)


class TrainingCallback(TrainerCallback):
    """Shows progress, evaluates, saves the best model, completes checkpoints, stops on signals.

    The student is scored every ``steps_between`` steps (whole epochs) and after the last step, and
    a line is printed. ``save_best(entry, history)`` is called after the best evaluation so far; a
    head that no step has trained yet is never the best. The evaluations are stored in the trainer's
    own log, so that a resumed run has them.
    """

    def __init__(
        self,
        run: Run,
        distiller: Distiller,
        title: str,
        steps_between: int,
        checkpoints: Checkpoints,
        save_best: Callable[[dict[str, Any], list[dict]], None],
    ):
        self.run, self.distiller, self.title = run, distiller, title
        self.display, self.steps_between = run.display, steps_between
        self.checkpoints, self.save_best = checkpoints, save_best
        self.received: int | None = None  # by this process
        self.signum: int | None = None  # by any
        self.stopping = False
        self.track = Track()
        self.started = 0.0
        self.evaluated_at = -1

    def request_stop(self, signum: int, frame: object) -> None:
        """Handle a signal: the first stops after a checkpoint, a second one at once."""
        if self.received is not None:
            raise Stopped(signum)
        self.received = signum
        again = " (Ctrl-C again stops at once)" if signum == signal.SIGINT else ""
        self.display.say(f"stopping after this step{again}")

    @property
    def remedy(self) -> str:
        """What may help where a loss or an output isn't finite."""
        in_half = self.run.config.precision != "fp32"
        return "try a lower learning rate" + (" or --precision fp32" if in_half else "")

    def sync_signals(self) -> None:
        """Share a signal with all processes, so that they stop at the same step."""
        self.signum = processes.largest(self.received or 0) or None

    def on_train_begin(self, args, state, control, **_):
        self.track = self.display.track(self.title, state.global_step, state.max_steps)
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
        every = self.checkpoints.every
        due = every and state.global_step % every == 0
        # An evaluation reports the losses of all steps before it, also after resuming.
        control.should_log |= bool(due or self.signum or self._evaluates_after(state))
        # The checkpoint of an evaluation follows it, in on_epoch_end.
        if (due or self.signum) and not self._evaluates_after(state):
            control.should_save = True
            self.stopping = self.signum is not None

    def _evaluates_after(self, state) -> bool:
        step = state.global_step
        return step % self.steps_between == 0 or step == state.max_steps

    def on_epoch_end(self, args, state, control, **_):
        if not self._evaluates_after(state):
            control.should_save = False
            return
        self._evaluate(state)
        self.sync_signals()
        self.stopping = self.signum is not None

    def on_save(self, args, state, control, **_):
        complete = functools.partial(self.checkpoints.complete, state.global_step)
        processes.on_first_process(complete)
        self.display.event("checkpoint", title=self.title, step=state.global_step)
        if self.stopping and self.signum is not None:
            raise Interrupted(state.global_step, self.signum)

    def _head_is_trained(self, step: int, steps: int) -> bool:
        """Whether a step before has trained the head, or none ever does."""
        method = self.distiller.method

        def trains(step: int) -> bool:
            weights = method.weights((step - 1) / steps)
            return any(weights.get(term) for term in method.head_terms)

        return trains(step) or not trains(steps)

    def _evaluate(self, state):
        if self.evaluated_at == state.global_step:
            return
        self.evaluated_at = state.global_step
        began = time.perf_counter()
        past = history_of(state.log_history)
        entry = {
            "step": state.global_step,
            "epoch": round(state.epoch or 0.0, 6),
            "scores": judge(self.run, self.distiller.student).scores,
            "losses": losses_of(state.log_history),
            "seconds": began - self.started,
        }
        metric = self.run.data.corpus.metrics[0]
        sign = -1 if metric in self.run.data.task.lower_is_better else 1
        main = entry["scores"][metric]
        if math.isnan(main):
            raise TrainingFailed(
                f"the model's outputs are not finite after step {state.global_step}; {self.remedy}"
            )
        ready = self._head_is_trained(state.global_step, state.max_steps)
        before = [x for x in past if self._head_is_trained(x["step"], state.max_steps)]
        entry["best"] = ready and all(sign * main > sign * old["scores"][metric] for old in before)
        if entry["best"]:
            self.save_best(entry, [*past, entry])
        # Seconds are those of training alone.
        self.started += time.perf_counter() - began
        # Logged after the model is saved, so that a checkpoint's best model is on the disk.
        state.log_history.append({"evaluation": entry})
        self.display.event("evaluation", title=self.title, **entry)
        mark = "  (best so far)" if entry["best"] else "" if ready else "  (head not trained yet)"
        self.display.say(
            f"{self.title}  epoch {entry['epoch']:g}:  {format_scores(entry['scores'])}"
            f"  [{format_scores(entry['losses'])}]{mark}"
        )


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


def ended_state(checkpoint: Path | None) -> TrainerState | None:
    """State of a checkpoint after the last step, with which Trainer would continue wrongly."""
    if checkpoint is None:
        return None
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    history = history_of(state.log_history)
    return state if history and history[-1]["step"] >= state.max_steps else None


@contextlib.contextmanager
def logging_to(logs: Path) -> Iterator[None]:
    """Context that sends TensorBoard's files to ``logs``, unless its variable is set already."""
    name = "TENSORBOARD_LOGGING_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(logs)
    try:
        yield
    finally:
        del os.environ[name]
