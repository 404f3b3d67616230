"""One training run inside transformers.Trainer: progress, evaluation, best model, resuming."""

import contextlib
import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch import nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fastkd.app.data import Encoded
from fastkd.app.errors import InputError, Interrupted, TrainingFailed
from fastkd.app.saving import full_disk_is_oserror, read_json

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What Trainer logs beside the losses.
NOT_A_LOSS = {"epoch", "step", "learning_rate", "grad_norm", "total"}


@dataclass(frozen=True)
class Plan:
    """How long, how fast and where to train."""

    epochs: float = 3.0
    max_steps: int = -1
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    warmup: float = 0.1
    precision: str = "fp32"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def steps(self, rows: int) -> tuple[int, int]:
        """Steps in all and steps in an epoch."""
        per_epoch = math.ceil(rows / self.batch_size)
        total = self.max_steps if self.max_steps > 0 else math.ceil(self.epochs * per_epoch)
        return total, per_epoch


def choose_device(name: str, precision: str) -> torch.device:
    """The device called ``name``, or auto: CUDA if there is one; checks ``precision`` on it."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here (see `fastkd doctor`)")
    chosen = "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
    if precision == "fp16" and chosen == "cpu":
        raise InputError("--precision fp16 needs a CUDA device; use fp32 or bf16 on the CPU")
    return torch.device(chosen)


class Display:
    """Progress bars with the named loss terms, on one console."""

    def __init__(self, console: Console):
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[terms]}"),
            console=console,
            transient=True,
        )

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def bar(self, title: str, total: int) -> TaskID:
        """A new bar."""
        return self.progress.add_task(title, total=total, terms="")


def format_scores(values: Mapping[str, float]) -> str:
    """`name 0.123` for every value."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def predict(
    model: nn.Module, examples: Encoded, collate: Callable, plan: Plan
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (rows, labels) of ``model`` in eval mode, and the labels; draws no random number."""
    was_training = model.training
    model.eval()
    order = sorted(range(len(examples)), key=lambda i: len(examples.inputs["input_ids"][i]))
    parts = []
    size = 2 * plan.batch_size
    try:
        with torch.no_grad(), autocast(plan):
            for start in range(0, len(order), size):
                batch = collate([examples[i] for i in order[start : start + size]])
                inputs = {k: v.to(plan.device) for k, v in batch.items() if k != "labels"}
                parts.append(model(**accepted(model, inputs)).logits.float().cpu().numpy())
    finally:
        model.train(was_training)
    logits = np.concatenate(parts)
    back = np.empty_like(logits)
    back[order] = logits
    return back, np.asarray(examples.labels)


def accepted(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` without what ``model`` has no argument for (DistilBERT takes no segments)."""
    arguments = inspect.signature(model.forward).parameters
    if "token_type_ids" in inputs and "token_type_ids" not in arguments:
        inputs = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    return inputs


def autocast(plan: Plan) -> contextlib.AbstractContextManager:
    """The precision of the plan, as Trainer applies it in training."""
    if plan.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(plan.device.type, dtype=PRECISIONS[plan.precision])


class Watcher(TrainerCallback):
    """Shows progress, evaluates, keeps the best model, stops cleanly on Ctrl-C.

    The history of evaluations lives in the trainer's own log, so that a resumed run knows it.
    """

    def __init__(
        self,
        display: Display,
        title: str,
        evaluate: Callable[[], dict[str, float]],
        keep: Callable[[dict[str, Any], list[dict]], None] | None,
        better: Callable[[float, float], bool],
        main: str,
        evaluate_every: int | None,
        checkpoint_every: int | None,
        steps_in_epoch: int,
    ):
        self.display, self.title = display, title
        self.evaluate, self.keep, self.better, self.main = evaluate, keep, better, main
        self.evaluate_every, self.checkpoint_every = evaluate_every, checkpoint_every
        self.steps_in_epoch = steps_in_epoch
        self.interrupted = False
        self.stopping = False
        self.terms: dict[str, float] = {}
        self.task = display.bar(title, 0)
        self.started = 0.0
        self.evaluated_at = -1

    def on_train_begin(self, args, state, control, **_):
        self.display.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        past = history_of(state.log_history)
        self.started = time.perf_counter() - (past[-1]["seconds"] if past else 0.0)

    def on_log(self, args, state, control, logs=None, **_):
        losses = {k: v for k, v in (logs or {}).items() if k not in NOT_A_LOSS}
        if "train_runtime" in losses or "loss" not in losses:
            return
        self.terms = losses
        if not math.isfinite(losses["loss"]):
            raise TrainingFailed(
                f"the loss became {losses['loss']} by step {state.global_step} "
                f"({format_scores(losses)}); try a lower learning rate or --precision fp32"
            )
        self.display.progress.update(self.task, terms=format_scores(losses))

    def on_step_end(self, args, state, control, **_):
        self.display.progress.update(self.task, completed=state.global_step)
        # At the end of an epoch the checkpoint comes after the evaluation, see on_epoch_end.
        ends_epoch = state.global_step % self.steps_in_epoch == 0
        due = self.checkpoint_every and state.global_step % self.checkpoint_every == 0
        if (due or self.interrupted) and not ends_epoch:
            control.should_save = True
            self.stopping = self.interrupted
        if self.evaluate_every and state.global_step % self.evaluate_every == 0:
            self._evaluate(state)

    def on_epoch_end(self, args, state, control, **_):
        if not self.evaluate_every or state.global_step == state.max_steps:
            self._evaluate(state)
        self.stopping = self.interrupted

    def on_save(self, args, state, control, **_):
        if self.stopping:
            raise Interrupted(state.global_step)

    def _evaluate(self, state):
        if self.evaluated_at == state.global_step:
            return
        self.evaluated_at = state.global_step
        began = time.perf_counter()
        past = history_of(state.log_history)
        entry = {
            "step": state.global_step,
            "epoch": round(state.epoch or 0.0, 6),
            "scores": self.evaluate(),
            "losses": dict(self.terms),
            "seconds": began - self.started,
        }
        main = entry["scores"][self.main]
        if math.isnan(main):
            raise TrainingFailed(
                f"the model's outputs are not finite after step {state.global_step}; "
                "try a lower learning rate or --precision fp32"
            )
        entry["best"] = all(self.better(main, old["scores"][self.main]) for old in past)
        if self.keep is not None and entry["best"]:
            self.keep(entry, [*past, entry])
        # Seconds are those of training alone.
        self.started += time.perf_counter() - began
        # Logged only once the model is kept: what a checkpoint calls the best is on the disk.
        state.log_history.append({"evaluation": entry})
        when = f"step {state.global_step}" if self.evaluate_every else f"epoch {entry['epoch']:g}"
        mark = "  (best so far)" if entry["best"] and self.keep else ""
        self.display.say(
            f"{self.title}  {when}:  {format_scores(entry['scores'])}"
            f"  [{format_scores(entry['losses'])}]{mark}"
        )


