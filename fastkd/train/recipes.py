"""The papers' training recipes: what `--preset paper` sets besides a method's hyper-parameters.

Each value has its place in the paper. Where a paper prints a grid, the value is its middle, or the
lower of its two middles, and the grid is kept beside it. Options that the user gives are kept.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fastkd.train.options import defaults_of, options_of


@dataclasses.dataclass(frozen=True)
class Printed:
    """A value that a paper prints, its section or table, and the grid that was searched."""

    value: Any
    place: str
    grid: tuple[Any, ...] = ()


def _middle(place: str, *grid: Any) -> Printed:
    """The middle of a printed grid; the lower of two."""
    return Printed(sorted(grid)[(len(grid) - 1) // 2], place, grid)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a paper prints of its training; keys are fields of `fastkd.train.settings`.

    ``student`` has the options that make a student: they are set together, or not at all.
    ``teacher`` applies if the teacher is fine-tuned in the run. ``loss`` has the places and grids
    of hyper-parameters, whose values are those of ``method_by_name(..., preset="paper")``.
    ``warmup_epochs`` is a warm-up in epochs. ``open`` names options of which the paper is silent.
    """

    title: str
    training: Mapping[str, Printed]
    student: Mapping[str, Printed]
    loss: Mapping[str, Printed]
    teacher: Mapping[str, Printed] = dataclasses.field(default_factory=dict)
    by_task: Mapping[str, Mapping[str, Printed]] = dataclasses.field(default_factory=dict)
    single_length: Printed | None = None
    warmup_epochs: Printed | None = None
    open: tuple[str, ...] = ()


