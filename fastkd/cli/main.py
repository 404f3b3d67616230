"""The `fastkd` command.

The list of commands needs neither torch nor transformers, whose imports take seconds: a command
imports its options when it is called, and the rest when it runs.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

import fastkd
from fastkd._core.extras import MissingExtra, require
from fastkd.cli.display import new_console, say
from fastkd.cli.typer_commands import NoOptions, command
from fastkd.train.errors import InputError, Interrupted, RunFailed
from fastkd.train.launcher import first, launched

if TYPE_CHECKING:
    from fastkd.cli.command_settings import (
        AnalyzeSettings,
        CacheSettings,
        DemoSettings,
        EvaluateSettings,
        ExportSettings,
        PredictSettings,
        VerifySettings,
    )
    from fastkd.study.study_settings import StudySettings
    from fastkd.train.distill_settings import Settings

typer: Any = require("typer", "train")
require("typer.core", "train")

TRAINING = ("transformers", "accelerate", "safetensors", "sklearn", "scipy")
# Scores import what they need: most of the time of a short command goes into imports.
ANSWERING = ("transformers", "safetensors")
UsageError: Any = typer.BadParameter.__mro__[1]  # typer brings its own click, or click's


# How a command that was stopped goes on with what it has saved.
GOES_ON = {
    "distill": ", --resume continues the run",
    "study": ", the same command goes on",
    "demo": ", the same command goes on",
    "cache": ", the same command goes on",
}


class CommandGroup(typer.core.TyperGroup):  # type: ignore[misc]
    """Commands whose mistakes are one sentence on stderr."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command with its options; those that are listed have none, see `_command`."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and listed.callback(), rest

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        with errors_as_sentences():
            return super().make_context(info_name, args or ["--help"], *rest, **more)

    def invoke(self, ctx: Any) -> Any:
        with errors_as_sentences(lambda: GOES_ON.get(ctx.invoked_subcommand, "")):
            return super().invoke(ctx)


class UniqueOptionsCommand(typer.core.TyperCommand):  # type: ignore[misc]
    """Command that rejects an option given twice, instead of dropping one value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            twice = not option.multiple and given.count(option) > 1
            if twice and not ctx.resilient_parsing:  # as when a shell completes a word
                raise InputError(f"{option.opts[0]} is given twice")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="fastkd",
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastkd {fastkd.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Distil language models into smaller ones with the losses of six papers."""


@contextlib.contextmanager
def errors_as_sentences(goes_on: Callable[[], str] = str) -> Iterator[None]:
    """Context that prints an error as one sentence on stderr; exit code 2 for bad input, else 1.

    ``goes_on`` returns the end of the sentence for an interrupted command.
    """
    try:
        yield
    except UsageError as error:
        _fail(error.format_message(), 2)
    except InputError as error:
        _fail(str(error), 2)
    except Interrupted as error:
        _end(str(error), error.code)
    except (RunFailed, MissingExtra) as error:
        _fail(str(error), 1)
    except KeyboardInterrupt as error:
        message = f"Stopped; what was saved before is intact{goes_on()}"
        _end(message, getattr(error, "code", 130))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror or error}{where}; what was saved before is intact", 1)
    except Exception as error:
        if not launched() or isinstance(error, (typer.Exit, typer.Abort)):
            raise
        from fastkd.train import processes

        if processes.is_loss_of_others(error):
            _fail(f"another process of this run has ended{goes_on()}", 1)
        if not processes.first_to_fail():
            raise typer.Exit(1) from None
        raise


def _fail(message: str, code: int) -> None:
    """End with an error in a sentence."""
    _end(f"Error: {message}", code)


def _end(message: str, code: int) -> None:
    """End with a sentence on standard error, printed by one process."""
    if launched():
        from fastkd.train import processes

        if not processes.first_to_fail():
            raise typer.Exit(code)
    typer.echo(" ".join(message.split()), err=True)
    raise typer.Exit(code)


def _command(options: str, needs: Sequence[str] = TRAINING, *, alone: bool = False) -> Callable:
    """Register a command, ``function(settings, console)``; exit code 1 if it returns False.

    ``options`` names the dataclass of its options: "train.distill_settings.Settings". The packages
    in ``needs`` are imported before the command starts work. With ``alone`` only the first of
    several processes runs the command.
    """

    def decorate(function: Callable[[Any, Console], bool | None]) -> Callable[..., Any]:
        def run(settings: Any) -> None:
            if alone and not first():
                return
            for module in needs:
                require(module, "train")
            with new_console() as console:
                if function(settings, console) is False:
                    raise typer.Exit(1)

        def build() -> Any:
            module, _, cls = options.rpartition(".")
            settings = getattr(importlib.import_module(f"fastkd.{module}"), cls)
            single = typer.Typer(add_completion=False)
            single.command(name, help=function.__doc__, cls=UniqueOptionsCommand)(
                command(settings)(run)
            )
            return typer.main.get_command(single)

        name = function.__name__
        return app.command(name, help=function.__doc__)(build)

    return decorate


