"""The `fastkd` command.

The list of commands needs neither torch nor transformers, whose imports take seconds: a command
imports its options when it is called, and the rest when it runs.
"""

import contextlib
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import fastkd
from fastkd._core.extras import MissingExtra, require
from fastkd.cli.display import new_console
from fastkd.train.early_checks import check_inputs
from fastkd.train.errors import InputError, Interrupted, RunFailed
from fastkd.train.launcher import check_launcher, first, launched, leave_launcher
from fastkd.train.options import Option, assignments, options_of
from fastkd.train.signals import stopping_at_once

typer: Any = require("typer", "train")
require("typer.core", "train")

TRAINING = ("transformers", "accelerate", "safetensors", "sklearn", "scipy")
# Scores import what they need: most of the time of a short command goes into imports.
ANSWERING = ("transformers", "safetensors")
UsageError: Any = typer.BadParameter.__mro__[1]  # typer brings its own click, or click's


class Command(NamedTuple):
    """A command: its help, the dataclass of its options, and its function.

    ``function(settings, console)`` may return False for exit code 1. The packages in ``needs`` are
    imported before it starts work. Only the first of several processes runs it if ``alone``.
    ``after_stop`` ends the sentence for an interrupted command. ``early(settings)`` runs before the
    packages are imported; a text that it returns is all that the command prints.
    """

    help: str
    options: str
    function: str
    needs: Sequence[str] = TRAINING
    alone: bool = False
    after_stop: str = ""
    early: str = ""


AGAIN = ", the same command goes on"
COMMANDS = {
    "distill": Command(
        """Distil a teacher into a smaller student.

    For example, on a GLUE task from the hub:

        fastkd distill --teacher bert-base-uncased --finetune-teacher 3 --task sst2 --method fcd

    or on local files:

        fastkd distill --teacher ./teacher --train train.tsv --eval dev.tsv --method knn --set k=3
    """,
        "train.settings.DistillOptions",
        "cli.distill_command.run",
        after_stop=", --resume continues the run",
    ),
    "evaluate": Command(
        """Score a model on labelled rows.

    For example:

        fastkd evaluate --model runs/distill/student --data dev.tsv
    """,
        "cli.command_settings.EvaluateSettings",
        "cli.evaluate_command.evaluate",
        ANSWERING,
        alone=True,
    ),
    "predict": Command(
        """Label rows with a model: class and probability, or a number.

    For example:

        fastkd predict --model runs/distill/student --data new.txt --out labels.tsv
    """,
        "cli.command_settings.PredictSettings",
        "cli.predict_command.predict",
        ANSWERING,
        alone=True,
    ),
    "cache": Command(
        """Store a fine-tuned teacher's outputs on every training row, for runs without it.

    For example:

        fastkd cache --teacher ./teacher --train train.tsv --eval dev.tsv --out runs/cache

        fastkd distill --teacher-cache runs/cache --train train.tsv --eval dev.tsv
    """,
        "cli.command_settings.CacheSettings",
        "cli.cache_command.write",
        after_stop=AGAIN,
    ),
    "verify": Command(
        """Compute one step in every way that should give the same, and print how far the gradients
    differ.

    Order, padding, packing, accumulation, processes, a cached teacher, compilation, resuming: on
    your teacher, student, method and rows, in float64, without dropout.
    """,
        "cli.command_settings.VerifySettings",
        "cli.verify_command.verify",
        alone=True,
    ),
    "augment": Command(
        """Add copies of each row with some words replaced by a masked language model (TinyBERT's).

    For example:

        fastkd augment --data RTE/train.tsv --task rte --mlm bert-base-uncased --out aug.tsv
    """,
        "cli.command_settings.AugmentSettings",
        "cli.augment_command.run",
        ANSWERING,
        alone=True,
        after_stop=AGAIN,
    ),
    "demo": Command(
        "Distil a real teacher with every method, offline, in a few minutes.",
        "cli.command_settings.DemoSettings",
        "cli.demo.run_demo",
        (*TRAINING, "matplotlib"),
        after_stop=AGAIN,
    ),
    "doctor": Command(
        "Print what is installed, which backends run and why not, and check them.",
        "cli.doctor.Settings",
        "cli.doctor.run",
        (),
    ),
    "study": Command(
        """Compare methods with one budget over several seeds, and print what exceeds noise.

    For example, from a file, or from options; the same command goes on after a stop:

        fastkd study SPEC.toml --out runs/study --jobs 4

        fastkd study --methods labels,fcd --tasks docs=docstrings --finetune-teacher 3
    """,
        "study.study_settings.StudySettings",
        "cli.study_command.run",
        (*TRAINING, "matplotlib"),
        after_stop=AGAIN,
        early="study.grid.early",
    ),
    "analyze": Command(
        """Similarity of the layers of a model, or of teacher and student, as numbers and pictures.

    For example:

        fastkd analyze --model bert-base-uncased --task rte --measures svcca,pwcca

        fastkd analyze --model ./teacher --student runs/distill/student --data dev.tsv
    """,
        "cli.command_settings.AnalyzeSettings",
        "cli.analyze_command.run",
        ("transformers", "matplotlib"),
    ),
}


