"""`fastkd analyze`: similarity of layers within a model, or between teacher and student.

Files in --out: layers.json, all results; layers.csv, the similarities as rows; a picture per
measure; relations.png, each model's relations between the tokens of one sentence.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModel

from fastkd.analysis.layer_comparison import (
    IntraClassSums,
    Pool,
    check_layers,
    gathered,
    rccc,
    stream,
)
from fastkd.analysis.pictures import plot_layer_panels, plot_sentence, relation_agreement
from fastkd.analysis.similarity_measures import Measure, matrix, moments_for
from fastkd.cli.command_settings import AnalyzeSettings
from fastkd.cli.display import RichDisplay
from fastkd.distributed import world_size
from fastkd.models.backbone import Backbone
from fastkd.models.batch import all_layers, batch_of
from fastkd.models.student import student_from_teacher
from fastkd.train import processes, tasks
from fastkd.train.data import read_file, read_hub
from fastkd.train.errors import InputError
from fastkd.train.files import text_lines
from fastkd.train.glue import GLUE_TASKS, HUB
from fastkd.train.models import check_same_tokens, load, longest, tokenizer_of
from fastkd.train.processes import choose_device
from fastkd.train.progress import counted
from fastkd.train.saving import (
    MANIFEST,
    csv_text,
    locked,
    read_json,
    saving,
    write_file,
    write_json,
)
from fastkd.train.tasks.classification import Classification, row_classes
from fastkd.train.trained_model import columns_of, read_training_record

TITLES = {"svcca": "SVCCA", "pwcca": "PWCCA", "cca": "CCA", "cka": "CKA"}
MODEL_NAMES = {"model": "model", "before": "student before", "student": "student"}


def run(settings: AnalyzeSettings, display: RichDisplay) -> None:
    """Run `fastkd analyze`; several processes share the rows."""
    with contextlib.ExitStack() as stack:
        processes.join(settings.device_name)
        processes.on_first_process(lambda: stack.enter_context(locked(settings.out)))
        with processes.errors_on_all():
            device = choose_device(settings.device_name, "fp32")
            texts, *more = read(settings)
            models, tokenizer = load_models(settings, device)
            length = min(
                longest(tokenizer, cast(Any, found), settings.max_length, MODEL_NAMES[name])
                for name, found in models.items()
            )
        kept = slice(settings.rows)
        pairs, labels = (None if x is None else x[kept] for x in more)
        batches = batches_of(tokenizer, texts[kept], pairs, settings.batch_size, length, labels)
        stack.enter_context(display)
        if length < settings.max_length:
            display.say(f"--max-length {length}: the models read no more tokens")
        starts = range(0, len(texts[kept]), settings.batch_size)
        number = len(starts[processes.rank() :: world_size()])
        batches = counted(batches, display, f"{len(texts[kept])} rows", number)
        report = analyze(settings, models, batches)
        if processes.rank() == 0:
            sentence = settings.sentence or texts[0]
            with saving(settings.out):
                write(settings.out, report, list(models))
                draw_sentence(settings.out, report, models, tokenizer, sentence, length)
            display.say(table(report))
            pictures = ", ".join(f"{name}.png" for name in ("relations", *report["measures"]))
            display.say(f"{settings.out}/layers.json, layers.csv, {pictures}")


def read(settings: AnalyzeSettings) -> tuple[list[str], Any, Any]:
    """Texts, second texts or None, class ids or None."""
    if settings.text is not None:
        lines = (line.strip() for _, line in text_lines(settings.text, "--text"))
        return [*filter(None, lines)], None, None
    glue = GLUE_TASKS.get(settings.task or "")
    kind = tasks.of_file(settings.task, settings.data)
    if settings.data is not None:
        names = [name for name in (settings.student, settings.model) if name is not None]
        trained = {name: read_training_record(Path(name).expanduser()) for name in names}
        name = next((name for name in names if trained[name]), settings.model)
        options = (settings.columns, settings.task)
        columns = columns_of(*options, settings.data, True, name, trained[name], kind)
        rows = read_file(settings.data, columns, "--data", task=kind)
        classes = row_classes(rows) if issubclass(kind, Classification) else None
    else:
        assert glue is not None
        rows = read_hub(HUB, str(settings.task), glue.eval_splits[0], glue.hub, "--task")
        classes = row_classes(rows, glue)
    return *kind.texts(rows), classes


def load_models(
    settings: AnalyzeSettings, device: torch.device
) -> tuple[dict[str, torch.nn.Module], Any]:
    """Models by their names in the report, and the tokenizer of all."""
    remote = settings.trust_remote_code
    tokenizer = tokenizer_of("--model", settings.model, remote)
    model = load("--model", settings.model, AutoModel, remote).to(device)
    models = {"model": model}
    if settings.student is not None:
        for name, path in (("before", settings.before), ("student", settings.student)):
            if path is not None:
                models[name] = load(f"--{name}", path, AutoModel, remote).to(device)
                check_same_tokens(f"--{name}", path, tokenizer, remote)
            elif (began := _began(settings.student)) is not None:
                try:
                    models[name] = student_from_teacher(model, began[0], config=began[1])
                except (TypeError, ValueError) as error:
                    raise InputError(f"--student was made of another --model: {error}") from error
    named = {"model": settings.model, "student": settings.student, "before": settings.before}
    for name, found in models.items():
        if getattr(found.config, "num_hidden_layers", 1) < 1:
            raise InputError(f"--{name} {named[name]}: it has no layers to compare")
        if found.config.vocab_size != model.config.vocab_size:
            raise InputError(
                f"--{name} {named[name]}: its vocabulary has "
                f"{found.config.vocab_size} tokens, the model's {model.config.vocab_size}; both "
                "must read the same tokens"
            )
    return models, tokenizer


def _began(student: str) -> tuple[list[int], dict[str, int]] | None:
    """Teacher layers that `fastkd distill` made the student of, and its changed sizes."""
    about = read_json(Path(student).expanduser() / MANIFEST)
    layers = about.get("teacher_layers")
    return layers and (layers, about.get("settings", {}).get("student_config", {}))


def batches_of(
    tokenizer: Any,
    texts: list[str],
    pairs: list[str] | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    labels: list[int] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """This process's padded batches; texts of similar length share a batch."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    starts = range(0, len(order), batch_size)
    for start in starts[processes.rank() :: world_size()]:
        chosen = order[start : start + batch_size]
        second = [pairs[i] for i in chosen] if pairs is not None else None
        batch = tokenizer(
            [texts[i] for i in chosen],
            second,
            truncation=True,
            max_length=max_length,
            padding=True,
            padding_side=type(tokenizer).padding_side,  # its files may set another
            return_tensors="pt",
        )
        if labels is not None:
            batch["labels"] = torch.tensor([labels[i] for i in chosen])
        yield batch