@_command("train.distill_settings.Settings")
def distill(settings: "Settings", console: Console) -> None:
    """Distil a teacher into a smaller student.

    For example, on a GLUE task from the hub:

        fastkd distill --teacher bert-base-uncased --finetune-teacher 3 --task sst2 --method fcd

    or on local files:

        fastkd distill --teacher ./teacher --train train.tsv --eval dev.tsv --method knn --set k=3
    """
    from fastkd.cli.distill_command import distill

    distill(settings, console)


@_command("cli.command_settings.EvaluateSettings", ANSWERING, alone=True)
def evaluate(settings: "EvaluateSettings", console: Console) -> None:
    """Score a model on labelled rows.

    For example:

        fastkd evaluate --model runs/distill/student --data dev.tsv
    """
    from fastkd.cli.evaluate_command import evaluate

    evaluate(settings, console)


@_command("cli.command_settings.PredictSettings", ANSWERING, alone=True)
def predict(settings: "PredictSettings", console: Console) -> None:
    """Label rows with a model: class and probability, or a number.

    For example:

        fastkd predict --model runs/distill/student --data new.txt --out labels.tsv
    """
    from fastkd.cli.predict_command import predict

    predict(settings, console)


@_command("cli.command_settings.ExportSettings", ANSWERING, alone=True)
def export(settings: "ExportSettings", console: Console) -> None:
    """Write a model as ONNX, and check that ONNX Runtime gives the same outputs."""
    from fastkd.cli.export_command import export

    export(settings, console)


@_command("cli.command_settings.CacheSettings")
def cache(settings: "CacheSettings", console: Console) -> None:
    """Keep what a fine-tuned teacher says of every training row, for runs without it.

    For example:

        fastkd cache --teacher ./teacher --train train.tsv --eval dev.tsv --out runs/cache

        fastkd distill --teacher-cache runs/cache --train train.tsv --eval dev.tsv
    """
    from fastkd.cli.cache_command import write

    write(settings, console)


@_command("cli.command_settings.VerifySettings", alone=True)
def verify(settings: "VerifySettings", console: Console) -> bool:
    """Take one step in every way that should be the same, and tell how far the gradients differ.

    Order, padding, packing, accumulation, processes, a cached teacher, compilation, resuming: on
    your teacher, student, method and rows, in float64, without dropout.
    """
    from fastkd.cli.verify_command import verify

    return verify(settings, console)


@_command("cli.command_settings.DemoSettings", (*TRAINING, "matplotlib"))
def demo(settings: "DemoSettings", console: Console) -> None:
    """Distil a real teacher with every method, offline, in a few minutes."""
    from fastkd.cli import demo, demo_text

    (demo_text if settings.task == demo_text.TASK else demo).run_demo(settings, console)


@_command("cli.typer_commands.NoOptions", ())
def doctor(settings: NoOptions, console: Console) -> bool:
    """Say what is installed, which backends run and why not, and check them."""
    from fastkd.cli.doctor import examine

    return examine(functools.partial(say, console))


@_command("study.study_settings.StudySettings", (*TRAINING, "matplotlib"))
def study(settings: "StudySettings", console: Console) -> None:
    """Compare methods with one budget over several seeds, and say what exceeds noise.

    For example, from a file, or from options; the same command goes on after a stop:

        fastkd study SPEC.toml --out runs/study --jobs 4

        fastkd study --methods labels,fcd --set fcd.alpha=0.1,1 --tasks docs=docstrings
    """
    from fastkd.cli.study_command import run

    run(settings, console)


@_command("cli.command_settings.AnalyzeSettings", ("transformers", "matplotlib"))
def analyze(settings: "AnalyzeSettings", console: Console) -> None:
    """How alike the layers of a model are, or of teacher and student, as numbers and pictures.

    For example:

        fastkd analyze --model bert-base-uncased --task rte --measures svcca,pwcca

        fastkd analyze --model ./teacher --student runs/distill/student --data dev.tsv
    """
    from fastkd.cli.analyze_command import run

    run(settings, console)
