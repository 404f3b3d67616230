"""`fastkd augment`: TinyBERT's augmentation of a file, which a stopped command continues."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForMaskedLM

from fastkd.cli.command_settings import AugmentSettings
from fastkd.cli.display import RichDisplay
from fastkd.train import tasks
from fastkd.train.arrow_rows import fingerprint_of
from fastkd.train.augmentation import Augmenter
from fastkd.train.data import file_columns, read_file
from fastkd.train.errors import InputError
from fastkd.train.files import first_row, settle_columns
from fastkd.train.glue import GLUE_TASKS
from fastkd.train.models import load, tokenizer_of
from fastkd.train.options import as_json
from fastkd.train.processes import choose_device
from fastkd.train.saving import check_new_file, tsv_line
from fastkd.train.tasks.classification import Classification

ORIGIN = ("row", "augmented")  # columns of the source row, and 1 for a copy


def run(settings: AugmentSettings, display: RichDisplay) -> None:
    """Write each row, followed by its copies; rows that a stopped command wrote are kept."""
    check_new_file(settings.out, settings.overwrite)
    glue = GLUE_TASKS.get(settings.task or "")
    kind = tasks.named(settings.task)
    if not issubclass(kind, Classification) and kind.name() != "regression":
        raise InputError(f"--task {settings.task}: rows of one or two texts with a label only")
    columns = file_columns(settings.columns, glue, settings.data, kind)
    rows = read_file(settings.data, columns, "--data", task=kind)
    if glue is not None:
        columns = glue.hub
    elif columns.text is None:
        columns = settle_columns(columns, dict.fromkeys(first_row(settings.data)), "--data")
    given = {"text": columns.text or "text", "pair": columns.pair, "label": columns.label}
    stored = rows.data.column_names
    names = {key: name for key, name in given.items() if name is not None and key in stored}
    remote = settings.trust_remote_code
    tokenizer = tokenizer_of("--mlm", settings.mlm, remote)
    if not tokenizer.is_fast or tokenizer.mask_token_id is None:
        raise InputError(f"--mlm {settings.mlm}: needs a fast tokenizer with a mask token")
    model = load("--mlm", settings.mlm, AutoModelForMaskedLM, remote)
    model.to(choose_device(settings.device_name, "fp32"))
    augmenter = Augmenter(
        model, tokenizer, settings.probability, settings.candidates, settings.batch_size
    )
    part = settings.out.with_name(settings.out.name + ".part")
    state = {**as_json(settings), "rows": fingerprint_of(settings.data)}
    done = _resume(part, state, [*names.values(), *ORIGIN])
    records = rows.data.to_list()
    with display, part.open("a", encoding="utf-8") as file:
        track = display.track("rows", done, len(records))
        for i in range(done, len(records)):
            lines = _lines(records[i], [*names], augmenter, settings, i)
            file.write("".join(lines))
            file.flush()
            track.advance(i + 1)
        track.stop()
    os.replace(part, settings.out)
    part.with_name(f"{part.name}.json").unlink(missing_ok=True)
    total = len(records) * (1 + settings.times)
    display.say(f"{len(records)} rows, {total} with their copies: {settings.out}")


def _lines(
    record: dict[str, Any], keys: list[str], augmenter: Augmenter, settings: AugmentSettings, i: int
) -> Iterator[str]:
    """The lines of a row and its copies; the seed of a row is its own."""
    rng = random.Random(f"{settings.seed} {i}")
    copies = {
        key: [record[key], *augmenter.copies(record[key], settings.times, rng)]
        for key in keys
        if key != "label"
    }
    for number in range(1 + settings.times):
        cells = [copies[key][number] if key in copies else record[key] for key in keys]
        cells += [record["number"], int(number > 0)]
        yield tsv_line(cells)


def _resume(part: Path, state: dict[str, Any], header: list[str]) -> int:
    """Number of source rows that ``part`` has whole; without it a new one is begun."""
    times = 1 + state["times"]
    before = part.with_name(f"{part.name}.json")
    if part.exists() and before.exists() and json.loads(before.read_text()) == state:
        lines = part.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        rows = (len(whole) - 1) // times
        if rows >= 0:
            part.write_text("".join(whole[: 1 + rows * times]), encoding="utf-8")
            return rows
    part.parent.mkdir(parents=True, exist_ok=True)
    before.write_text(json.dumps(state))
    part.write_text("\t".join(header) + "\n", encoding="utf-8")
    return 0
