"""The `fastkd` command.

The list of commands needs neither torch nor transformers, whose imports take seconds: a command
imports its options when it is called, and the rest when it runs.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, NamedTuple

import fastkd
from fastkd._core.extras import MissingExtra, require
from fastkd.cli.display import RichDisplay, new_display
from fastkd.train.config import Config, check_inputs
from fastkd.train.errors import InputError, Interrupted, RunFailed
from fastkd.train.launcher import (
    check_launcher,
    launched,
    leave_launcher,
    rank,
    receiving_signals,
    stop_at_once,
)
from fastkd.train.options import Option, assignments, options_of

typer: Any = require("typer", "train")
require("typer.core", "train")

TRAINING = ("transformers", "accelerate", "safetensors", "sklearn", "scipy")
# Scores import what they need: most of the time of a short command goes into imports.
ANSWERING = ("transformers", "safetensors")
UsageError: Any = typer.BadParameter.__mro__[1]  # typer brings its own click, or click's


class Command(NamedTuple):
    """A command: its help, the dataclass of its options, and its function.

    ``function(settings, display)`` may return False for exit code 1. The packages in ``needs`` are
    imported before it starts work. Only the first of several processes runs it if ``alone``.
    ``after_stop`` ends the sentence for an interrupted command. ``early(settings)`` runs before the
    packages are imported; a text that it returns is all that the command prints. ``required``
    options of a `Config`, and ``out``, its default.
    """

    help: str
    options: str
    function: str
    needs: Sequence[str] = TRAINING
    alone: bool = False
    after_stop: str = ""
    early: str = ""
    required: Sequence[str] = ()
    out: str | None = None


# The options of `fastkd distill` that people need first, in a panel of their own.
FIRST = (
    "teacher", "finetune_teacher", "student", "student_layers", "task", "train", "evals", "test",
    "method", "num_train_epochs", "batch_size", "learning_rate", "max_length", "out", "resume",
)  # fmt: skip
AGAIN = ", the same command goes on"
COMMANDS = {
    "distill": Command(
        """Distil a teacher into a smaller student.

    For example, on a GLUE task from the hub:

        fastkd distill --teacher bert-base-uncased --finetune-teacher 3 --task sst2 --method fcd

    or on local files:

        fastkd distill --teacher ./teacher --train train.tsv --eval dev.tsv --method knn --set k=3
    """,
        "fastkd.train.config:Config",
        "fastkd.cli.main:distill",
        after_stop=", --resume continues the run",
    ),
    "evaluate": Command(
        """Score a model on labelled rows.

    For example:

        fastkd evaluate --model runs/distill/student --data dev.tsv
    """,
        "fastkd.cli.command_settings:EvaluateSettings",
        "fastkd.cli.predict_command:evaluate",
        ANSWERING,
        alone=True,
    ),
    "predict": Command(
        """Label rows with a model: class and probability, or a number.

    For example:

        fastkd predict --model runs/distill/student --data new.txt --out labels.tsv
    """,
        "fastkd.cli.command_settings:PredictSettings",
        "fastkd.cli.predict_command:predict",
        ANSWERING,
        alone=True,
    ),
    "cache": Command(
        """Store a fine-tuned teacher's outputs on every training row, for runs without it.

    For example:

        fastkd cache --teacher ./teacher --train train.tsv --eval dev.tsv --out runs/cache

        fastkd distill --teacher-cache runs/cache --train train.tsv --eval dev.tsv
    """,
        "fastkd.train.config:Config",
        "fastkd.cli.cache_command:write",
        after_stop=AGAIN,
        required=("teacher",),
        out="runs/teacher-cache",
    ),
    "verify": Command(
        """Compute one step in every way that should give the same, and print how far the gradients
    differ.

    Order, padding, packing, accumulation, processes, a cached teacher, compilation, resuming: on
    your teacher, student, method and rows, in float64, without dropout.
    """,
        "fastkd.train.config:Config",
        "fastkd.cli.cache_command:verify",
        alone=True,
        required=("teacher",),
    ),
    "augment": Command(
        """Add copies of each row with some words replaced by a masked language model (TinyBERT's).

    For example:

        fastkd augment --data RTE/train.tsv --task rte --mlm bert-base-uncased --out aug.tsv
    """,
        "fastkd.cli.command_settings:AugmentSettings",
        "fastkd.cli.augment_command:run",
        ANSWERING,
        alone=True,
        after_stop=AGAIN,
    ),
    "demo": Command(
        "Distil a real teacher with every method, offline, in a few minutes.",
        "fastkd.cli.command_settings:DemoSettings",
        "fastkd.cli.demo:run_demo",
        (*TRAINING, "matplotlib"),
        after_stop=AGAIN,
    ),
    "doctor": Command(
        "Print what is installed, which backends run and why not, and check them.",
        "fastkd.cli.doctor:Settings",
        "fastkd.cli.doctor:run",
        (),
    ),
    "study": Command(
        """Compare methods with one budget over several seeds, and print what exceeds noise.

    For example, from a file, or from options; the same command goes on after a stop:

        fastkd study SPEC.toml --out runs/study --jobs 4

        fastkd study --methods labels,fcd --tasks docs=docstrings --finetune-teacher 3
    """,
        "fastkd.study.grid:StudySettings",
        "fastkd.cli.study_command:run",
        (*TRAINING, "matplotlib"),
        after_stop=AGAIN,
        early="fastkd.study.grid:early",
    ),
    "analyze": Command(
        """Similarity of the layers of a model, or of teacher and student, as numbers and pictures.

    For example:

        fastkd analyze --model bert-base-uncased --task rte --measures svcca,pwcca

        fastkd analyze --model ./teacher --student runs/distill/student --data dev.tsv
    """,
        "fastkd.cli.command_settings:AnalyzeSettings",
        "fastkd.cli.analyze_command:run",
        ("transformers", "matplotlib"),
    ),
}


@contextlib.contextmanager
def errors_as_sentences(goes_on: str = "") -> Iterator[None]:
    """Context that prints an error as one sentence on stderr; exit code 2 for bad input, else 1.

    ``goes_on`` ends the sentence for an interrupted command.
    """
    try:
        yield
    except UsageError as error:
        _end(f"Error: {error.format_message()}", 2)
    except InputError as error:
        _end(f"Error: {error}", 2)
    except Interrupted as error:
        _end(f"{error}{goes_on}", error.code)
    except (RunFailed, MissingExtra) as error:
        _end(f"Error: {error}", 1)
    except KeyboardInterrupt as error:
        message = f"Stopped; what was saved before is intact{goes_on}"
        _end(message, getattr(error, "code", 130))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        message = f"Error: {error.strerror or error}{where}; what was saved before is intact"
        _end(message, 1)
    except Exception as error:
        if not launched() or isinstance(error, (typer.Exit, typer.Abort)):
            raise
        from fastkd.train import processes

        if processes.is_loss_of_others(error):
            _end(f"Error: another process of this run has ended{goes_on}", 1)
        if not processes.first_to_fail():
            raise typer.Exit(1) from None
        raise


def _end(message: str, code: int) -> None:
    """End with a sentence on standard error, printed by one process."""
    if launched():
        from fastkd.train import processes

        if not processes.first_to_fail():
            raise typer.Exit(code)
    typer.echo(" ".join(message.split()), err=True)
    raise typer.Exit(code)


class CommandGroup(typer.core.TyperGroup):  # type: ignore[misc]
    """Commands whose mistakes are one sentence on stderr."""

    @errors_as_sentences()
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command with its options, which a listed command lacks; see `_register`."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and listed.callback(), rest

    @errors_as_sentences()
    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        return super().make_context(info_name, args or ["--help"], *rest, **more)


class UniqueOptionsCommand(typer.core.TyperCommand):  # type: ignore[misc]
    """Command that rejects an option given twice, instead of dropping one value."""

    @errors_as_sentences()
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


@app.callback(invoke_without_command=True)
def common(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Distil language models into smaller ones with the losses of five papers and others."""
    if version:
        typer.echo(f"fastkd {fastkd.__version__}")
        raise typer.Exit


def options_for(name: str) -> dict[str, Option]:
    """The options of a command, by field."""
    command = COMMANDS[name]
    found = dict(options_of(resolve_name(command.options)))
    defaults: dict[str, Any] = dict.fromkeys(command.required, dataclasses.MISSING)
    if command.out is not None:
        defaults["out"] = Path(command.out)
    for field, default in defaults.items():
        found[field] = dataclasses.replace(found[field], default=default)
    shared = name not in ("distill", "cache", "verify")
    return {field: meta for field, meta in found.items() if shared or name in meta.commands}


def distill(config: Config, display: RichDisplay) -> None:
    """Run `fastkd distill`: a single run, or the stages of --stages."""
    from fastkd.train import distillation, stages

    display.log_json = None if rank() else config.log_json
    if config.stages is None:
        display.results(distillation.run_distillation(config, display), config.out)
        return
    ordered = stages.read(config)
    stages.check(config, ordered)
    for stage in ordered:
        display.say(f"stage {stage.number} of {len(ordered)}: {stage.name}")
        display.results(stages.run_stage(stage, display), stage.out)
    display.say(f"the student of the last stage: {stages.link(ordered)}")


def _parameter(field: str, meta: Option, first: bool) -> inspect.Parameter:
    """The typer parameter of an option."""
    kind, default = meta.kind, meta.default
    if kind == Mapping[str, Any]:
        kind, default = list[str] | None, None
    elif meta.is_path and not meta.several:
        kind = Path | None
    panel = "Main options" if first else meta.panel
    if meta.flag.startswith("-"):
        shown = typer.Option(meta.flag, help=meta.help, metavar=meta.metavar, rich_help_panel=panel)
    else:
        shown = typer.Argument(help=meta.help, metavar=meta.flag, rich_help_panel=panel)
    return inspect.Parameter(
        field,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[kind, shown],
    )


def _register(name: str, meta: Command) -> None:
    """List a command; its options are imported when it is called, and its function when it runs."""

    @functools.cache
    def build() -> Any:
        options = options_for(name)

        @errors_as_sentences(meta.after_stop)
        def run(context: typer.Context, **values: Any) -> None:
            check_launcher()
            given, cls = {}, resolve_name(meta.options)
            for field, option in options.items():
                if context.get_parameter_source(field).name == "DEFAULT":
                    continue
                value = values[field]
                if option.kind == Mapping[str, Any]:
                    value = assignments(option.flag, value or [], option.joined, option.names)
                given[field] = value
            if meta.out is not None:
                given.setdefault("out", values["out"])
            settings = cls.of(given, name) if hasattr(cls, "of") else cls(**given)
            check_inputs(settings)
            if meta.early and (text := resolve_name(meta.early)(settings)):
                typer.echo(text)
                return
            if meta.alone:
                if rank():
                    return
                leave_launcher()
            for module in meta.needs:
                require(module, "train")
            if "transformers" in meta.needs:
                resolve_name("fastkd.train.models:be_quiet")()
            with receiving_signals(stop_at_once), new_display() as display:
                if resolve_name(meta.function)(settings, display) is False:
                    raise typer.Exit(1)

        few = FIRST if name == "distill" else ()
        parameters = [
            _parameter(field, option, first=field in few) for field, option in options.items()
        ]
        # The help lists required options first, then those that people need first.
        parameters.sort(key=lambda p: (p.default is not p.empty, few and p.name not in few))
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
