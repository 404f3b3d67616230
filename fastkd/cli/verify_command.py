"""`fastkd verify`: one step of the user's distillation, computed in every equivalent way."""

import dataclasses
from typing import Any

from rich.console import Console

from fastkd.cli.cache_command import begin
from fastkd.cli.display import RichDisplay
from fastkd.distill import verify as checks
from fastkd.train.config import Config
from fastkd.train.errors import RunFailed
from fastkd.train.progress import counted


def verify(config: Config, console: Console) -> bool:
    """Run `fastkd verify`; returns whether all equivalent ways agree.

    Raises:
        InputError: an option cannot be used.
    """
    with RichDisplay(console) as display:
        # No row is evaluated, but a corpus has some.
        evals = config.evals or config.train
        few: dict[str, Any] = {"max_train_rows": config.rows, "batch_size": config.rows}
        run, models = begin(dataclasses.replace(config, **few, evals=evals), display)
        device, distiller = run.computation.device, models.distiller.to(run.computation.device)
        train = run.sets.train
        inputs = next(train.batches(run.sets.collate, len(train), device=device))
        display.say(f"{len(train)} rows, device {device}, float64, without dropout")
        try:
            distiller.prepare([inputs])
            number, each = checks.begin(distiller, inputs, ranks=config.ranks)
            found = list(counted(each, display, "checks", number))
        except (RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()
            raise RunFailed(f"the step can't be checked: {reason[-1]}") from error
        display.say(checks.table(found))
    return all(check.ok for check in found)