_LONG, _SHORT = Printed(90, "Distillation Setup"), Printed(18, "Distillation Setup")
RECIPES: dict[str, Recipe] = {
    "fcd": Recipe(
        "Feature Correlation Distillation",
        training={
            "num_train_epochs": _middle("4.2", 3, 5, 10),
            "batch_size": Printed(32, "4.2"),
            "learning_rate": _middle("4.2", 2e-5, 1e-5, 5e-6),
            "weight_decay": Printed(0.5, "4.2"),
            "schedule": Printed("cosine", "4.2"),
            "max_length": Printed(128, "4.2, pairs"),
        },
        student={
            "student_layers": Printed(6, "4.3"),
            "teacher_layers": Printed("bottom", "4.3, the top layers are dropped"),
        },
        loss={
            "alpha": Printed(None, "4.2", (0.1, 0.2, 0.4, 1.0)),
            "beta": Printed(None, "4.2", (0.1, 0.2, 0.4, 1.0)),
            "soft_weight": Printed(None, "eq. 10"),
            "layers": Printed(None, "Table 3"),
            "normalize": Printed(None, "3.2, Table 4"),
            "distance": Printed(None, "3.3, Table 2"),
        },
        by_task={"cola": {"num_train_epochs": Printed(25, "4.2")}},
        single_length=Printed(64, "4.2, single texts"),
        warmup_epochs=Printed(5, "4.2"),
        open=("teacher_learning_rate", "finetune_teacher", "precision"),
    ),
    "knn": Recipe(
        "Intra-Class Similarity-Guided Feature Distillation",
        training={
            "num_train_epochs": Printed(5, "3.1"),
            "batch_size": Printed(32, "3.1"),
            "learning_rate": _middle("3.1", 1e-5, 3e-5, 5e-5),
            "max_length": Printed(128, "3.1"),
        },
        student={"student": Printed("huawei-noah/TinyBERT_General_6L_768D", "3.1")},
        loss={
            "k": Printed(None, "3.1", (1, 2, 3, 5)),
            "alpha1": Printed(None, "3.1", (0.1, 0.01, 0.001)),
            "alpha2": Printed(None, "3.1"),
            "alpha3": Printed(None, "3.1"),
            "temperature": Printed(None, "3.1"),
        },
        teacher={
            "finetune_teacher": Printed(5, "3.1"),
            "teacher_learning_rate": _middle("3.1", 1e-5, 3e-5, 5e-5),
        },
        open=("weight_decay", "schedule", "warmup", "precision"),
    ),
    "lrc_bert": Recipe(
        "LRC-BERT",
        training={
            "num_train_epochs": _SHORT,
            "batch_size": Printed(16, "Distillation Setup"),
            "learning_rate": _middle("Distillation Setup", 5e-5, 1e-4, 3e-4),
        },
        student={
            "student_layers": Printed(4, "Table 2"),
            "student_config": Printed(
                {"hidden_size": 312, "intermediate_size": 1200, "num_attention_heads": 12},
                "Distillation Setup",
            ),
            "student_weights": Printed("random", "Distillation Setup, LRC-BERT1"),
        },
        loss={
            "alpha": Printed(None, "Distillation Setup", (1, 2, 3, 4)),
            "beta": Printed(None, "Distillation Setup", (1, 2, 3, 4)),
            "gamma": Printed(None, "Distillation Setup", (1, 2, 3, 4)),
            "temperature": Printed(None, "Distillation Setup"),
            "first_stage": Printed(
                None, "Distillation Setup", tuple(round(0.05 * i, 2) for i in range(20))
            ),
            "perturb": Printed(None, "eqs. 7-8"),
        },
        by_task={task: {"num_train_epochs": _LONG} for task in ("mrpc", "rte", "cola")},
        open=(
            "weight_decay", "schedule", "warmup", "max_length", "finetune_teacher",
            "teacher_learning_rate", "precision",
        ),
    ),
    "mc3kd": Recipe(
        "MC3KD",
        training={
            "num_train_epochs": Printed(4, "Appendix A"),
            "batch_size": Printed(32, "Appendix A"),
            "learning_rate": _middle("Appendix A", 2e-5, 3e-5, 5e-5),
        },
        student={"student_layers": Printed(6, "6.2", (3, 6))},
        loss={
            "alpha": Printed(None, "Appendix A", (0.2, 0.5, 0.6, 0.7)),
            "beta": Printed(None, "Appendix A", (0.1, 1.0, 10.0)),
            "temperature": Printed(None, "Appendix A"),
            "layers": Printed(None, "Algorithm 1"),
        },
        open=(
            "weight_decay", "schedule", "warmup", "max_length", "teacher_layers",
            "finetune_teacher", "teacher_learning_rate", "precision",
        ),
    ),
    "lrkd": Recipe(
        "LRKD",
        training={
            "batch_size": _middle("4", 16, 32),
            "learning_rate": _middle("4", 2e-5, 3e-5, 4e-5, 5e-5),
            "max_length": Printed(128, "4"),
        },
        student={"student": Printed("google/bert_uncased_L-6_H-768_A-12", "4")},
        loss={
            "alpha": Printed(None, "4", (0.7, 0.8, 0.9, 1.0)),
            "beta": Printed(None, "4", (1.0, 10.0, 15.0)),
            "gamma": Printed(None, "4, around 0.3"),
            "temperature": Printed(None, "4", (1.0, 2.0, 3.0, 4.0)),
            "projection_layers": Printed(None, "4"),
            "scale_by_t2": Printed(None, "eq. 1"),
        },
        teacher={"teacher_learning_rate": _middle("4", 2e-5, 3e-5, 5e-5)},
        open=("num_train_epochs", "weight_decay", "schedule", "warmup", "finetune_teacher",
              "precision"),
    ),
}  # fmt: skip

# Options that make a student. With one of them, a recipe's student is left out.
MAKES = ("student", "student_layers", "teacher_layers", "student_config", "student_weights")


def recipe_of(settings: Any) -> Recipe | None:
    """The recipe of --preset paper: the one that --recipe names, or the method's own, if any."""
    if settings.preset != "paper":
        return None
    return RECIPES.get(settings.recipe or settings.method)


