"""Options of the commands, as dataclasses whose fields `fastkd.train.options` reads.

They need no transformers, so that the help of a command is quick. `fastkd.train.config` turns those
of `fastkd distill` into transformers.TrainingArguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkd.distill.baselines import NAMES
from fastkd.distill.labelled_order import LABELLED_SHARE
from fastkd.train import lora, tasks
from fastkd.train.errors import InputError
from fastkd.train.glue import GLUE_TASKS, Glue
from fastkd.train.input_columns import Columns
from fastkd.train.options import (
    Checked,
    data_option,
    given,
    model_option,
    option,
    options_of,
    run_option,
    training_option,
)

# Default of --max-length, lowered where a model reads less.
MAX_LENGTH = 128
# --teacher-layers: chosen from data (MC3KD, Algorithm 1).
SELECT = "select"
# Options beside --stages; all others belong into its file.
OF_ALL_STAGES = (
    "stages", "out", "resume", "overwrite", "checkpoint_every", "report_to", "log_json",
)  # fmt: skip


def device() -> Any:
    return training_option(
        "auto", "auto, cpu or cuda.", flag="--device", key="device", choices=("auto", "cpu", "cuda")
    )


def seed() -> Any:
    return training_option(0, "Seed of everything random.", least=0, most=2**32 - 1)


def precision() -> Any:
    return training_option("fp32", "fp32, bf16 or fp16.", choices=("fp32", "bf16", "fp16"))


def remote_code() -> Any:
    return option(False, "Run code that comes with a model on the hub.")


@dataclass(kw_only=True)
class ColumnOptions(Checked):
    """Columns of text and label in a file or data set."""

    text_column: str | None = data_option(None, "Column of the text.")
    text_pair_column: str | None = data_option(None, "Column of the second text.")
    label_column: str | None = data_option(None, "Column of the label (label).")
    no_header: bool = data_option(False, "The files have no header; columns are 0, 1, 2, ...")

    @property
    def columns(self) -> Columns:
        """The given columns."""
        label = self.label_column
        return Columns(self.text_column, self.text_pair_column, label, not self.no_header)


@dataclass(kw_only=True)
class Source(ColumnOptions):
    """Source of the rows: a GLUE task, a data set on the hub, or files."""

    task: str | None = data_option(
        None,
        f"GLUE task: {', '.join(GLUE_TASKS)}; or what rows and head are: "
        f"{', '.join(tasks.NAMES)}, or your own as package.module:Class.",
    )
    data: str | None = data_option(None, "Data set on the hub.")
    data_config: str | None = data_option(None, "Configuration of --data.")
    train_split: str = data_option("train", "Split to train on.")
    eval_split: str | None = data_option(None, "Split to evaluate on (validation).")
    train: Path | None = data_option(
        None, "Training rows: .tsv, .csv, .json, .jsonl, .parquet, also .gz."
    )
    evals: Path | None = data_option(
        None, "Rows to evaluate on; files as in --train.", flag="--eval"
    )
    test: Path | None = data_option(
        None, "Rows scored once, at the end, with the student that --eval chose."
    )
    unlabelled: Path | None = data_option(
        None, "Text without labels to distil on as well; .txt: one a line."
    )
    labels: str = data_option(
        "auto",
        "What labels are: auto, classes, or numbers (regression).",
        choices=("auto", "classes", "numbers"),
    )
    label_order: str | None = data_option(
        None,
        "The data's classes in the order of the teacher's head, where names don't tell.",
        metavar="NAME,NAME",
    )
    metric: str | None = data_option(
        None,
        "Score that picks the best: accuracy, mcc, f1, pearson, spearman, mse, or a task's own.",
    )
    max_train_rows: int | None = data_option(
        None, "Train on so many rows that have labels, drawn at random.", least=2
    )
    max_eval_rows: int | None = data_option(
        None, "Evaluate on so many rows, drawn at random.", least=1
    )
    seed: int = seed()

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check(self.task)
        tasks.check_metric(self.task, self.metric)
        hub = given(self, "data", "data_config", "train_split", "eval_split")
        files = given(self, "train", "evals")
        if self.train is None and self.evals is None:
            if self.no_header:
                raise InputError("--no-header is about files; give --train and --eval")
            if self.glue_name is None and self.data is None:
                raise InputError(
                    "no data: pass --task NAME, --data HUB_NAME, or --train and --eval FILE"
                )
        elif hub:
            raise InputError(
                f"{files[0]} and {hub[0]} exclude each other: give files or a hub name"
            )
        if self.task in GLUE_TASKS and self.data is not None:
            raise InputError("--task and --data exclude each other")
        if self.data_config is not None and (self.data is None or self.data in GLUE_TASKS):
            raise InputError("--data-config belongs to --data, a data set that is no GLUE task")

    @property
    def glue_name(self) -> str | None:
        """Name of the GLUE task that --task or --data gives, if any."""
        return next((name for name in (self.task, self.data) if name in GLUE_TASKS), None)

    @property
    def glue(self) -> Glue | None:
        """Columns and metrics of the GLUE task, if any."""
        return GLUE_TASKS.get(self.glue_name or "")

    @property
    def kind(self) -> str | None:
        """Value of --task if it is a kind of rows, not a GLUE data set."""
        return tasks.kind_of(self.task)


@dataclass(kw_only=True)
class Pairing(Source):
    """Teacher, student and method."""

    teacher: str = option(..., "Teacher: a directory or a hub name.")
    trust_remote_code: bool = remote_code()
    tokenizer: str | None = model_option(None, "Tokenizer, if not the teacher's.")
    student: str | None = model_option(
        None, "Student: a directory or a hub name, instead of teacher layers."
    )
    student_layers: int | None = model_option(
        None, "How many teacher layers make the student; half of them if not given.", least=1
    )
    teacher_layers: str = model_option(
        "uniform",
        "Which teacher layers: uniform, top, bottom, numbers such as 2,4,6, or select: those that "
        "differ most from the one before, which the method then compares as well.",
    )
    student_config: Mapping[str, Any] = model_option(
        {},
        "Sizes of the student, where they aren't the teacher's, such as hidden_size=256,"
        "num_attention_heads=4.",
        metavar="NAME=NUMBER,...",
        joined=True,
    )
    student_weights: str = model_option(
        "cut",
        "Weights of the student: cut from the teacher's, or random.",
        choices=("cut", "random"),
    )
    lora: Mapping[str, Any] = model_option(
        {},
        "LoRA adapters on the student, which alone learn: r, alpha, dropout, and targets such as "
        "q_proj+v_proj, all linear layers if not given.",
        metavar="r=16,alpha=32",
        joined=True,
    )
    unmatched: str = model_option(
        "renormalise",
        "What becomes of the tokens that only one vocabulary has, if a student of --task causal-lm "
        "or chat has its own tokenizer: soft targets are renormalised over the others; bucket: all "
        "of them are one outcome; sorted: and their sorted probabilities are compared.",
        choices=("renormalise", "bucket", "sorted"),
    )
    attention: str | None = model_option(
        None,
        "Attention of both models: eager keeps the maps that a method of your own may compare, as "
        "tinybert has it without asking.",
        choices=("eager", "sdpa"),
    )
    method: str = option(
        "mc3kd", f"One of {', '.join(NAMES)}, or your own as package.module:Class."
    )
    preset: str = option(
        "default",
        "Hyper-parameters to start from: default or paper.",
        choices=("default", "paper"),
    )
    options: Mapping[str, Any] = option(
        {}, "Hyper-parameter of the method; repeatable.", flag="--set", metavar="NAME=VALUE"
    )
    max_length: int = training_option(
        MAX_LENGTH,
        "Longest text, in tokens; less by default where a model reads less.",
        least=4,
    )
    precision: str = precision()
    device_name: str = device()

    def __post_init__(self) -> None:
        super().__post_init__()
        made = given(self, "student_layers", "teacher_layers", "student_config", "student_weights")
        if self.student is not None and made:
            raise InputError(f"--student and {made[0]} exclude each other")
        if self.student_weights == "random" and given(self, "teacher_layers"):
            raise InputError("--teacher-layers and --student-weights random exclude each other")
        if "num_hidden_layers" in self.student_config:
            raise InputError("--student-config num_hidden_layers: give --student-layers")
        if self.lora:
            lora.read(self.lora)
            if self.student_weights == "random":
                raise InputError(
                    "--lora and --student-weights random exclude each other: adapters alone learn"
                )
        if self.unlabelled is not None and self.method == "labels":
            raise InputError("--unlabelled and --method labels exclude each other")


@dataclass(kw_only=True)
class TrainingOptions(Checked):
    """Length, speed, precision and device of a training.

    Names are those of ``transformers.TrainingArguments``, where it has the option.
    """

    num_train_epochs: float = training_option(
        3.0, "Epochs of distillation.", flag="--epochs", key="epochs", above=0
    )
    batch_size: int = training_option(32, "Rows in a step of a process.", least=1)
    accumulate: int = training_option(
        1,
        "Micro-batches in which a process reads its rows of a step, for less memory; the loss is "
        "that of the whole step, also where it compares samples.",
        least=1,
    )
    learning_rate: float = training_option(5e-5, "Peak learning rate.", above=0)
    weight_decay: float = training_option(0.01, "Weight decay of AdamW.", least=0)
    warmup: float = training_option(
        0.1, "Share of the steps that warms up, 0 to 1.", least=0, most=1
    )
    labelled_share: float = training_option(
        LABELLED_SHARE,
        "Least share of labelled rows in a batch, 0 to 1: where fewer have labels, they are drawn "
        "again.",
        least=0,
        most=1,
    )
    seed: int = seed()
    precision: str = precision()
    device_name: str = device()


@dataclass(kw_only=True)
class DistillOptions(TrainingOptions, Pairing):
    """Options of `fastkd distill`: data, teacher and student, method, training, and the run."""

    teacher: str | None = option(  # type: ignore[assignment]
        None, "Teacher: a directory or a hub name."
    )
    teacher_cache: Path | None = model_option(
        None, "What `fastkd cache` wrote, instead of a teacher.", metavar="DIR"
    )
    out: Path = run_option(Path("runs/distill"), "Directory for the student and its report.")
    finetune_teacher: float = model_option(
        0.0, "Fine-tune the teacher on the task first.", metavar="EPOCHS", least=0
    )
    teacher_learning_rate: float = model_option(
        5e-5, "Learning rate of --finetune-teacher.", above=0
    )
    pack: bool = training_option(
        False, "Several conversations in a row of --max-length, none of which sees another."
    )
    on_policy: float = training_option(
        0.0,
        "Share of the steps, 0 to 1, in which the student writes the answers and the teacher says "
        "what it thinks of them.",
        metavar="SHARE",
        least=0,
        most=1,
    )
    gather: bool = training_option(False, "Losses that compare samples see those of all processes.")
    #: Not accelerate's ``fsdp``; see `fastkd.train.sharding`.
    shard: bool = training_option(
        False,
        "Spread teacher and student over the processes (FSDP2): none holds a whole model.",
        flag="--fsdp",
        saved=False,
    )
    trainer_args: Path | None = training_option(
        None,
        "YAML file of further arguments of transformers.TrainingArguments.",
        metavar="FILE",
        saved=False,
    )
    checkpoint_every: int | None = run_option(
        None, "Checkpoints within an epoch, too.", metavar="STEPS", least=1
    )
    report_to: str | None = run_option(  # a list once they are checked
        None, "Trackers that get the losses, such as tensorboard; separated by commas."
    )
    log_json: Path | None = run_option(
        None, "File that gets the progress as lines of JSON, for other programs."
    )
    stages: Path | None = run_option(
        None,
        "TOML file with a table of options for each of several runs, in which each student goes on "
        "with what it learned in the one before.",
        metavar="FILE",
    )
    resume: bool = run_option(False, "Continue an interrupted run; give the same options.")
    overwrite: bool = run_option(False, "Replace the student in --out once a new one is complete.")

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise InputError("--resume and --overwrite exclude each other")
        if self.stages is not None:
            Checked.__post_init__(self)
            more = given(self, *(name for name in options_of(self) if name not in OF_ALL_STAGES))
            if more:
                raise InputError(
                    f"--stages and {more[0]} exclude each other: it stands in the file"
                )
            return
        Pairing.__post_init__(self)  # not the next of a subclass
        cache, shard = self.teacher_cache is not None, self.shard
        for wrong, message in (
            (not cache and self.teacher is None, "--teacher is missing: a directory or a hub name"),
            (cache and self.on_policy, "--on-policy and --teacher-cache exclude each other: a "
             "cache has no outputs on text that the student generates"),
            (cache and self.finetune_teacher, "--teacher-cache and --finetune-teacher exclude each "
             "other: the teacher of a cache is fine-tuned already"),
            (shard and self.teacher_layers == SELECT, f"--fsdp and --teacher-layers {SELECT} "
             "exclude each other: selecting layers needs a whole teacher; name the layers"),
            (shard and self.precision == "fp16", "--fsdp and --precision fp16 exclude each other: "
             "take bf16"),
            (shard and self.on_policy and self.gather, "--fsdp, --gather and --on-policy exclude "
             "each other: a process without rows cannot take part in generating text"),
            (not self.finetune_teacher and given(self, "teacher_learning_rate"),
             "--teacher-learning-rate needs --finetune-teacher EPOCHS"),
        ):  # fmt: skip
            if wrong:
                raise InputError(message)
        if self.log_json is not None:
            log = self.log_json.absolute()
            read = (self.train, self.evals, self.test, self.unlabelled, self.trainer_args)
            if log in [path.absolute() for path in read if path is not None]:
                raise InputError(f"--log-json {self.log_json} is a file that the run reads")
            for name in ("student", "teacher", "unfinished"):
                if log.is_relative_to((self.out / name).absolute()):
                    raise InputError(f"--log-json {self.log_json} lies in what the run replaces")