def history_of(log: list[dict]) -> list[dict]:
    """The evaluations in a trainer's log, oldest first."""
    return [entry["evaluation"] for entry in log if "evaluation" in entry]


def train(
    make_trainer: Callable[..., Trainer],
    examples: Encoded,
    collate: Callable,
    plan: Plan,
    display: Display,
    title: str,
    *,
    evaluate: Callable[[], dict[str, float]],
    main: str,
    keep: Callable[[dict[str, Any], list[dict]], None] | None = None,
    checkpoints: Path | None = None,
    resume: bool = False,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
) -> list[dict]:
    """Train what ``make_trainer`` trains and return its evaluations.

    ``keep(entry, history)`` is called after an evaluation whose ``main`` score is the best yet
    (the lowest for mse). With ``checkpoints`` the run can be cut off at any time and continued
    with ``resume`` to the same result.
    """
    total, per_epoch = plan.steps(len(examples))
    watcher = Watcher(
        display,
        title,
        evaluate,
        keep,
        (lambda new, old: new < old) if main.startswith("mse") else (lambda new, old: new > old),
        main,
        evaluate_every,
        checkpoint_every,
        per_epoch,
    )
    arguments = TrainingArguments(
        output_dir=str(checkpoints or "unused"),
        num_train_epochs=plan.epochs,
        max_steps=plan.max_steps,
        per_device_train_batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        weight_decay=plan.weight_decay,
        warmup_steps=round(plan.warmup * total),
        bf16=plan.precision == "bf16",
        fp16=plan.precision == "fp16",
        use_cpu=plan.device.type == "cpu",
        seed=plan.seed,
        save_strategy="epoch" if checkpoints else "no",
        save_total_limit=1,
        logging_steps=max(1, min(10, total // 50)),
        # A NaN is reported, not smoothed over.
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=plan.device.type == "cuda",
    )
    # One process, one device: replicas of Trainer's DataParallel would each see part of a batch.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    trainer = make_trainer(
        args=arguments,
        train_dataset=examples,
        data_collator=collate,
        callbacks=[watcher],
    )
    for chatty in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(chatty)
    last = newest_checkpoint(checkpoints) if resume and checkpoints else None
    with contextlib.ExitStack() as stack:
        if checkpoints:
            checkpoints.mkdir(parents=True, exist_ok=True)
            stack.enter_context(full_disk_is_oserror(checkpoints))
            stack.enter_context(_ctrl_c(watcher))
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    display.progress.remove_task(watcher.task)
    return history_of(trainer.state.log_history)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint: the trainer's state is the last file that is written."""
    found = sorted(directory.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    complete = (path for path in reversed(found) if read_json(path / "trainer_state.json"))
    return next(complete, None)


@contextlib.contextmanager
def _ctrl_c(watcher: Watcher) -> Iterator[None]:
    """The first Ctrl-C asks ``watcher`` for a checkpoint and a stop; a second stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(signum: int, frame: object) -> None:
        if watcher.interrupted:
            raise KeyboardInterrupt
        watcher.interrupted = True
        watcher.display.say("stopping after this step (Ctrl-C again stops at once)")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
