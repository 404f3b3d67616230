"""The job behind `fastkd distill`: check everything, fine-tune the teacher, train the student.

What lands in the output directory:
    student/       the best student so far, its tokenizer, and fastkd.json
    teacher/       the fine-tuned teacher (with --finetune-teacher)
    checkpoints/   what --resume continues from; removed when the run is complete
    settings.json  the options the run was started with
"""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedModel, Trainer, set_seed
from transformers.utils import logging as transformers_logging

import fastkd
from fastkd.app import data
from fastkd.app.data import Corpus, Encoded
from fastkd.app.errors import InputError
from fastkd.app.loop import Display, Plan, choose_device, format_scores, predict, train
from fastkd.app.models import (
    check_length,
    count,
    load_teacher,
    load_tokenizer,
    make_method,
    make_student,
)
from fastkd.app.options import as_json
from fastkd.app.saving import read_json, recover_directory, replace_directory, write_json
from fastkd.app.settings import Settings
from fastkd.distill.distiller import Distiller
from fastkd.distill.trainer import DistillationTrainer

REPORT = "fastkd.json"


class Run:
    """Data, teacher and plan, and the steps of a distillation with them."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Any,
        teacher: PreTrainedModel,
        plan: Plan,
        max_length: int,
        display: Display,
    ):
        check_length(max_length, tokenizer, teacher)
        self.corpus, self.tokenizer, self.teacher = corpus, tokenizer, teacher
        self.plan, self.display = plan, display
        self.train_rows = Encoded(corpus.train, tokenizer, max_length)
        self.eval_rows = {
            suffix: Encoded(rows, tokenizer, max_length) for suffix, rows in corpus.evals.items()
        }
        self.collate = DataCollatorWithPadding(tokenizer)

    @property
    def device(self) -> torch.device:
        return self.plan.device

    def score(self, model: nn.Module) -> dict[str, float]:
        """Every metric of ``model`` on every set of evaluation rows."""
        scores = {}
        for suffix, rows in self.eval_rows.items():
            found = data.evaluate(
                self.corpus.metrics, *predict(model, rows, self.collate, self.plan)
            )
            scores.update({f"{k}_{suffix}" if suffix else k: v for k, v in found.items()})
        return scores

    def finetune(self, plan: Plan, **watch: Any) -> list[dict]:
        """Train the teacher on the task, in place; see `loop.train` for ``watch``."""
        self.teacher.requires_grad_(True).train()
        return self.train_alone(self.teacher, "teacher", plan, **watch)

    def train_alone(
        self, model: PreTrainedModel, title: str, plan: Plan | None = None, **watch: Any
    ) -> list[dict]:
        """Train ``model`` on the labels, without a teacher."""
        trainer = functools.partial(Trainer, model=model)
        return self._train(trainer, model, plan or self.plan, title, **watch)

    def distil(self, distiller: Distiller, title: str, **watch: Any) -> list[dict]:
        """Train the student; see `loop.train` for ``watch``."""
        trainer = functools.partial(DistillationTrainer, model=distiller.to(self.device))
        return self._train(trainer, distiller.student, self.plan, title, **watch)

    def _train(
        self,
        make_trainer: Callable[..., Trainer],
        model: nn.Module,
        plan: Plan,
        title: str,
        **watch: Any,
    ) -> list[dict]:
        return train(
            make_trainer,
            self.train_rows,
            self.collate,
            plan,
            self.display,
            title,
            evaluate=lambda: self.score(model),
            main=self.corpus.metrics[0],
            **watch,
        )


def distill(settings: Settings, console: Console) -> dict[str, Any]:
    """Run `fastkd distill`; returns what fastkd.json holds.

    Raises:
        InputError: something given can't be used; raised before anything is trained.
    """
    started = time.perf_counter()
    be_quiet()
    plan = _plan(settings)
    make_method(settings.method, settings.options)
    done = _check_out(settings)
    if done is not None:
        console.print(f"{settings.out}: this run is already complete")
        return done
    corpus = data.load(settings)
    tokenizer = load_tokenizer(settings)
    name = _teacher_name(settings)
    teacher, corpus = load_teacher(settings, name, corpus, tokenizer)
    with Display(console) as display:
        run = Run(corpus, tokenizer, teacher, plan, settings.max_length, display)
        _assemble(settings, run)  # a mistake shows now, not after the teacher's fine-tuning
        settings.out.mkdir(parents=True, exist_ok=True)
        write_json(settings.out / "settings.json", as_json(settings))
        display.say(
            f"{len(run.train_rows)} training rows, "
            f"{sum(map(len, run.eval_rows.values()))} to evaluate on, device {run.device}"
        )
        nn.Module.to(teacher, run.device)
        if settings.finetune_teacher:
            _finetune(settings, run)
        report = _distil(settings, run)
    report["seconds"]["total"] = time.perf_counter() - started
    write_json(settings.out / "student" / REPORT, report)
    shutil.rmtree(settings.out / "checkpoints", ignore_errors=True)
    return report


def be_quiet() -> None:
    """Leave the talking to fastkd's own display."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _plan(settings: Settings) -> Plan:
    return Plan(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup=settings.warmup,
        precision=settings.precision,
        device=choose_device(settings.device, settings.precision),
        seed=settings.seed,
    )