def printed(settings: Any, given: Iterable[str] = ()) -> dict[str, Printed]:
    """What the recipe sets in ``settings``, by field, unless an option excludes it.

    ``given``: fields that the user set.
    """
    recipe, given = recipe_of(settings), frozenset(given)
    if recipe is None:
        return {}
    found = {**recipe.training, **recipe.by_task.get(settings.glue_name or "", {})}
    if recipe.single_length is not None and not _pairs(settings):
        found["max_length"] = recipe.single_length
    if getattr(settings, "teacher_cache", None) is None and given.isdisjoint(MAKES):
        found.update(recipe.student)
    if getattr(settings, "finetune_teacher", 0):
        found.update(recipe.teacher)
    warmup = recipe.warmup_epochs
    if warmup is not None and hasattr(settings, "num_train_epochs"):
        epochs = found["num_train_epochs"].value
        if "num_train_epochs" in given:
            epochs = settings.num_train_epochs
        share = min(1.0, warmup.value / epochs)
        found["warmup"] = Printed(share, f"{warmup.place}, {warmup.value} of {epochs:g} epochs")
    return {name: value for name, value in found.items() if hasattr(settings, name)}


def _pairs(settings: Any) -> bool:
    """Whether a row has two texts, as far as the options say."""
    if settings.glue is not None:
        return settings.glue.hub.pair is not None
    return settings.text_pair_column is not None


def complete(settings: Any, given: Iterable[str]) -> None:
    """Set in ``settings`` what the recipe prints and the user has not ``given``."""
    given = frozenset(given)
    for name, entry in printed(settings, given).items():
        if name not in given:
            setattr(settings, name, entry.value)


def compared(settings: Any, method: Any) -> dict[str, Any]:
    """The recipe of a run with this ``method``, for its report; empty without one.

    "paper": its title. "set": what the run has as the paper prints it, each with ``value``,
    ``place`` and, where one was searched, ``grid``. "given": where the run deviates. "open": values
    of options of which the paper is silent.
    """
    recipe = recipe_of(settings)
    if recipe is None:
        return {}
    options, defaults = options_of(settings), defaults_of(settings)
    found: dict[str, Any] = {"paper": recipe.title, "set": {}, "given": {}, "open": {}}
    entries = printed(settings, ["num_train_epochs"])
    for name in MAKES:  # another student than the paper's
        if name not in entries and getattr(settings, name) != defaults[name]:
            entries[name] = Printed(None, "")
    for name, entry in entries.items():
        value = getattr(settings, name)
        kind = "set" if value == entry.value else "given"
        found[kind][options[name].key] = _entry(value, entry)
    if settings.recipe in (None, settings.method):
        hyperparameters = method.hyperparameters()
        for name, entry in recipe.loss.items():
            kind = "given" if name in settings.options else "set"
            found[kind][name] = _entry(hyperparameters[name], entry)
    for name in recipe.open:
        if name in options:
            found["open"][options[name].key] = getattr(settings, name)
    return found


def _entry(value: Any, entry: Printed) -> dict[str, Any]:
    found = {"value": value, "place": entry.place}
    if entry.grid:
        found["grid"] = list(entry.grid)
    if entry.value not in (None, value):
        found["paper"] = entry.value
    return found


def lines(report: Mapping[str, Any]) -> list[str]:
    """The table of `compared`, a line for each option: its value, and who set it."""
    rows = [
        (name, _shown(entry["value"]), f"{who}: {_paper(entry)}")
        for kind, who in (("set", "set by the paper"), ("given", "given by you"))
        for name, entry in report.get(kind, {}).items()
    ]
    rows += [(k, _shown(v), "open in the paper") for k, v in report.get("open", {}).items()]
    wide = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]]
    table = [f"  {name:{wide[0]}}  {value:{wide[1]}}  {who}" for name, value, who in rows]
    return [f"recipe of {report['paper']}:", *table] if rows else []


def sentence(report: Mapping[str, Any]) -> str:
    """The recipe and what deviates from it, for a model card; empty without one."""
    if not report:
        return ""
    changed = [f"{k} {_shown(v['value'])} ({_paper(v)})" for k, v in report["given"].items()]
    deviations = f"; deviations: {'; '.join(changed)}" if changed else ", without a deviation"
    return f"Trained by the recipe of {report['paper']}{deviations}. "


def _paper(entry: Mapping[str, Any]) -> str:
    """Place, grid and, where it differs, the paper's value, as text."""
    if not entry["place"]:
        return "not in the paper"
    if "grid" in entry:
        return f"{entry['place']}, of {_shown(entry['grid'])}"
    if "paper" in entry:
        return f"{entry['place']}: {_shown(entry['paper'])}"
    return str(entry["place"])


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