def analyze(
    settings: AnalyzeSettings,
    models: dict[str, torch.nn.Module],
    batches: Iterator[dict[str, Tensor]],
) -> dict[str, Any]:
    """All similarities from one pass: the content of layers.json without the sentence."""
    measures = cast(list[Measure], list(dict.fromkeys(settings.measures.split(","))))
    wanted = list(dict.fromkeys(["svcca", *measures]))  # RCCC and C_T(l) need SVCCA
    classes = [IntraClassSums(cast(Pool, settings.pool)) for _ in models]
    moments = moments_for(wanted, settings.variance)
    with processes.errors_on_all(), _about(settings):
        moments, counts = stream(list(models.values()), batches, moments, classes)
    moments, counts = gathered(moments, counts, classes)
    with _about(settings):
        check_layers(moments, counts, wanted, [MODEL_NAMES[name] for name in models])
    ends = torch.tensor(counts).cumsum(0).tolist()
    layers = {
        name: range(end - count, end) for name, end, count in zip(models, ends, counts, strict=True)
    }

    def found(rows: str, columns: str) -> dict[str, list[list[float]]]:
        parts = (layers[rows], layers[columns])
        return {m: matrix(moments, m, *parts, settings.variance).tolist() for m in wanted}

    def about(name: str, seen: IntraClassSums) -> dict[str, Any]:
        own = found(name, name)
        svcca = torch.tensor(own["svcca"], dtype=torch.float64)
        return {
            "rccc": rccc(svcca),
            "adjacent_cca": svcca.diagonal(1).tolist(),
            **({"intra_class_similarity": seen.value().tolist()} if seen.counts else {}),
            **{m: own[m] for m in measures},
        }

    report = {
        "model": settings.model,
        "tokens": moments.count,
        "measures": measures,
        "variance": settings.variance,
    }
    for name, seen in zip(models, classes, strict=True):
        if name == "model":
            report |= about(name, seen)
            continue
        across = found("model", name)
        report[name] = {
            "name": {"student": settings.student, "before": settings.before}[name]
            or f"layers of {settings.model}",
            **about(name, seen),
            "to_model": {m: across[m] for m in measures},
        }
    return report


