"""Options of the commands, as dataclasses whose fields `fastkd.train.options` reads.

They need no transformers, so that the help of a command is quick. `fastkd.train.config` turns those
of `fastkd distill` into transformers.TrainingArguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fastkd.train import files, recipes, tasks
from fastkd.train.conversations import KEEP, THINKING
from fastkd.train.errors import InputError, nearest
from fastkd.train.glue import GLUE_TASKS, Glue
from fastkd.train.hub import is_served
from fastkd.train.input_columns import Columns
from fastkd.train.options import (
    Checked,
    as_paths,
    check_types,
    data_option,
    file_keys,
    lists_of,
    model_option,
    option,
    options_of,
    paths_of,
    resolve_path,
    run_option,
    set_flags,
    training_option,
)
from fastkd.train.packaged_teacher import resolved
from fastkd.train.recipes import RECIPES

# Methods by name and the default of --labelled-share, as in `fastkd.distill`, which needs torch.
NAMES = (
    "labels", "soft_targets", "fcd", "knn", "lrc_bert", "mc3kd", "lrkd", "tinybert", "pkd",
    "distilbert", "minilm", "minilmv2", "embeddings", "gold",
)  # fmt: skip
LABELLED_SHARE = 0.25
# --method: the one that suits the kind of task, see `fastkd.train.auto_method`.
AUTO = "auto"
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
        "auto",
        "Device of the models: auto (cuda if there is one), cpu or cuda.",
        flag="--device",
        key="device",
        choices=("auto", "cpu", "cuda"),
    )


def seed() -> Any:
    return training_option(0, "Seed of all random numbers.", least=0, most=2**32 - 1)


def precision() -> Any:
    return training_option(
        "fp32", "Precision of the models: fp32, bf16 or fp16.", choices=("fp32", "bf16", "fp16")
    )


def remote_code() -> Any:
    return option(False, "Allow code from a model's hub repository to run.")


@dataclass(kw_only=True)
class ColumnOptions(Checked):
    """Columns of text and label in a file or data set."""

    text_column: str | None = data_option(None, "Column of the text; the task's own if not given.")
    text_pair_column: str | None = data_option(
        None, "Column of the second text, for tasks on pairs; the task's own if not given."
    )
    label_column: str | None = data_option(None, 'Column of the label; "label" if not given.')
    no_header: bool = data_option(
        False, "Files have no header line; columns are 0, 1, 2 and so on."
    )

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
        f"A GLUE task ({', '.join(GLUE_TASKS)}), or the kind of task: {tasks.KINDS}.",
    )
    data: str | None = data_option(None, "Data set on the Hugging Face hub, instead of files.")
    data_config: str | None = data_option(None, "Configuration (subset) of the data set --data.")
    train_split: str = data_option("train", "Split of the hub data set to train on.")
    eval_split: str | None = data_option(
        None, 'Split of the hub data set to evaluate on; "validation" if not given.'
    )
    train: Path | None = data_option(
        None, "File of training rows: .tsv, .csv, .json, .jsonl or .parquet, also as .gz."
    )
    evals: Path | None = data_option(
        None, "File of evaluation rows, which select the best student.", flag="--eval"
    )
    test: list[Path] | None = data_option(
        None,
        "File of test rows, on which the selected student is scored once, at the end; repeatable, "
        "and scores of several files end in the file's name.",
        metavar="PATH",
    )
    unlabelled: Path | None = data_option(
        None, "File of further training rows without labels; a .txt file has one text a line."
    )
    labels: str = data_option(
        "auto",
        "Meaning of the labels: classes, numbers (regression), or auto (by their values).",
        choices=("auto", "classes", "numbers"),
    )
    thinking: str = data_option(
        KEEP,
        "Thoughts of chat answers (<think>, reasoning_content): keep (trained), drop (left out) or "
        "prompt (read, not trained).",
        choices=THINKING,
    )
    label_order: str | None = data_option(
        None,
        "Classes of the data in the order of the teacher's outputs; needed if the names differ.",
        metavar="NAME,NAME",
    )
    metric: str | None = data_option(
        None,
        "Metric that selects the best student: accuracy, mcc, f1, pearson, spearman, mse, or a "
        "metric of the task; the task's first if not given.",
    )
    max_train_rows: int | None = data_option(
        None, "Number of labelled rows to train on, drawn at random; default: all.", least=2
    )
    max_eval_rows: int | None = data_option(
        None, "Number of rows to evaluate on, drawn at random; default: all.", least=1
    )
    seed: int = seed()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.test = as_paths(self.test)
        if len(files.names_of(self.test or [])) < len(self.test or []):
            raise InputError(
                "--test: two files have the same name, which their scores end in; rename one"
            )
        tasks.check(self.task)
        tasks.check_metric(self.task, self.metric)
        hub = set_flags(self, "data", "data_config", "train_split", "eval_split")
        local = set_flags(self, "train", "evals")
        if self.train is None and self.evals is None:
            if self.no_header:
                raise InputError("--no-header is about files; give --train and --eval")
            if self.glue_name is None and self.data is None and self.unlabelled is not None:
                raise InputError("--eval is missing: name rows, or text alone, to evaluate on")
            if self.glue_name is None and self.data is None:
                raise InputError(
                    "no data: pass --task NAME, --data HUB_NAME, or --train and --eval FILE"
                )
        elif hub:
            raise InputError(
                f"{local[0]} and {hub[0]} exclude each other: give files or a hub name"
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

    teacher: str = option(..., "Teacher model: a directory, a hub name, or packaged (the demo's).")
    trust_remote_code: bool = remote_code()
    tokenizer: str | None = model_option(
        None,
        "Tokenizer of both models, for a teacher folder without one; it must give the ids that the "
        "teacher was trained on.",
    )
    student: str | None = model_option(
        None, "Student model: a directory or a hub name; made of teacher layers if not given."
    )
    student_layers: int | None = model_option(
        None, "Number of teacher layers that make the student; default: half of them.", least=1
    )
    teacher_layers: str = model_option(
        "uniform",
        "Teacher layers that make the student: uniform, top, bottom, numbers such as 2,4,6, or "
        "select, the layers that differ most from the layer before.",
    )
    student_config: Mapping[str, Any] = model_option(
        {},
        "Sizes of a narrower student, such as hidden_size=256,num_attention_heads=4; all other "
        "sizes are the teacher's.",
        metavar="NAME=NUMBER,...",
        joined=True,
    )
    student_weights: str = model_option(
        "cut",
        "Initial weights of the student: cut (from the teacher's) or random.",
        choices=("cut", "random"),
    )
    lora: Mapping[str, Any] = model_option(
        {},
        "Train LoRA adapters on the student instead of its weights: r, alpha, dropout, and targets "
        "such as q_proj+v_proj (default: all linear layers).",
        metavar="r=16,alpha=32",
        joined=True,
    )
    unmatched: str = model_option(
        "renormalise",
        "Student with another tokenizer: how soft targets treat tokens that only one model has; "
        "renormalise leaves them out, bucket makes them one outcome, sorted also compares their "
        "sorted probabilities.",
        choices=("renormalise", "bucket", "sorted"),
    )
    attention: str | None = model_option(
        None,
        "Attention implementation of both models: eager (returns attention maps, for a method of "
        "your own that compares them) or sdpa; transformers' choice if not given.",
        choices=("eager", "sdpa"),
    )
    method: str = option(
        AUTO,
        f"Method: auto (by the kind of task), {', '.join(NAMES)}, or your own as "
        "package.module:Class.",
    )
    preset: str = option(
        "default",
        "Hyper-parameters and training to start from: fastkd's (default), or those of the "
        "method's paper (paper).",
        choices=("default", "paper"),
    )
    recipe: str | None = option(
        None,
        f"Paper whose training --preset paper takes, if not the method's: {', '.join(RECIPES)}.",
        choices=RECIPES,
    )
    options: Mapping[str, Any] = option(
        {},
        "Value of one hyper-parameter of the method; repeatable.",
        flag="--set",
        metavar="NAME=VALUE",
    )
    max_length: int = training_option(
        MAX_LENGTH,
        "Maximum length of a text in tokens; the default is lowered to what both models can read.",
        least=4,
    )
    precision: str = precision()
    device_name: str = device()

    #: Names of the given options; --preset paper sets others.
    given_options: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *args: Any, **values: Any) -> Any:
        self = super().__new__(cls)
        vars(self)["given_options"] = frozenset(values)
        return self

    def __post_init__(self) -> None:
        recipes.complete(self, self.given_options)
        super().__post_init__()
        if self.teacher is not None:
            self.teacher = resolved(self.teacher)
        if self.recipe is not None and self.preset != "paper":
            raise InputError("--recipe needs --preset paper")
        for flag in set_flags(self, "preset", "options") if self.method == AUTO else ():
            raise InputError(
                f"{flag} needs --method NAME: --method {AUTO} takes another method for another "
                "kind of task"
            )
        makes = set_flags(self, *recipes.MAKES[1:])
        if self.student is not None and makes:
            raise InputError(f"--student and {makes[0]} exclude each other")
        if self.student_weights == "random" and set_flags(self, "teacher_layers"):
            raise InputError("--teacher-layers and --student-weights random exclude each other")
        if "num_hidden_layers" in self.student_config:
            raise InputError("--student-config num_hidden_layers: give --student-layers")
        if self.lora:
            from fastkd.train import lora

            lora.read(self.lora, "--lora")
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
        3.0, "Number of passes over the training rows.", flag="--epochs", key="epochs", above=0
    )
    training_steps: int | None = training_option(
        None,
        "Number of training steps, instead of --epochs; default: as --epochs says.",
        flag="--steps",
        key="steps",
        least=1,
    )
    batch_size: int = training_option(32, "Rows of a training step, for each process.", least=1)
    accumulate: int = training_option(
        1,
        "Split each batch into N parts to save memory; same gradient, slower.",
        least=1,
    )
    learning_rate: float = training_option(5e-5, "Peak learning rate of AdamW.", above=0)
    weight_decay: float = training_option(0.01, "Weight decay of AdamW.", least=0)
    warmup: float = training_option(
        0.1,
        "Share of the steps, 0 to 1, in which the learning rate rises to its peak.",
        least=0,
        most=1,
    )
    schedule: str | None = training_option(
        None,
        "Schedule of the learning rate: cosine, constant_with_warmup or another one of "
        "transformers; linear if not given.",
    )
    labelled_share: float = training_option(
        LABELLED_SHARE,
        "With few labels: repeat labelled rows until they are this share of each batch; 0: never.",
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
        None, "Teacher model: a directory, a hub name, packaged (the demo's), or a server's URL."
    )
    teacher_model: str | None = model_option(
        None, "Name of the model in the server of --teacher.", metavar="NAME"
    )
    top_k: int | None = model_option(
        None,
        "Tokens of each position that the server of --teacher returns; default: 20.",
        least=1,
    )
    teachers: Path | None = model_option(
        None,
        "TOML file of several teachers, each for the rows that name it: a directory, a server or a "
        "cache for each name.",
        metavar="FILE",
    )
    teacher_column: str = data_option("teacher", "Column of each row's teacher, for --teachers.")
    teacher_cache: Path | None = model_option(
        None, "Directory written by `fastkd cache`, instead of a teacher.", metavar="DIR"
    )
    out: Path = run_option(Path("runs/distill"), "Output directory for the student and its report.")
    labelled: int | None = data_option(
        None,
        "Number of training rows whose label the student reads, as even over the classes as can "
        "be; --finetune-teacher reads all labels; default: all.",
        least=1,
    )
    max_new_tokens: int | None = data_option(
        None,
        "Maximum number of tokens of a generated text; chat and seq2seq; default: 128.",
        least=1,
    )
    sample: float = data_option(
        0.0,
        "Temperature at which generated text is sampled for the scores, by --seed; 0: the most "
        "probable tokens; chat and seq2seq.",
        metavar="TEMPERATURE",
        least=0,
    )
    finetune_teacher: float = model_option(
        0.0,
        "Number of epochs to fine-tune the teacher on the task first.",
        metavar="EPOCHS",
        least=0,
    )
    teacher_learning_rate: float = model_option(
        5e-5, "Peak learning rate of --finetune-teacher.", above=0
    )
    teacher_lora: Mapping[str, Any] = model_option(
        {},
        "Fine-tune LoRA adapters on the teacher instead of its weights, as --lora on the student.",
        metavar="r=16,alpha=32",
        joined=True,
    )
    pack: bool = training_option(
        False, "Pack several conversations into each row of --max-length tokens; chat only."
    )
    on_policy: float = training_option(
        0.0,
        "Share of steps on answers generated by the student (GKD); chat only.",
        metavar="SHARE",
        least=0,
        most=1,
    )
    gather: bool = training_option(
        False, "Gather the samples of all processes in losses that compare samples."
    )
    #: Not accelerate's ``fsdp``; see `fastkd.train.sharding`.
    shard: bool = training_option(
        False,
        "Shard teacher and student over the processes (FSDP2).",
        flag="--fsdp",
        saved=False,
    )
    trainer_args: Path | None = training_option(
        None,
        "YAML file with further fields of transformers.TrainingArguments.",
        metavar="FILE",
        saved=False,
    )
    checkpoint_every: int | None = run_option(
        None,
        "Number of steps between checkpoints; default: only at the end of each epoch.",
        metavar="STEPS",
        least=1,
    )
    report_to: str | None = run_option(  # a list once they are checked
        None, "Trackers to report losses to, such as tensorboard, separated by commas."
    )
    log_json: Path | None = run_option(None, "File to write the progress to, as lines of JSON.")
    stages: Path | None = run_option(
        None,
        "TOML file with the options of several runs; each trains the student of the run before.",
        metavar="FILE",
    )
    resume: bool = run_option(False, "Continue an interrupted run, with the same options.")
    overwrite: bool = run_option(
        False, "Replace an existing student in --out when the new one is complete."
    )

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise InputError("--resume and --overwrite exclude each other")
        if self.stages is not None:
            Checked.__post_init__(self)
            others = (name for name in options_of(self) if name not in OF_ALL_STAGES)
            if more := set_flags(self, *others):
                raise InputError(
                    f"--stages and {more[0]} exclude each other: it stands in the file"
                )
            return
        Pairing.__post_init__(self)  # not the next of a subclass
        cache, shard = self.teacher_cache is not None, self.shard
        if self.teachers is not None:
            self._check_teachers()
        for wrong, message in (
            (not cache and self.teacher is None and self.teachers is None,
             "--teacher is missing: a directory or a hub name"),
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
            *((not self.finetune_teacher, f"{flag} needs --finetune-teacher EPOCHS")
              for flag in set_flags(self, "teacher_learning_rate", "teacher_lora")),
            (self.teachers is None and set_flags(self, "teacher_column"),
             "--teacher-column needs --teachers FILE"),
            (not is_served(self.teacher) and set_flags(self, "teacher_model", "top_k"),
             "--teacher-model and --top-k need --teacher URL, a server"),
        ):  # fmt: skip
            if wrong:
                raise InputError(message)
        if self.teacher_lora:
            from fastkd.train import lora

            lora.read(self.teacher_lora, "--teacher-lora")
        if self.accumulate > self.batch_size:
            raise InputError(
                f"--accumulate {self.accumulate}: a step of {self.batch_size} rows has no more "
                "micro-batches than rows; give a larger --batch-size"
            )
        if self.log_json is not None:
            log = self.log_json.absolute()
            read = (self.train, self.evals, *(self.test or ()), self.unlabelled, self.trainer_args)
            if log in [path.absolute() for path in read if path is not None]:
                raise InputError(f"--log-json {self.log_json} is a file that the run reads")
            for name in ("student", "teacher", "unfinished"):
                if log.is_relative_to((self.out / name).absolute()):
                    raise InputError(f"--log-json {self.log_json} lies in what the run replaces")

    @property
    def columns(self) -> Columns:
        """The given columns; with --teachers also the column of each row's teacher."""
        return replace(super().columns, teacher=self.teacher_column if self.teachers else None)

    def _check_teachers(self) -> None:
        """Raise for options of one teacher."""
        for flag in set_flags(
            self, "teacher", "teacher_model", "top_k", "teacher_cache", "finetune_teacher", "pack",
            "on_policy", "shard", "student_layers", "student_config",
        ):  # fmt: skip
            raise InputError(f"--teachers and {flag} exclude each other")
        if self.student is None:
            raise InputError("--teachers: pass --student, which reads the tokens of all teachers")


