"""The model card of a student: its origin, scores and use."""

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from fastkd._core.extras import require
from fastkd.train import lora, recipes, tasks
from fastkd.train.files import names_of
from fastkd.train.glue import GLUE_TASKS
from fastkd.train.progress import compared

CARD = "README.md"
TEXT = Path(__file__).with_name("card.md.in")


def write_card(directory: Path, report: dict[str, Any]) -> None:
    """Write README.md for the student in ``directory``."""
    hub: Any = require("huggingface_hub", "train")
    settings, task = report["settings"], tasks.named(report.get("task"))
    by_teacher = report.get("teachers", {})
    teacher = settings["teacher"] or settings.get("teacher_cache") or settings["teachers"]
    method = report.get("method", settings["method"])
    sets = {"evaluation": report, "test": report.get("test", {})}
    columns = [(kind, name) for kind, found in sets.items() for name in found.get("student", {})]
    data = hub.ModelCardData(
        library_name=task.library,
        pipeline_tag=task.pipeline,
        tags=["fastkd", "knowledge-distillation"],
        base_model=None
        if Path(teacher).exists() or "stored_teacher" in report
        else settings.get("teacher_model") or teacher,
        model_name=f"{method} student",
        eval_results=[
            hub.EvalResult(
                task_type=task.pipeline,
                dataset_type=dataset,
                dataset_name=dataset,
                dataset_split=kind,
                metric_type=name,
                metric_value=sets[kind]["student"][name],
            )
            for kind, name in columns
            for dataset in [_data_set(settings, kind, name)]
        ],
    )
    base = settings.get("lora") and settings["student"] is None
    scores = {}
    for who in ("teacher", "student"):
        found = (sets[kind].get(who, {}).get(name) for kind, name in columns)
        scores[who] = " | ".join("" if x is None else f"{x:.4f}" for x in found)
    seconds, size, faster = report["seconds_a_batch"], report["parameters"], ""
    if "teacher" in seconds:
        times = compared(seconds["teacher"] / seconds["student"], "faster", "slower", "as fast")
        faster = f", {times} on the machine that trained it"
    text = TEXT.read_text("utf-8").format(
        data=data.to_yaml(),
        title=f"{method} student of {Path(teacher).name}",
        layers=report["layers"],
        parameters=size["student"],
        version=report["fastkd"],
        made=_made(method, settings["method"]),
        teacher=teacher,
        smaller=_smaller(report),
        faster=faster,
        headings=" | ".join(f"{name} ({kind})" for kind, name in columns),
        rules="---:|" * (len(columns) - 1) + "---:",
        teacher_scores=scores["teacher"],
        student_scores=scores["student"],
        by_teacher=_by_teacher(by_teacher) if by_teacher else "",
        rows=", ".join(f"{number} {kind}" for kind, number in report["rows"].items()),
        recipe=recipes.sentence(report["recipe"]) if "recipe" in report else "",
        labels=task.summary.format_map({k: _listed(v) for k, v in report.items()}),
        adapters=_adapters(settings, report, task.head, Path(directory).name) if base else "",
        usage=_usage(task, report, Path(directory).name),
    )
    (directory / CARD).write_text(text, encoding="utf-8")


def _smaller(report: Mapping[str, Any]) -> str:
    """The student's size beside the teacher's, or where the teachers are."""
    size, teachers = report["parameters"], report.get("teachers")
    if "teacher" in size:
        told = compared(size["teacher"] / size["student"], "smaller", "larger", "as large")
        if report["settings"].get("teacher_offload"):
            mib = report["bytes"]["teacher"] / 2**20
            told += f", its {mib:.1f} MiB of weights on the device only while it ran"
        return told
    if teachers:
        return f"{len(teachers)} teachers, each for its rows"
    if "served_teacher" in report:
        return f"in a server, {report['served_teacher']}"
    return report.get("stored_teacher", "known by its log-probabilities")


def _data_set(settings: Mapping[str, Any], kind: str, metric: str) -> str:
    """The file of a score's rows, or the data set on the hub."""
    if kind == "evaluation":
        hub_name = settings["task"] if settings["task"] in GLUE_TASKS else settings["data"]
        return Path(settings["evals"] or ".").name or hub_name
    named = names_of([Path(path) for path in settings["test"]])
    return named[max((x for x in named if metric.endswith(x)), key=len)].name


def _by_teacher(found: Mapping[str, Any]) -> str:
    """Table of the scores on each teacher's rows."""
    names = list(next(iter(found.values()))["student"])
    lines = [f"| rows of | teacher: {', '.join(names)} | student | rows |", "|---|---:|---:|---:|"]
    for name, each in found.items():
        scores = (" / ".join(f"{each[who][k]:.4f}" for k in names) if who in each else ""
                  for who in ("teacher", "student"))  # fmt: skip
        lines.append(f"| {_listed([name])} | {' | '.join(scores)} | {each['rows']} |")
    return "\n".join((*lines, "", ""))


def _listed(value: Any) -> Any:
    """A list of names joined by commas, with Markdown's special characters escaped."""
    if not isinstance(value, list | tuple):
        return value
    names = (" ".join(str(name).split()) for name in value)
    return ", ".join(re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", name) for name in names)


def _usage(task: Any, report: Mapping[str, Any], directory: str) -> str:
    """Example code that uses the student."""
    return Template(task.usage).substitute(
        directory=directory,
        head=task.head,
        pipeline=task.pipeline,
        inputs='{"text": "...", "text_pair": "..."}' if report.get("paired") else '"..."',
    )


def _made(method: str, given: str) -> str:
    if method == "labels":
        return "trained on the labels alone, and compared with the teacher"
    by = "" if method == given else f" (`--method {given}`)"
    return f"distilled with the method `{method}`{by} from the teacher"


def _adapters(settings: Mapping[str, Any], report: Mapping[str, Any], head: str, name: str) -> str:
    """Code that makes the unsaved base of LoRA adapters."""
    if settings["teacher_cache"] is not None:
        base = f'{head}.from_pretrained("{settings["teacher_cache"]}/student")'
        made = f"base = {base}\n"
        needs = ""
    else:
        needs = "from fastkd.distill import student_from_teacher\n"
        teacher = "teacher" if settings["finetune_teacher"] else settings["teacher"]
        sizes = f", config={dict(settings['student_config'])}" if settings["student_config"] else ""
        made = (
            f'teacher = {head}.from_pretrained("{teacher}")\n'
            f"base = student_from_teacher(teacher, {report['teacher_layers']}{sizes}).float()\n"
        )
    return (
        f"The LoRA adapters by themselves are in `{lora.ADAPTER}/`. Their base isn't saved; this "
        "makes it:\n\n```python\n"
        f"from peft import PeftModel\nfrom transformers import {head}\n{needs}\n{made}"
        f'model = PeftModel.from_pretrained(base, "{name}/{lora.ADAPTER}")\n```\n\n'
    )