@contextlib.contextmanager
def _about(settings: AnalyzeSettings) -> Iterator[None]:
    """Context in which an error about the models' outputs is one sentence."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"--model {settings.model}: {error}") from error


def write(out: Path, report: dict[str, Any], names: Sequence[str]) -> None:
    """Write layers.csv and the pictures of the similarities."""
    heads = ("measure", "model", "layer", "other_model", "other_layer", "value")
    rows: list[tuple] = []
    for measure in report["measures"]:
        # (rows' model, columns' model, matrix): each model alone, then against the first.
        alone = {name: report if name == "model" else report[name] for name in names}
        panels = [(name, name, found[measure]) for name, found in alone.items()]
        students = (name for name in names if name != "model")
        panels += [("model", name, report[name]["to_model"][measure]) for name in students]
        for a, b, values in panels:
            for i, row in enumerate(values):
                rows += ((measure, a, i, b, j, value) for j, value in enumerate(row))
        _draw(out / f"{measure}.png", measure, panels)
    write_file(out / "layers.csv", csv_text(dict(zip(heads, row, strict=True)) for row in rows))


def _draw(path: Path, measure: str, panels: list) -> None:
    title = TITLES.get(measure, "unbiased CKA")
    # Each model alone, and comparisons with the first model, in a second row if several.
    rows: tuple[list, list] = [], []
    for a, b, values in panels:
        heading = MODEL_NAMES[a] if a == b else f"{MODEL_NAMES[b]} against the {MODEL_NAMES[a]}"
        names = (f"layer of the {MODEL_NAMES[a]}", f"layer of the {MODEL_NAMES[b]}")
        rows[a != b].append((heading, names, torch.tensor(values)))
    one = len(rows[1]) < 2
    plot_layer_panels([rows[0] + rows[1]] if one else rows, path, title=title)


def draw_sentence(
    out: Path,
    report: dict[str, Any],
    models: dict[str, torch.nn.Module],
    tokenizer: Any,
    sentence: str,
    max_length: int,
) -> None:
    """Write relations.png and each student's agreement with the model's relations."""
    batch = tokenizer(sentence, truncation=True, max_length=max_length, return_tensors="pt")
    features = {}
    for name, model in models.items():
        backbone = Backbone(model.eval())
        with torch.no_grad():
            outputs = all_layers(backbone, batch_of(backbone, backbone.readable(batch), name))
        features[name] = outputs.hidden[backbone.num_layers][0]
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    report["sentence"] = {"text": sentence, "tokens": tokens}
    for name, x in features.items():
        if name != "model":
            agreement = relation_agreement(x, features["model"])
            known = len(tokens) > 1  # JSON has no NaN
            report[name]["relations"] = {k: rho if known else None for k, rho in agreement.items()}
    shown = {MODEL_NAMES[name]: x for name, x in features.items()}
    plot_sentence(shown, tokens, out / "relations.png")
    write_json(out / "layers.json", report)


def table(report: dict[str, Any]) -> str:
    """Text of the results: adjacent correlations, RCCC, and students against the model."""
    lines = [f"{report['tokens']} tokens", "layer  correlation with the layer before"]
    lines += [f"{i:5}  {value:.4f}" for i, value in enumerate(report["adjacent_cca"], start=1)]
    lines.append(f"RCCC (embeddings and last layer): {report['rccc']:.4f}")
    students = {name: report[name] for name in ("before", "student") if name in report}
    rows = {"RCCC": [report["rccc"], *(x["rccc"] for x in students.values())]}
    if "intra_class_similarity" in report:
        last = [x["intra_class_similarity"][-1] for x in (report, *students.values())]
        rows["intra-class similarity, last layer"] = last
        if not students:
            lines.append(f"intra-class similarity, last layer: {last[0]:.4f}")
    if not students:
        return "\n".join(lines)
    for measure in report["measures"]:
        last = [x["to_model"][measure][-1][-1] for x in students.values()]
        rows[f"{measure} with the model, last layers"] = [None, *last]
    for kind in next(iter(students.values()))["relations"]:
        agreement = [x["relations"][kind] for x in students.values()]
        rows[f"ρ of the sentence's relations, {kind}"] = [None, *agreement]
    width = max(map(len, rows))
    heads = (MODEL_NAMES[name] for name in ("model", *students))
    lines += ["", " " * width + "".join(f"{head:>16}" for head in heads)]
    for name, values in rows.items():
        cells = ("" if value is None else f"{value:.4f}" for value in values)
        lines.append(f"{name:{width}}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)
