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
TEXT = Path(__file__).with_name("card.md.jinja")


def write_card(directory: Path, report: dict[str, Any]) -> None:
    """Write README.md for the student in ``directory``."""
    hub: Any = require("huggingface_hub", "train")
    settings, task = report["settings"], tasks.named(report.get("task"))
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
    known = {
        **report,
        "data": data.to_yaml(),
        "title": f"{method} student of {Path(teacher).name}",
        "method": method,
        "teacher": teacher,
        "sets": sets,
        "columns": columns,
        "recipe": recipes.sentence(report["recipe"]) if "recipe" in report else "",
        "summary": task.summary.format_map({k: escaped(v) for k, v in report.items()}),
        "usage": Template(task.usage).substitute(
            directory=directory.name,
            head=task.head,
            pipeline=task.pipeline,
            inputs='{"text": "...", "text_pair": "..."}' if report.get("paired") else '"..."',
        ),
        "head": task.head,
        "adapter": lora.ADAPTER,
        "directory": directory.name,
    }
    jinja2: Any = require("jinja2", "train")
    page = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    page.globals.update(compared=compared, escaped=escaped)
    text = page.from_string(TEXT.read_text("utf-8")).render(known)
    (directory / CARD).write_text(text, encoding="utf-8")


def _data_set(settings: Mapping[str, Any], kind: str, metric: str) -> str:
    """The file of a score's rows, or the data set on the hub."""
    if kind == "evaluation":
        hub_name = settings["task"] if settings["task"] in GLUE_TASKS else settings["data"]
        return Path(settings["evals"] or ".").name or hub_name
    named = names_of([Path(path) for path in settings["test"]])
    return named[max((x for x in named if metric.endswith(x)), key=len)].name


def escaped(value: Any) -> Any:
    """A list of names joined by commas, with Markdown's special characters escaped."""
    if not isinstance(value, list | tuple):
        return value
    names = (" ".join(str(name).split()) for name in value)
    return ", ".join(re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", name) for name in names)
