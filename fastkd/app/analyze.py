"""What `fastkd analyze` does: a model's layer similarities as numbers and pictures."""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModel, AutoTokenizer

from fastkd.analysis.layers import check_layers, rccc, stream
from fastkd.analysis.measures import matrix, moments_for
from fastkd.analysis.pictures import plot_layer_similarity
from fastkd.app.data import read_hub
from fastkd.app.errors import InputError
from fastkd.app.models import be_quiet, check_length, load
from fastkd.app.plan import choose_device
from fastkd.app.saving import locked, write_json
from fastkd.app.settings import AnalyzeSettings
from fastkd.app.tasks import GLUE, TASKS


def run(settings: AnalyzeSettings, console: Console) -> None:
    """Run `fastkd analyze`."""
    be_quiet()
    device = choose_device(settings.device, "fp32")
    with locked(settings.out):
        if settings.text is not None:
            texts, pairs = read_lines(settings.text), None
        else:
            texts, pairs = read_task(str(settings.task))
        model, tokenizer = load_model(settings.model, device, settings.trust_remote_code)
        check_length(settings.max_length, tokenizer, model, "model")
        if getattr(model.config, "num_hidden_layers", 1) < 1:
            raise InputError(f"--model {settings.model}: it has no layers to compare")
        rows = slice(settings.rows)
        second = None if pairs is None else pairs[rows]
        batches = batches_of(
            tokenizer, texts[rows], second, settings.batch_size, settings.max_length
        )
        report = analyze(model, batches, settings.out, settings.model, settings.variance)
    console.print(table(report), highlight=False)
    console.print(f"{settings.out}/layers.json, svcca.png, cka.png", highlight=False)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that hold anything."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise InputError(f"--text {path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {path}: can't be read as UTF-8 text ({error})") from error
    lines = [line for line in lines if line]
    if not lines:
        raise InputError(f"--text {path}: the file holds no text")
    return lines


def read_task(name: str) -> tuple[list[str], list[str] | None]:
    """Texts (and second texts) of a GLUE task's validation split from the hub."""
    task = TASKS[name]
    rows, _ = read_hub(GLUE, name, task.eval_splits[0], task.hub, "--task")
    return rows.texts, rows.pairs


def load_model(name: str, device: torch.device, remote_code: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer from a path or hub name."""
    tokenizer = load("--model", name, AutoTokenizer, remote_code)
    model = load("--model", name, AutoModel, remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device), tokenizer


def batches_of(
    tokenizer: Any,
    texts: list[str],
    pairs: list[str] | None = None,
    batch_size: int = 32,
    max_length: int = 128,
) -> Iterator[dict[str, torch.Tensor]]:
    """Padded batches; texts of like length together, which changes no result."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        second = [pairs[i] for i in chosen] if pairs is not None else None
        yield tokenizer(
            [texts[i] for i in chosen],
            second,
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )


def analyze(
    model: torch.nn.Module,
    batches: Iterator[dict[str, torch.Tensor]],
    out: str | PathLike,
    name: str = "",
    variance: float = 0.99,
) -> dict[str, Any]:
    """SVCCA and CKA of all layers from one pass, as ``layers.json`` and two pictures in ``out``."""
    moments, counts = stream([model], batches, moments_for(["svcca"], variance))
    check_layers(moments, counts)
    layers = range(counts[0])
    svcca, cka = (matrix(moments, name, layers, layers, variance) for name in ("svcca", "cka"))
    report = {
        "model": name,
        "tokens": moments.count,
        "variance": variance,
        "rccc": rccc(svcca),
        "adjacent_cca": svcca.diagonal(1).tolist(),
        "svcca": svcca.tolist(),
        "cka": cka.tolist(),
    }
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "layers.json", report)
    plot_layer_similarity(svcca, folder / "svcca.png", title=f"SVCCA {name}".strip())
    plot_layer_similarity(cka, folder / "cka.png", title=f"CKA {name}".strip())
    return report


def table(report: dict[str, Any]) -> str:
    """Correlation of every layer with the one before it, and the RCCC."""
    lines = [f"{report['tokens']} tokens", "layer  correlation with the layer before"]
    lines += [f"{i:5}  {value:.4f}" for i, value in enumerate(report["adjacent_cca"], start=1)]
    return "\n".join([*lines, f"RCCC (embeddings and last layer): {report['rccc']:.4f}"])