class CommandGroup(typer.core.TyperGroup):  # type: ignore[misc]
    """Commands whose mistakes are one sentence on stderr."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command with its options, which a listed command lacks; see `_register`."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and listed.callback(), rest

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        with errors_as_sentences():
            return super().make_context(info_name, args or ["--help"], *rest, **more)

    def invoke(self, ctx: Any) -> Any:
        with errors_as_sentences(lambda: COMMANDS[ctx.invoked_subcommand].after_stop):
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
        _end(f"{error}{goes_on()}", error.code)
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


def imported(path: str) -> Any:
    """What a path such as ``train.settings.DistillOptions`` names in fastkd."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"fastkd.{module}"), name)


def _parameter(field: dataclasses.Field, kind: Any, meta: Option) -> inspect.Parameter:
    """The typer parameter of an option."""
    required = field.default is field.default_factory is dataclasses.MISSING
    default = None if field.default is dataclasses.MISSING else field.default
    if kind == Mapping[str, Any]:
        kind = list[str] | None
    if meta.flag.startswith("-"):
        shown = typer.Option(
            meta.flag, help=meta.help, metavar=meta.metavar, rich_help_panel=meta.panel
        )
    else:
        shown = typer.Argument(help=meta.help, metavar=meta.flag, rich_help_panel=meta.panel)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[kind, shown],
    )


def _register(name: str, meta: Command) -> None:
    """List a command; its options are imported when it is called, and its function when it runs."""

    def build() -> Any:
        cls = imported(meta.options)
        options, kinds = options_of(cls), typing.get_type_hints(cls)

        def run(context: typer.Context, **values: Any) -> None:
            check_launcher()
            for name, option in options.items():
                if context.get_parameter_source(name).name == "DEFAULT":
                    del values[name]  # so that the settings know which options are given
                elif kinds[name] == Mapping[str, Any]:
                    given = option.flag, values[name] or [], option.joined, option.names
                    values[name] = assignments(*given)
            settings = cls(**values)
            check_inputs(settings)
            if meta.early and (text := imported(meta.early)(settings)):
                typer.echo(text)
                return
            if meta.alone:
                if not first():
                    return
                leave_launcher()
            for module in meta.needs:
                require(module, "train")
            if "transformers" in meta.needs:
                imported("train.models.be_quiet")()
            with stopping_at_once(), new_console() as console:
                if imported(meta.function)(settings, console) is False:
                    raise typer.Exit(1)

        parameters = [
            _parameter(field, kinds[field.name], options[field.name])
            for field in dataclasses.fields(cls)
            if field.name in options
        ]
        # The help lists required options first.
        parameters.sort(key=lambda parameter: parameter.default is not parameter.empty)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.insert(0, inspect.Parameter("context", kind, annotation=typer.Context))
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        single = typer.Typer(add_completion=False)
        single.command(name, help=meta.help, cls=UniqueOptionsCommand)(run)
        return typer.main.get_command(single)

    app.command(name, help=meta.help)(build)


for _name, _meta in COMMANDS.items():
    _register(_name, _meta)
