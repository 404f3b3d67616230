"""The papers' training recipes: what `--preset paper` sets besides a method's hyper-parameters.

``papers/NAME.toml`` holds a paper's options by their keys in a file, each with its value, its place
in the paper and, where one was searched, the grid. ``[student]`` has the options that make a
student, set together or not at all; ``[teacher]`` those of a fine-tuning of the teacher;
``[tasks.NAME]`` those of a GLUE task; ``[single_text]`` those of rows with one text. ``[loss]`` has
places and grids of hyper-parameters, whose values are those of ``method_by_name(...,
preset="paper")``. The paper is silent about the options in ``open``.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastkd.train.options import as_json, file_keys, options_of, read_options_file

PAPERS = Path(__file__).with_name("papers")
RECIPES = ("fcd", "knn", "lrc_bert", "mc3kd", "lrkd")
# Options of other rows or weights than a paper's.
CHANGES = ("labelled", "max_train_rows", "unlabelled", "lora", "teacher_lora", "on_policy")
# Options that make a student. With one of them, a recipe's student is left out.
MAKES = ("student", "student_layers", "teacher_layers", "student_config", "student_weights")


def recipe_of(config: Any) -> Mapping[str, Any]:
    """The recipe of --preset paper: that of --recipe or of the method; empty without one."""
    name = config.recipe or config.method
    known = config.preset == "paper" and name in RECIPES
    return read_options_file(PAPERS / f"{name}.toml") if known else {}


def entries_of(config: Any, given: Iterable[str] = ()) -> dict[str, Mapping[str, Any]]:
    """What the recipe sets in ``config``, by field, unless an option excludes it.

    ``given``: fields that the user set.
    """
    recipe, given = recipe_of(config), frozenset(given)
    if not recipe:
        return {}
    tables, pairs = [recipe["training"]], config.text_pair_column
    if config.glue is not None:
        tables.append(recipe.get("tasks", {}).get(config.glue.name, {}))
        pairs = config.glue.hub.pair
    if pairs is None:
        tables.append(recipe.get("single_text", {}))
    if config.teacher_cache is None and given.isdisjoint(MAKES):
        tables.append(recipe["student"])
    if config.finetune_teacher:
        tables.append(recipe.get("teacher", {}))
    keys = file_keys(type(config))
    found = {keys[key]: entry for table in tables for key, entry in table.items()}
    if "warmup_epochs" in recipe:
        warmup, epochs = recipe["warmup_epochs"], found["num_train_epochs"]["value"]
        if "num_train_epochs" in given:
            epochs = config.num_train_epochs
        place = f"{warmup['place']}, {warmup['value']} of {epochs:g} epochs"
        found["warmup"] = {"value": min(1.0, warmup["value"] / epochs), "place": place}
    return found


def compared(config: Any, method: Any) -> dict[str, Any]:
    """The recipe of a run with this ``method`` beside its options; empty without a recipe.

    "paper": its title. "set": what the run has as the paper prints it, each with ``value``,
    ``place`` and, where one was searched, ``grid``. "given": where the run deviates. "open": values
    of options of which the paper is silent.
    """
    recipe = recipe_of(config)
    if not recipe:
        return {}
    options, values = options_of(type(config)), as_json(config)
    found: dict[str, Any] = {"paper": recipe["title"], "set": {}, "given": {}, "open": {}}
    entries = entries_of(config, ["num_train_epochs"])
    if config.training_steps is not None:
        epochs, place = entries.pop("num_train_epochs", None), ""
        if epochs:
            place = f"{epochs['place']}, instead of {epochs['value']:g} epochs"
        entries["training_steps"] = {"place": place}
    makes: tuple[str, ...] = MAKES  # which make another student than the paper's
    # A stage has the student of the stage before.
    places = [*Path(config.student or "").parents][1:2]
    if config.follows is not None and places == [config.out.parent]:
        entries = {name: entry for name, entry in entries.items() if name not in MAKES}
        makes = ()
    for name in (*makes, *CHANGES):
        if name not in entries and values[options[name].key] != options[name].default:
            entries[name] = {}
    for name, entry in entries.items():
        key = options[name].key
        kind = "set" if values[key] == entry.get("value") else "given"
        found[kind][key] = _entry(values[key], entry)
    if config.recipe in (None, config.method):
        hyperparameters = method.hyperparameters()
        for name, entry in recipe["loss"].items():
            kind = "given" if name in config.options else "set"
            found[kind][name] = _entry(hyperparameters[name], entry)
    found["open"] = {name: values[name] for name in recipe["open"]}
    return found


def _entry(value: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {"value": value, "place": entry.get("place", "")}
    if entry.get("grid"):
        found["grid"] = list(entry["grid"])
    if entry.get("value") not in (None, value):
        found["paper"] = entry["value"]
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
    warmup = {**report.get("set", {}), **report.get("given", {})}.get("warmup", {"value": 0})
    if warmup["value"] >= 1:
        table.append(
            "warning: the learning rate only warms up, to the last step; give more --epochs, or "
            "--warmup 0.1"
        )
    return [f"recipe of {report['paper']}:", *table] if rows else []


def sentence(report: Mapping[str, Any]) -> str:
    """The recipe and what deviates from it, for a model card."""
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