def _assemble(settings: Settings, run: Run) -> Distiller:
    """A fresh student and method, the same ones every time."""
    set_seed(settings.seed)
    student = make_student(settings, run.teacher, run.tokenizer)
    method = make_method(settings.method, settings.options)
    try:
        return Distiller(run.teacher, student, method)
    except (TypeError, ValueError) as error:
        raise InputError(f"--method {settings.method} with this student: {error}") from error


def _finetune(settings: Settings, run: Run) -> None:
    """Fine-tune the teacher to its best evaluation, saved under OUT/teacher."""
    saved, teacher = settings.out / "teacher", run.teacher
    if settings.resume and _complete_report(saved, settings):
        return
    report: dict[str, Any] = {"complete": False, "settings": as_json(settings)}
    history = run.finetune(
        dataclasses.replace(
            run.plan,
            epochs=settings.finetune_teacher,
            learning_rate=settings.teacher_learning_rate,
        ),
        keep=lambda entry, history: save_model(
            saved, teacher, run.tokenizer, {**report, "best": entry, "history": history}
        ),
        checkpoints=settings.out / "teacher-checkpoints",
        resume=settings.resume,
        checkpoint_every=settings.checkpoint_every,
    )
    teacher.load_state_dict(type(teacher).from_pretrained(saved).state_dict())
    write_json(saved / REPORT, {**report, "complete": True, "history": history})
    shutil.rmtree(settings.out / "teacher-checkpoints", ignore_errors=True)


def _distil(settings: Settings, run: Run) -> dict[str, Any]:
    """Train the student, its best state saved under OUT/student; the report of the whole run."""
    teacher_scores = run.score(run.teacher)
    run.display.say(f"teacher:  {format_scores(teacher_scores)}")
    distiller = _assemble(settings, run)
    student = cast(PreTrainedModel, distiller.student)
    report: dict[str, Any] = {
        "fastkd": fastkd.__version__,
        "torch": torch.__version__,
        "complete": False,
        "settings": as_json(settings),
        "rows": {"train": len(run.train_rows), "eval": sum(map(len, run.eval_rows.values()))},
        "parameters": {"teacher": count(run.teacher), "student": count(student)},
        "teacher": teacher_scores,
    }

    def keep(entry: dict[str, Any], history: list[dict]) -> None:
        report.update(student=entry["scores"], best=entry, history=history)
        save_model(settings.out / "student", student, run.tokenizer, report)

    history = run.distil(
        distiller,
        settings.method,
        keep=keep,
        checkpoints=settings.out / "checkpoints",
        resume=settings.resume,
        checkpoint_every=settings.checkpoint_every,
    )
    best = [entry for entry in history if entry["best"]][-1]
    report.update(
        complete=True,
        student=best["scores"],
        best=best,
        history=history,
        seconds={"training": history[-1]["seconds"]},
    )
    return report


def show(report: dict[str, Any], out: Path, console: Console) -> None:
    """Print the end of a run: teacher against best student."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "parameters", *report["student"]):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("teacher", "student"):
        scores = (f"{value:.4f}" for value in report[name].values())
        table.add_row(name, f"{report['parameters'][name]:,}", *scores)
    console.print(table)
    seconds, best = report["seconds"], report["best"]
    console.print(
        f"best student: epoch {best['epoch']:g}, {format_scores(best['losses'])}\n"
        f"{seconds['training']:.0f} s of training, {seconds['total']:.0f} s in all; "
        f"saved in {out / 'student'}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def save_model(
    target: Path, model: PreTrainedModel, tokenizer: Any, report: dict[str, Any]
) -> None:
    """Save model, tokenizer and report under ``target``, all or nothing."""

    def write(directory: Path) -> None:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        write_json(directory / REPORT, report)

    replace_directory(target, write)


def _check_out(settings: Settings) -> dict[str, Any] | None:
    """Heal what an interruption left; refuse to replace a student unasked.

    Returns the report if the run to resume is already complete.
    """
    out = settings.out
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: there is a file of that name")
    if not out.exists():
        return None
    for name in ("student", "teacher"):
        recover_directory(out / name)
    if settings.resume:
        _check_unchanged(read_json(out / "settings.json"), settings)
        return _complete_report(out / "student", settings)
    if (out / "student").exists() and not settings.overwrite:
        raise InputError(
            f"--out {out} already holds a student; pass --resume to continue that run, "
            "--overwrite to replace it once a better one is complete, or another --out"
        )
    for leftover in ("checkpoints", "teacher-checkpoints"):
        shutil.rmtree(out / leftover, ignore_errors=True)
    return None


def _check_unchanged(before: dict[str, Any] | None, settings: Settings) -> None:
    if before is None:
        return
    now = as_json(settings)
    for name, value in now.items():
        if before.get(name) != value:
            raise InputError(
                f"--resume: the run in {settings.out} was started with {name} = "
                f"{before.get(name)!r}, now it is {value!r}; give the same options, or another "
                "--out"
            )


def _teacher_name(settings: Settings) -> str:
    """The fine-tuned teacher if an earlier part of this run has finished it, else the given one."""
    finished = settings.out / "teacher"
    if settings.resume and settings.finetune_teacher and _complete_report(finished, settings):
        return str(finished)
    return settings.teacher


def _complete_report(directory: Path, settings: Settings) -> dict[str, Any] | None:
    """The report of a finished model in ``directory``, if these settings made it."""
    report = read_json(directory / REPORT)
    if report is None or not report["complete"] or report["settings"] != as_json(settings):
        return None
    return report
