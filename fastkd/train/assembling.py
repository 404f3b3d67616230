"""Teacher, student and Distiller, made from what was read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedModel, set_seed

from fastkd.distill.by_row import ByRow
from fastkd.distill.cache import TeacherCache
from fastkd.distill.distiller import Distiller
from fastkd.distill.method import Method, other_vocabulary
from fastkd.distill.methods import select_layers
from fastkd.integrations._rows import RowSource
from fastkd.integrations.served_teacher import ServedTeacher
from fastkd.models.backbone import Backbone
from fastkd.models.inputs import Batches
from fastkd.models.student import SCHEMES, layers_to_keep, student_from_teacher, with_first
from fastkd.train import lora, models, processes
from fastkd.train.completions import stored_teacher
from fastkd.train.config import SELECT, Config
from fastkd.train.errors import InputError, nearest
from fastkd.train.labels import by_names
from fastkd.train.loading import Data, cached_config
from fastkd.train.lora import TRAINED
from fastkd.train.options import SERVED, without_weights
from fastkd.train.progress import Display
from fastkd.train.row_teachers import teachers_of
from fastkd.train.saving import STUDENT, find_damage
from fastkd.train.scoring import Run
from fastkd.train.tasks.base import Task

# Rows that --teacher-layers select reads, as many as Trainer's prepare_batches of them.
SELECTION_ROWS = 2048


@dataclass(frozen=True)
class Models:
    """Teacher and student in a Distiller, and the longest text that both read, in tokens.

    The ``teacher`` is a model, a cache, a server, or one of these for each row; ``teacher_model``
    is None unless it is a model. ``selected`` layers of it are those of --teacher-layers select.
    """

    teacher: Any
    teacher_model: Any
    student: PreTrainedModel
    distiller: Distiller
    max_length: int
    selected: list[int] | None = None

    @property
    def row_teachers(self) -> Mapping[str, nn.Module]:
        """The models among the teachers of which each row has one, by name."""
        return self.teacher.live if isinstance(self.teacher, ByRow) else {}


def assemble(
    config: Config,
    data: Data,
    display: Display,
    teacher: Any = None,
    selected: list[int] | None = None,
    outputs: TeacherCache | None = None,
) -> Models:
    """A new student and method, the same for the same options.

    A ``teacher`` that is not given is loaded. ``outputs`` of it take its place in the training.
    ``selected`` layers (--teacher-layers select, or those of a cache) form the student, and the
    method compares them unless --set names others. Before the selection, uniform layers are used.
    """
    teacher = load_teacher(config, data) if teacher is None else teacher
    length, reads = data.max_length, data.teacher_tokenizer or data.tokenizer
    one = None if isinstance(teacher, RowSource | ByRow | TeacherCache) else teacher
    alone = [] if one is None else [one]
    for live in teacher.live.values() if isinstance(teacher, ByRow) else alone:
        fitting = models.longest(reads, cast(Any, live), data.max_length, "teacher")
        if fitting < length:
            length = fitting
            display.say(f"--max-length {length}: the teacher reads no more tokens")
    selected = selected or data.cached.get("selected")
    set_seed(config.seed)
    # Weights stay in float32: 16 bits would round steps away. --precision sets the arithmetic.
    student = make_student(config, data, teacher, selected).float()
    fitting = models.longest(data.tokenizer, student, data.max_length, "student")
    if fitting < length:
        length = fitting
        display.say(f"--max-length {length}: the student reads no more tokens")
    # Adapters and projections are drawn alike for a student from a cache and from its teacher.
    set_seed(config.seed)
    if config.lora:
        student = lora.adapted(student, config.lora, data.task.head, config.student)
    method = _method(config, data, one, student, selected)
    # The tokenizer of language models whose heads are padded to unlike sizes.
    tokenizer, alike = None, one is not None and data.teacher_tokenizer is None
    if data.task.two_tokenizers == "spans" and alike:
        same = student.config.vocab_size == teacher.config.vocab_size
        tokenizer = None if same else data.tokenizer
    try:
        distiller = Distiller(
            teacher if outputs is None else outputs,
            student,
            method,
            gather=config.gather,
            tokenizers=data.match or tokenizer,
            unmatched=cast(Any, config.unmatched if data.match else "renormalise"),
        )
    except (TypeError, ValueError) as error:
        eager = "; pass --attention eager" if "attn_implementation" in str(error) else ""
        message = f"--method {config.method} with this student: {error}{eager}"
        raise InputError(message) from error
    if data.teacher_tokenizer is not None or config.unmatched != "renormalise":
        _check_tokens(config, data, method)
    return Models(teacher, one, student, distiller, length, selected)


def select(run: Run, made: Models) -> list[int] | None:
    """Teacher layers chosen by --teacher-layers select, on the first process; else None."""
    config, rows = run.config, run.sets.train
    if config.teacher_layers != SELECT or run.data.cached:
        return None
    order = np.random.default_rng(config.seed).permutation(len(rows))[:SELECTION_ROWS].tolist()
    batches = rows.batches(run.sets.collate, 32, order)
    layers = processes.on_first_process(lambda: layers_of(config, made.teacher, batches))
    run.display.say(f"teacher layers that differ most: {', '.join(map(str, layers))}")
    return layers


def _method(
    config: Config, data: Data, teacher: Any, student: Any, selected: list[int] | None
) -> Method:
    """The method, with the defaults of task and models; ``teacher``: None without weights."""
    task, configs = data.task, [x.config for x in (teacher, student) if x is not None]
    defaults = task.method_options(configs[0], configs[-1])
    headless = task.head == "AutoModel"
    if data.teacher_tokenizer is not None and data.match is None and not headless:
        defaults = {**defaults, "pool": "cls"}  # the tokens are of two tokenizers
    method = models.make_method(
        config.method, config.options, config.preset, selected, headless, defaults
    )
    check_classes(config.method, method, task)
    if method.merges_spans and data.match is None:
        raise InputError(
            f"--method {config.method}: compares language models of two tokenizers; pass a "
            "--student with its own, for --task causal-lm or chat"
        )
    return method


def _check_tokens(config: Config, data: Data, method: Method) -> None:
    """Raise if the method compares tokens, and the student has others than the teacher."""
    own, match = data.teacher_tokenizer is not None, data.match
    request = method.layer_request("student")  # a teacher's layers may be chosen later
    texts = own and match is None
    by_token = texts and request.layers and method.teacher_pool == "tokens"
    if own and (request.attentions or request.qkv or by_token):
        others = "soft_targets, knn, lrkd and embeddings compare texts"
        if match is not None:
            others = "take a method that compares hidden states or soft targets"
        raise InputError(
            f"--method {config.method} compares tokens, and the student has others than the "
            f"teacher; {others}"
        )
    if config.unmatched != "renormalise" and match is None:
        raise InputError(
            f"--unmatched {config.unmatched}: teacher and student have one tokenizer; leave it out"
        )


def check_classes(name: str, method: Method, task: Task | type[Task]) -> None:
    """Raise if a method compares rows of one class, and the rows of ``task`` have none."""
    if method.by_class and not task.by_class:
        raise InputError(
            f"--method {name}: compares rows of one class, but rows of --task {task.name()} have "
            "no class; take another --method"
        )


# Teachers


def load_teacher(config: Config, data: Data, tuned: Path | None = None) -> Any:
    """The teacher: a cache, a server, one of these or a model for each row, or a model.

    ``tuned``: the directory of its complete fine-tuning.
    """
    if config.teacher_cache is not None:
        return _cached_teacher(config, data, config.teacher_cache)
    if config.teachers is not None:
        return ByRow(dict(_row_teachers(config, data, config.teachers)))
    if kind := without_weights(config.teacher):
        return _served_teacher(config) if kind == SERVED else stored_teacher(config, data)
    name = str(tuned or config.teacher)
    read = data.teacher_tokenizer or data.tokenizer
    return teacher_model(config, name, data.task, read)


def teacher_model(config: Config, name: str, task: Task, tokenizer: Any) -> PreTrainedModel:
    """The model ``name`` with a head for ``task``.

    Its head may be random before a fine-tuning, and in `fastkd verify`.
    """
    fresh_head = config.finetune_teacher or config.command == "verify"
    found = models.load("--teacher", name, AutoConfig, config.trust_remote_code)
    fitting = task.num_labels in (None, found.num_labels)
    models.fit_config(found, task, tokenizer)
    set_seed(config.seed)
    options = models.attention_for(config.method, config.attention)
    if fresh_head:
        options["dtype"] = torch.float32  # see `assemble`
    remote = config.trust_remote_code
    teacher, fresh = models.load_weights(
        "--teacher", name, remote, type(task), config=found, **options
    )
    if fresh and not fresh_head:
        what = f"no {task.head_name}" if fitting else f"no head for {task.num_labels} labels"
        raise InputError(
            f"--teacher {name}: it has {what} ({', '.join(fresh[:3])} would be random); "
            "pass --finetune-teacher EPOCHS to train it first"
        )
    if len(tokenizer) > teacher.config.vocab_size:
        raise InputError(
            f"--tokenizer has {len(tokenizer)} tokens but the teacher's vocabulary has "
            f"{teacher.config.vocab_size}"
        )
    return teacher


def _served_teacher(config: Config) -> ServedTeacher:
    """The teacher in the server of --teacher."""
    method: Any = models.make_method(config.method, config.options, config.preset)
    if getattr(method, "temperature", 1.0) != 1:
        raise InputError(
            f"--method {config.method}: has temperature {method.temperature}, a server's "
            "log-probabilities have 1; pass --set temperature=1"
        )
    name = cast(str, config.teacher_model)
    return ServedTeacher(str(config.teacher), name, top_k=config.top_k or 20)


def _row_teachers(config: Config, data: Data, path: Path) -> Iterator[tuple[str, Any]]:
    """The teachers of --teachers by name."""
    tokenizer, remote = data.tokenizer, config.trust_remote_code
    for who, entry in teachers_of(path).items():
        if "url" in entry:
            yield who, ServedTeacher(entry["url"], entry["model"], top_k=entry.get("top_k", 20))
        elif "cache" in entry:
            yield who, _open_cache(f"--teachers {who}", Path(entry["cache"]), None, tokenizer)
        else:
            models.check_same_tokens("--teachers", entry["model"], tokenizer, remote)
            yield who, teacher_model(config, entry["model"], data.task, tokenizer)


def _open_cache(who: str, folder: Path, teacher: Any, tokenizer: Any) -> TeacherCache:
    try:
        return TeacherCache(folder, teacher=teacher, tokenizer=tokenizer)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"{who}: {error}") from error


def _cached_teacher(config: Config, data: Data, folder: Path) -> TeacherCache:
    """The cache --teacher-cache; a --teacher and --tokenizer that are given must be those of it."""
    option, teacher, read = "--teacher-cache", None, data.teacher_tokenizer or data.tokenizer
    if config.teacher is not None or config.tokenizer is not None:
        read = models.load_tokenizer(config)
    if config.teacher is not None:
        teacher = teacher_model(config, config.teacher, data.task, read)
    cache = _open_cache(f"{option} {folder}", folder, teacher, read)
    why = find_damage(folder / STUDENT)
    if why:
        raise InputError(
            f"{option} {folder}: its student is damaged ({why}); the same `fastkd cache` again "
            "writes it"
        )
    if not data.task.teacher_metrics.isdisjoint(data.corpus.metrics):
        raise InputError(
            f"{option} {folder}: it has no outputs of the teacher on the evaluation rows, which "
            f"{data.corpus.metrics[0]} compares; pass --teacher"
        )
    return cache


# Students


def make_student(
    config: Config, data: Data, teacher: Any, layers: list[int] | None = None
) -> PreTrainedModel:
    """The student: from --student, from a cache, or made of ``layers`` of the teacher.

    ``layers`` defaults to --teacher-layers.
    """
    if config.student is not None:
        return _student_from_path(config, data, teacher, config.student)
    if config.teacher_cache is not None:
        return _cached_student(config, data, config.teacher_cache)
    drawn = config.student_weights == "random"  # which allows more layers than the teacher's
    chosen = (drawn and config.student_layers) or layers or layers_of(config, teacher)
    sizes, weights = config.student_config, config.student_weights
    try:
        student = student_from_teacher(teacher, chosen, config=sizes, weights=cast(Any, weights))
    except (TypeError, ValueError) as error:
        option = "student-config" if sizes else f"teacher-layers {config.teacher_layers}"
        raise InputError(f"--{option}: {error}") from error
    return cast(PreTrainedModel, student)


def _cached_student(config: Config, data: Data, folder: Path) -> PreTrainedModel:
    """The student in a cache; random weights are drawn again for another seed."""
    auto = getattr(transformers, data.task.head)
    options = models.attention_for(config.method, config.attention)
    written, remote = data.cached["settings"], config.trust_remote_code
    if written["student_weights"] == "random" and written["seed"] != config.seed:
        found = cached_config(config, folder)
        return auto.from_config(found, trust_remote_code=remote, **options)
    return models.load("--teacher-cache", str(folder / STUDENT), auto, remote, **options)


def layers_of(
    config: Config, teacher: PreTrainedModel, batches: Batches | None = None
) -> list[int]:
    """Teacher layers of the student; a selection without ``batches`` gives uniform ones."""
    try:
        backbone = Backbone(teacher, "teacher")
        depth = backbone.num_layers
    except (TypeError, ValueError) as error:
        raise InputError(f"--teacher {config.teacher}: {error}") from error
    scheme = config.teacher_layers
    if scheme in (*SCHEMES, SELECT):
        wanted = config.student_layers or max(1, depth // 2)
        models.check_depth("--student-layers", wanted, depth)
        if scheme == SELECT and batches is not None:
            try:
                return with_first(select_layers(teacher, batches, wanted), backbone)
            except (TypeError, ValueError) as error:
                raise InputError(f"--teacher-layers {SELECT}: {error}") from error
        try:
            return layers_to_keep("uniform" if scheme == SELECT else scheme, backbone, wanted)
        except ValueError as error:
            raise InputError(f"--student-layers {wanted}: {error}") from error
    try:
        layers = [int(part) for part in scheme.split(",")]
    except ValueError:
        raise InputError(
            f"--teacher-layers {scheme!r}: neither a scheme nor layer numbers "
            f"such as 2,4,6; {nearest(scheme, (*SCHEMES, SELECT))}"
        ) from None
    if config.student_layers not in (None, len(layers)):
        raise InputError(
            f"--teacher-layers names {len(layers)} layers but --student-layers is "
            f"{config.student_layers}"
        )
    return layers


def _student_from_path(config: Config, data: Data, teacher: Any, name: str) -> PreTrainedModel:
    """The student ``name``, checked against the teacher's configuration."""
    task, tokenizer = data.task, data.tokenizer
    live = teacher.live.values() if isinstance(teacher, ByRow) else [teacher]
    theirs: Any = next((model.config for model in live if hasattr(model, "config")), None)
    if config.teacher_cache is not None:
        theirs = cached_config(config, config.teacher_cache)
    # A student of a cache reads the tokens of the student in the cache.
    own_tokens = data.teacher_tokenizer is not None and config.teacher_cache is None
    remote = config.trust_remote_code
    found = models.load("--student", name, AutoConfig, remote)
    known, others = found.vocab_size, (theirs or found).vocab_size
    if own_tokens and len(tokenizer) > known:
        raise InputError(
            f"--student {name}: its tokenizer has {len(tokenizer)} tokens, its vocabulary {known}"
        )
    # Heads of language models are padded to unlike sizes.
    unlike = task.two_tokenizers != "spans" or len(tokenizer) > known
    if not own_tokens and known != others and unlike:
        raise InputError(f"--student {name}: {other_vocabulary(known, others)}")
    if not own_tokens:
        models.check_same_tokens("--student", name, tokenizer, remote)
    classes = task.names or []
    fitting = classes and task.num_labels == found.num_labels
    ours = (type(task).of(found).names if fitting else None) or []
    if ours != classes and by_names(classes, ours) not in (None, classes):
        raise InputError(
            f"--student {name}: its head's classes are {', '.join(ours)} and the teacher's "
            f"{', '.join(classes)}; both heads need one order"
        )
    models.fit_config(found, task, tokenizer)
    options = models.attention_for(config.method, config.attention)
    student, fresh = models.load_weights(
        "--student", name, remote, type(task), config=found, **options
    )
    if fresh and config.lora and task.head not in TRAINED:
        raise InputError(
            f"--student {name}: it has no {task.head_name} ({fresh[0]} would be random), and with "
            f"--lora adapters alone learn"
        )
    return student
