"""The `fastkd` command. Each command imports what it needs when it runs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastkd._extras import MissingExtra, require
from fastkd.app.display import new_console
from fastkd.app.errors import InputError, Interrupted, RunFailed
from fastkd.app.options import command
from fastkd.app.settings import Settings

typer: Any = require("typer", "train")
require("typer.core", "train")

UsageError: Any = typer.BadParameter.__mro__[1]  # typer brings its own click, or click's


class Sentences(typer.core.TyperGroup):  # type: ignore[misc]
    """Commands whose mistakes are one sentence on stderr."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        with one_sentence():
            return super().make_context(info_name, args or ["--help"], *rest, **more)

    def invoke(self, ctx: Any) -> Any:
        with one_sentence():
            return super().invoke(ctx)


app = typer.Typer(
    name="fastkd",
    cls=Sentences,
    help="Distil language models into smaller ones with the losses of five papers.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
Option = typer.Option


def main() -> None:
    """Entry point of the console script."""
    app()


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Errors of use as one sentence on stderr: exit code 2 for bad input, 1 for the machine's."""
    try:
        yield
    except UsageError as error:
        _fail(error.format_message(), 2)
    except InputError as error:
        _fail(str(error), 2)
    except Interrupted as error:
        _fail(str(error), error.code)
    except (RunFailed, MissingExtra) as error:
        _fail(str(error), 1)
    except KeyboardInterrupt as error:
        message = "stopped; what was saved before is intact, --resume continues a run"
        _fail(message, getattr(error, "code", 130))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror or error}{where}; what was saved before is intact", 1)


def _fail(message: str, code: int) -> None:
    typer.echo(f"Error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def _require_training() -> None:
    """Say what is missing before an hour of training has passed."""
    for module in ("transformers", "accelerate", "safetensors", "sklearn", "scipy"):
        require(module, "train")


@app.command()
@command(Settings)
def distill(settings: Settings) -> None:
    """Distil a teacher into a smaller student.

    For example, on a GLUE task from the hub:

        fastkd distill --teacher bert-base-uncased --finetune-teacher 3 --task sst2 --method fcd

    or on local files:

        fastkd distill --teacher ./teacher --train train.tsv --eval dev.tsv --method knn --set k=3
    """
    _require_training()
    from fastkd.app import run

    console = new_console()
    run.show(run.distill(settings, console), settings.out, console)


@app.command()
def demo(
    out: Annotated[Path, Option(help="Directory for the table and the pictures.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int | None, Option(help="Training steps of every student.")] = None,
    seed: Annotated[int, Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    fast: Annotated[bool, Option("--fast", help="A few steps on a few rows, as a check.")] = False,
) -> None:
    """Distil a real teacher with every method, offline, in a few minutes."""
    _require_training()
    require("matplotlib", "train")
    from fastkd.app.demo import run_demo

    run_demo(out, new_console(), steps=steps, seed=seed, device=device, fast=fast)


@app.command()
def doctor() -> None:
    """Say what is installed, which backends run and why not, and check them."""
    from fastkd.app.doctor import examine

    if not examine(new_console()):
        raise typer.Exit(1)


@app.command()
def bench(
    set: Annotated[str, Option(help="Size sets, separated by commas; by device if empty.")] = "",
    only: Annotated[str, Option(help="Losses, separated by commas; all if empty.")] = "",
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, Option(help="Result file, or a directory for <machine>.json.")] = Path(
        "runs/bench"
    ),
    plot: Annotated[Path | None, Option(help="Directory for pictures.")] = None,
    seconds: Annotated[float, Option(help="Timing budget of one case.")] = 1.5,
    passes: Annotated[
        int | None, Option(help="How often every case is timed; by device if not given.", min=1)
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run.")] = False,
) -> None:
    """Time every loss here: reference, torch.compile, fastkd's backends and peers."""
    from fastkd.bench import runner

    if plot is not None:
        require("matplotlib", "train")
    try:
        runner.run(
            runner.split(set),
            runner.split(only),
            None if device == "auto" else device,
            out,
            plot,
            resume=resume,
            seconds=seconds,
            passes=passes,
        )
    except runner.WrongChoice as error:
        raise InputError(str(error)) from error
    except runner.PassFailed as error:
        _fail(str(error), 1)


@app.command()
def analyze(
    model: Annotated[str, Option(help="Model: a directory or a hub name.")],
    text: Annotated[Path | None, Option(help="Text file, one text a line.")] = None,
    task: Annotated[str | None, Option(help="GLUE task, its validation split.")] = None,
    out: Annotated[Path, Option(help="Directory for the numbers and pictures.")] = Path(
        "runs/analyze"
    ),
    rows: Annotated[int | None, Option(help="Use only the first rows.", min=1)] = None,
    batch_size: Annotated[int, Option(help="Texts in a batch.", min=1)] = 32,
    max_length: Annotated[int, Option(help="Tokens of a text.", min=1)] = 128,
    variance: Annotated[float, Option(help="Share of the variance SVCCA keeps.")] = 0.99,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """How alike a model's layers are: SVCCA and CKA as numbers and pictures."""
    require("transformers", "train")
    require("matplotlib", "train")
    from fastkd.app import analyze as report
    from fastkd.app.plan import choose_device

    if (text is None) == (task is None):
        raise InputError("give either --text FILE or --task NAME")
    if not 0 < variance <= 1:
        raise InputError(f"--variance must be above 0 and at most 1, got {variance}")
    texts, pairs = (report.read_lines(text), None) if text else report.read_task(str(task))
    loaded, tokenizer = report.load_model(model, choose_device(device, "fp32"))
    second = None if pairs is None else pairs[:rows]
    batches = report.batches_of(tokenizer, texts[:rows], second, batch_size, max_length)
    console = new_console()
    result = report.analyze(loaded, batches, out, model, variance)
    console.print(report.table(result), highlight=False)
    console.print(f"{out}/layers.json, svcca.png, cka.png", highlight=False)


if __name__ == "__main__":
    main()
