"""What a training does beside its steps: evaluation, best model, checkpoints, signals."""

import contextlib
import dataclasses
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from fastkd.train import processes
from fastkd.train.config import TrainingConfig
from fastkd.train.errors import Interrupted, Stopped, TrainingFailed
from fastkd.train.progress import Track, format_scores
from fastkd.train.run_directory import Checkpoints

# Entry of the log with the number of steps of each loss term: some terms are not of every step.
COUNTS = "counts"
# What the log has beside the losses.
NOT_A_LOSS = {"epoch", "step", "learning_rate", "grad_norm", "total", COUNTS}


class TrainingCallback(TrainerCallback):
    """Shows progress, evaluates, saves the best model, completes checkpoints, stops on signals.

    The ``job`` scores the ``model`` every ``steps_between`` steps (whole epochs) and after the last
    step, and prints a line. ``save_best(entry, history)`` is called after the best evaluation so
    far. The evaluations are stored in the trainer's own log, so that a resumed run has them.
    """

    def __init__(
        self,
        job: Any,
        model: Any,
        title: str,
        steps_between: int,
        checkpoints: Checkpoints,
        save_best: Callable[[dict[str, Any], list[dict]], None],
    ):
        self.job, self.model, self.title = job, model, title
        self.display, self.steps_between = job.display, steps_between
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
        in_half = self.job.training_config.precision != "fp32"
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
        note = ", ".join(x.throughput() for x in self.job.served)
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

    def _evaluate(self, state):
        if self.evaluated_at == state.global_step:
            return
        self.evaluated_at = state.global_step
        began = time.perf_counter()
        past = history_of(state.log_history)
        entry = {
            "step": state.global_step,
            "epoch": round(state.epoch or 0.0, 6),
            "scores": self.job.score(self.model),
            "losses": losses_of(state.log_history),
            "seconds": began - self.started,
        }
        metric = self.job.corpus.metrics[0]
        sign = -1 if metric in self.job.task.lower_is_better else 1
        main = entry["scores"][metric]
        if math.isnan(main):
            raise TrainingFailed(
                f"the model's outputs are not finite after step {state.global_step}; {self.remedy}"
            )
        entry["best"] = all(sign * main > sign * old["scores"][metric] for old in past)
        if entry["best"]:
            self.save_best(entry, [*past, entry])
        # Seconds are those of training alone.
        self.started += time.perf_counter() - began
        # Logged after the model is saved, so that a checkpoint's best model is on the disk.
        state.log_history.append({"evaluation": entry})
        self.display.event("evaluation", title=self.title, **entry)
        mark = "  (best so far)" if entry["best"] else ""
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


def arguments_of(training_config: TrainingConfig, folder: Path, steps: int) -> TrainingConfig:
    """The configuration of one training, which writes checkpoints to ``folder``."""
    args = dataclasses.replace(training_config, save_strategy="epoch")
    args.output_dir, args.warmup_steps = str(folder), round(args.warmup * steps)
    if "logging_steps" not in args.passed:
        args.logging_steps = max(1, min(10, steps // 50))
    return args


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