# Options that name a model: a directory, or a name on the hub.
MODELS = ("teacher", "student", "tokenizer")


def option_values(
    where: str,
    table: Mapping[str, Any],
    folder: Path,
    study: Sequence[str] = (),
) -> dict[str, Any]:
    """Fields of `DistillOptions` by the keys of a file's ``table``, but those beside --stages.

    Paths are relative to the ``folder`` of the file. ``study``: the further keys of a study's file,
    where a value may be a list of values.
    """
    keys = {k: n for k, n in file_keys(DistillOptions).items() if n not in OF_ALL_STAGES}
    found, paths, lists = {}, paths_of(DistillOptions), lists_of(DistillOptions)
    for key, value in table.items():
        if key not in keys:
            raise InputError(f"{where} has no option {key!r}; {nearest(key, [*study, *keys])}")
        name, several = keys[key], isinstance(value, list) and bool(study)
        whole = name in lists  # a list is one value
        many = value if several and not whole else [value]
        if name in paths:
            many = [resolve_path(f"{where}: {key}", each, folder, whole) for each in many]
        elif name in MODELS:
            many = [_model_in(folder, each) for each in many]
        for each in many if name not in paths else ():
            check_types(f"{where}: ", {name: each}, DistillOptions)
        found[name] = many if several and not whole else many[0]
    return found


def _model_in(folder: Path, name: Any) -> Any:
    """A name on the hub, or a directory beside a file; $NAME is an environment variable."""
    if not isinstance(name, str):
        return name
    path = resolve_path("", name, folder)
    return str(path) if path.is_dir() or name.startswith(("$", "~")) else name
