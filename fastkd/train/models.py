"""Teacher, student and tokenizer, loaded and fitted to the data."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fastkd._core.extras import MissingExtra
from fastkd.distill.baselines import BASELINES
from fastkd.distill.by_row import ByRow
from fastkd.distill.cache import TeacherCache
from fastkd.distill.layers import select_layers
from fastkd.distill.methods import AttentionMSE, Method, from_preset, resolve
from fastkd.integrations.served_teacher import ServedTeacher
from fastkd.models.backbone import Backbone
from fastkd.models.families import reads_whole_rows
from fastkd.models.inputs import Batches, reads_last_token
from fastkd.models.layer_map import SCHEMES
from fastkd.models.student import layers_to_keep, student_from_teacher, with_first
from fastkd.models.vocabulary import other_vocabulary
from fastkd.train import tasks
from fastkd.train.errors import InputError, first_line, nearest
from fastkd.train.generation import Generation
from fastkd.train.hub import check_place, file_of, hub_answers, is_served, why_not
from fastkd.train.labels import by_names
from fastkd.train.lora import TRAINED
from fastkd.train.options import as_json, set_flags
from fastkd.train.progress import Display
from fastkd.train.recipes import MAKES
from fastkd.train.row_teachers import teachers_of
from fastkd.train.same_tokens import difference, other_token, same_tokens, sample
from fastkd.train.saving import find_damage, read_manifest
from fastkd.train.settings import AUTO, MAX_LENGTH, NAMES, SELECT, Pairing
from fastkd.train.tasks.base import ClassTask, Corpus, Task
from fastkd.train.tasks.base import fit_config as fit_head
from fastkd.train.tasks.regression import Regression

# Directory in a cache of `fastkd cache`: the initial student with its tokenizer.
STUDENT = "student"
# Directory in such a cache: the teacher's tokenizer, if it isn't the student's.
TEACHERS_TOKENIZER = "tokenizer"
# A model with a tokenizer has one of these files.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def load(option: str, name: str, auto: Any, remote_code: bool, **options: Any) -> Any:
    """``auto.from_pretrained``, with errors of transformers and the hub as one sentence.

    Code that comes with a model runs only with ``remote_code``.
    """
    if is_served(name):
        raise InputError(f"{option} {name}: a server teaches `fastkd distill` and `fastkd cache`")
    check_place(option, name)
    local = Path(name).expanduser()
    if not local.exists():
        hub_answers()
    try:
        path = str(local) if name.startswith("~") else name
        return auto.from_pretrained(path, trust_remote_code=remote_code, **options)
    except MissingExtra:
        raise
    except Exception as error:  # damaged files make transformers raise anything
        if local.exists():
            reason = f"can't be loaded from there ({first_line(error)})"
        else:
            reason = f"no such directory, and the hub doesn't give it ({why_not(error)})"
        if "trust_remote_code" in str(error):
            reason = (
                "can't be loaded from there without running code that comes with it; "
                "--trust-remote-code allows that"
            )
        raise InputError(f"{option} {name}: {reason}") from error


def load_tokenizer(settings: Pairing, who: str = "teacher") -> Any:
    """The tokenizer of --tokenizer, or the teacher's or student's."""
    name = who if settings.tokenizer is None else "tokenizer"
    return tokenizer_of(f"--{name}", getattr(settings, name), settings.trust_remote_code)


def load_tokenizers(settings: Pairing, corpus: Corpus, display: Display) -> tuple[Any, Any]:
    """The student's tokenizer, and the teacher's if it differs, else None.

    Tokenizers are compared on training rows. Where --tokenizer, or the teacher's tokenizer for the
    student, reads a row otherwise than the model's own, a line shows both readings.

    Raises:
        InputError: an id of --tokenizer is another token of a model's own tokenizer.
    """
    read = load_tokenizer(settings)
    if settings.tokenizer is None and settings.student is None:
        return read, None
    rows = sample(corpus)
    task, remote = corpus.task, settings.trust_remote_code
    whose = "the teacher's" if settings.tokenizer is None else f"--tokenizer {settings.tokenizer}"
    for option, name in (("--teacher", settings.teacher), ("--student", settings.student)):
        if name is None or (option == "--teacher" and settings.tokenizer is None):
            continue
        if not _has_tokenizer(option, name):
            continue
        own = tokenizer_of(option, name, remote)
        special = task.two_tokenizers != "spans"
        if settings.tokenizer is not None:
            other = other_token(read, own, rows[1])
            if other is not None:
                raise InputError(
                    f"{whose}: its token {other[0]} is {other[1]!r}, and {other[2]!r} in the "
                    f"tokenizer of {option} {name}; leave --tokenizer out"
                )
        elif task.two_tokenizers and not same_tokens(own, read, rows, special):
            return own, read
        found = difference(read, own, rows, special)
        if found is None and len(read) > load(option, name, AutoConfig, remote).vocab_size:
            read = own  # without the teacher's further tokens
        if found is not None:
            display.say(
                f"warning: {whose} tokenizer reads row {found.row} as ... {' '.join(found.first)}, "
                f"that of {option} {name} as ... {' '.join(found.second)}"
            )
    return read, None


def check_same_tokens(option: str, name: str, tokenizer: Any, remote_code: bool) -> None:
    """Raise if the tokenizer of the model ``name`` gives a token another id than ``tokenizer``."""
    if not _has_tokenizer(option, name):
        return
    own = load(option, name, AutoTokenizer, remote_code).get_vocab()
    theirs = tokenizer.get_vocab()
    others = [word for word, i in own.items() if theirs.get(word, i) != i]
    if others:
        word = min(others, key=own.__getitem__)
        raise InputError(
            f"{option} {name}: {word!r} is token {own[word]} of its tokenizer and {theirs[word]} "
            "of the teacher's; both must read the same tokens"
        )


def _has_tokenizer(option: str, name: str) -> bool:
    check_place(option, name)
    try:
        return any(file_of(name, file) is not None for file in TOKENIZER_FILES)
    except InputError as error:
        raise InputError(f"{option} {error}") from error


def tokenizer_of(option: str, name: str, remote_code: bool) -> Any:
    """A tokenizer with a padding token, the end token where it has none of its own."""
    tokenizer = load(option, name, AutoTokenizer, remote_code)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(f"{option} {name}: its tokenizer has no padding and no end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_trained(
    name: str, remote_code: bool, task: str | None = None
) -> tuple[PreTrainedModel, Any, Task]:
    """A trained model given as --model, its tokenizer and its task."""
    tokenizer = tokenizer_of("--model", name, remote_code)
    config = load("--model", name, AutoConfig, remote_code)
    report = read_manifest(Path(name).expanduser()) or {}
    trained = report.get("task")
    trained = trained if isinstance(trained, str) else None
    kind = tasks.of_model(f"--model {name}", tasks.kind_of(task), trained, config)
    model, fresh = _load_weights("--model", name, remote_code, kind)
    if fresh:
        raise InputError(f"--model {name}: it has no {kind.head_name} ({fresh[0]} would be random)")
    fit_padding(model.config, tokenizer)
    found = kind.of(model.config, report)
    if kind.generation is not None:
        found = replace(found, generation=Generation.of(report.get("settings")))
    return model, tokenizer, found


def _load_weights(
    option: str, name: str, remote_code: bool, task: type[Task], **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """A model with its head, and names of the head's weights that its files lack."""
    model, loaded = load(
        option,
        name,
        getattr(transformers, task.head),
        remote_code,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    check_causal(task, model.config, f"{option} {name}")
    fresh = sorted(loaded["missing_keys"]) + sorted(key[0] for key in loaded["mismatched_keys"])
    body = "" if headless(task) else f"{model.base_model_prefix}."
    # Encoders are often published without their pooler, which belongs to the head.
    lost = [key for key in fresh if key.startswith(body) and "pooler" not in key]
    if lost:
        raise InputError(
            f"{option} {name}: its weights don't fit its configuration ({lost[0]} is missing or of "
            "another size)"
        )
    return model, [] if headless(task) else fresh


def headless(task: Task | type[Task]) -> bool:
    """Whether the models of ``task`` have no head and return hidden states."""
    return task.head == "AutoModel"


def check_causal(task: Task | type[Task], config: Any, who: str) -> None:
    """Raise if a task predicts next tokens and the model reads them; ``who`` prefixes the error."""
    if task.head == "AutoModelForCausalLM" and reads_whole_rows(config):
        raise InputError(
            f"{who}: a {config.model_type} model attends to both sides, and so sees the "
            "token to predict; use a decoder, or --task masked-lm"
        )


def be_quiet() -> None:
    """Silence transformers; fastkd has a display of its own."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def finished_task(settings: Pairing) -> Task | None:
    """The task of the teacher's head if that is finished, else None."""
    kind = tasks.of_file(settings.kind, settings.train)
    if not issubclass(kind, ClassTask | Regression) or getattr(settings, "finetune_teacher", False):
        return None
    cache = getattr(settings, "teacher_cache", None)
    if is_served(settings.teacher) or getattr(settings, "teachers", None) is not None:
        return None
    if cache is None:
        config = load("--teacher", settings.teacher, AutoConfig, settings.trust_remote_code)
    elif (cache / STUDENT).is_dir():
        config = _cached_config(settings, cache)
    else:
        return None  # `load_cached_teacher` says what is missing
    ending = kind.head.removeprefix("AutoModel")
    if not any(name.endswith(ending) for name in config.architectures or ()):
        return None
    return kind.of(config)


def load_teacher(
    settings: Pairing, name: str, corpus: Corpus, tokenizer: Any, fresh_head: bool = False
) -> tuple[PreTrainedModel, Corpus]:
    """The teacher ``name`` with a head for this corpus, and the corpus in the head's label order.

    A random head is an error without ``fresh_head``.
    """
    config = load("--teacher", name, AutoConfig, settings.trust_remote_code)
    task = corpus.task
    fitting = task.num_labels in (None, config.num_labels)
    head = type(task).of(config) if fitting else None
    fit_config(config, task, tokenizer)
    transformers.set_seed(settings.seed)  # imports PEFT, which predictions do not need
    options = attention_for(settings.method, settings.attention)
    if fresh_head:
        options["dtype"] = torch.float32  # see `assemble`
    teacher, fresh = _load_weights(
        "--teacher", name, settings.trust_remote_code, type(task), config=config, **options
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
    who = f"--teacher {name}"
    corpus = task.match(corpus, head, settings.label_order, who, fresh_head)
    fit_config(teacher.config, corpus.task, tokenizer)
    return teacher, corpus


def served_teacher(settings: Any) -> tuple[ServedTeacher, Any]:
    """The teacher in the server of --teacher, and the student's tokenizer.

    Raises:
        InputError: no --student or --teacher-model, or an option that needs the teacher's weights.
    """
    url = settings.teacher
    if settings.student is None or settings.teacher_model is None:
        raise InputError(
            f"--teacher {url}: a server's model can't be cut; pass --student, which reads its "
            "tokens, and --teacher-model NAME"
        )
    needed = ("finetune_teacher", "student_layers", "student_config")
    for flag in set_flags(settings, *(name for name in needed if hasattr(settings, name))):
        raise InputError(f"{flag}: needs the teacher's weights, and --teacher {url} is a server")
    tokenizer = load_tokenizer(settings, "student")
    if settings.method == AUTO:
        raise InputError(
            f"--teacher {url}: a server's log-probabilities have temperature 1; pass --method "
            "soft_targets --set temperature=1"
        )
    method: Any = make_method(settings.method, settings.options, settings.preset)
    if getattr(method, "temperature", 1.0) != 1:
        raise InputError(
            f"--method {settings.method}: has temperature {method.temperature}, a server's "
            "log-probabilities have 1; pass --set temperature=1"
        )
    return ServedTeacher(url, settings.teacher_model, top_k=settings.top_k or 20), tokenizer


def row_teachers(settings: Any, corpus: Corpus) -> tuple[ByRow, Any, Corpus]:
    """The teachers of --teachers, the tokenizer of all models, and the corpus in their order."""
    tokenizer = load_tokenizer(settings, "student")
    remote, found, order = settings.trust_remote_code, dict[str, Any](), None
    for who, entry in teachers_of(settings.teachers).items():
        if "url" in entry:
            top_k = entry.get("top_k", 20)
            found[who] = ServedTeacher(entry["url"], entry["model"], top_k=top_k)
            continue
        if "cache" in entry:
            try:
                found[who] = TeacherCache(Path(entry["cache"]), tokenizer=tokenizer)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                raise InputError(f"--teachers {who}: {error}") from error
            config = load("--teachers", str(Path(entry["cache"]) / STUDENT), AutoConfig, remote)
            head = type(corpus.task).of(config)
            matched = corpus.task.match(corpus, head, settings.label_order, f"--teachers {who}")
        else:
            check_same_tokens("--teachers", entry["model"], tokenizer, remote)
            found[who], matched = load_teacher(settings, entry["model"], corpus, tokenizer)
        if order not in (None, matched.names):
            raise InputError(
                f"--teachers {who}: its classes are {', '.join(matched.names or [])}, those of "
                f"the first {', '.join(order or [])}; all heads need one order"
            )
        corpus, order = matched, matched.names
    return ByRow(found), tokenizer, corpus


def check_depth(option: str, wanted: int, depth: int) -> None:
    """Raise if the student is to have more layers than the teacher's ``depth``."""
    if wanted > depth:
        raise InputError(f"{option} {wanted}: the teacher has only {depth} layers")


def fit_config(config: Any, task: Task, tokenizer: Any) -> None:
    """Set the task and the padding token in a model's configuration."""
    fit_head(task, config)
    fit_padding(config, tokenizer)


def fit_padding(config: Any, tokenizer: Any) -> None:
    """Set the padding token, by which classifiers of decoders find the last token.

    Other families keep an id that is set: RoBERTa counts positions from it.
    """
    if config.pad_token_id is None or (
        tokenizer.pad_token_id is not None
        and reads_last_token(config)
        and not config.is_encoder_decoder
    ):
        config.pad_token_id = tokenizer.pad_token_id


def longest(tokenizer: Any, model: PreTrainedModel) -> int:
    """Maximum number of tokens that ``model`` reads."""
    limit = min(tokenizer.model_max_length, sys.maxsize)  # 1e30 without a limit
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions <= 0:  # XLNet has -1: no limit
        return limit
    for name, table in model.named_modules():
        # RoBERTa and related models count positions from padding_idx + 1.
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            positions -= table.padding_idx + 1
            break
    return min(limit, positions)


def fitting_length(max_length: int, tokenizer: Any, model: PreTrainedModel, who: str) -> int:
    """``max_length``, the default lowered to the limit of ``model``, called ``who`` in errors.

    Raises:
        InputError: a ``max_length`` other than the default exceeds the limit.
    """
    limit = longest(tokenizer, model)
    if max_length > limit and max_length != MAX_LENGTH:
        raise InputError(f"--max-length {max_length}: the {who} reads at most {limit}")
    return min(max_length, limit)


def load_cached_teacher(
    settings: Pairing, folder: Path, corpus: Corpus
) -> tuple[TeacherCache, dict[str, Any], Any, Any, Corpus]:
    """The cache, its report, the student's tokenizer, the teacher's if it differs, and the corpus.

    The corpus is in the teacher's label order.

    Options of `fastkd cache` may be repeated: --teacher and --tokenizer must have the same content,
    options of the student the same values.
    """
    option = "--teacher-cache"
    about = read_manifest(folder)
    if not (folder / STUDENT).is_dir() or about is None:
        raise InputError(f"{option} {folder}: no complete cache there; `fastkd cache` writes one")
    tokenizer = tokenizer_of(option, str(folder / STUDENT), settings.trust_remote_code)
    again = as_json(settings)
    for flag in set_flags(settings, *MAKES[1:]):
        name = flag.removeprefix("--").replace("-", "_")
        written = about["settings"][name]
        if again[name] != written:
            raise InputError(
                f"{option} {folder} was written with {flag} {written or 'left out'}, not "
                f"{again[name]}; leave {flag} out, or write another cache"
            )
    teachers, remote = None, settings.trust_remote_code
    if (folder / TEACHERS_TOKENIZER).is_dir():
        teachers = tokenizer_of(option, str(folder / TEACHERS_TOKENIZER), remote)
    teacher, read = None, teachers or tokenizer
    if settings.teacher is not None or settings.tokenizer is not None:
        read = load_tokenizer(settings)
    if settings.teacher is not None:
        teacher, _ = load_teacher(settings, settings.teacher, corpus, read)
    try:
        cache = TeacherCache(folder, teacher=teacher, tokenizer=read)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"{option} {folder}: {error}") from error
    why = find_damage(folder / STUDENT)
    if why:
        raise InputError(
            f"{option} {folder}: its student is damaged ({why}); the same `fastkd cache` again "
            "writes it"
        )
    config = _cached_config(settings, folder)
    task = corpus.task
    if task.num_labels not in (None, config.num_labels):
        raise InputError(
            f"{option} {folder}: its teacher's head has {config.num_labels} outputs, the data "
            f"needs {task.num_labels}"
        )
    head = type(task).of(config)
    corpus = task.match(corpus, head, settings.label_order, f"{option} {folder}")
    if not corpus.task.teacher_metrics.isdisjoint(corpus.metrics):
        raise InputError(
            f"{option} {folder}: it has no outputs of the teacher on the evaluation rows, which "
            f"{corpus.metrics[0]} compares; pass --teacher"
        )
    return cache, about, tokenizer, teachers, corpus


def _cached_config(settings: Pairing, folder: Path) -> Any:
    """Configuration of the student in a cache, whose head is the teacher's."""
    return load("--teacher-cache", str(folder / STUDENT), AutoConfig, settings.trust_remote_code)


def make_student(
    settings: Pairing,
    teacher: Any,
    tokenizer: Any,
    task: Task,
    layers: list[int] | None = None,
    cache: Path | None = None,
    own_tokens: bool = False,
) -> PreTrainedModel:
    """The student: from --student, from a ``cache``, or made of ``layers`` of the teacher.

    ``layers`` defaults to --teacher-layers. ``own_tokens``: the tokenizer is the student's own.
    """
    if cache is not None:
        if settings.student is not None:
            config = _cached_config(settings, cache)
            return _student_from_path(settings, settings.student, config, tokenizer, task)
        auto = getattr(transformers, task.head)
        options = attention_for(settings.method, settings.attention)
        written = (read_manifest(cache) or {})["settings"]
        if written["student_weights"] == "random" and written["seed"] != settings.seed:
            config, remote = _cached_config(settings, cache), settings.trust_remote_code
            return auto.from_config(config, trust_remote_code=remote, **options)
        path, remote = str(cache / STUDENT), settings.trust_remote_code
        return load("--teacher-cache", path, auto, remote, **options)
    if settings.student is not None:
        live = teacher.live.values() if isinstance(teacher, ByRow) else [teacher]
        config = next((model.config for model in live if hasattr(model, "config")), None)
        if config is None:
            config = load("--student", settings.student, AutoConfig, settings.trust_remote_code)
        return _student_from_path(settings, settings.student, config, tokenizer, task, own_tokens)
    drawn = settings.student_weights == "random"  # which allows more layers than the teacher's
    chosen = (drawn and settings.student_layers) or layers or layers_of(settings, teacher)
    sizes, weights = settings.student_config, settings.student_weights
    try:
        student = student_from_teacher(teacher, chosen, config=sizes, weights=cast(Any, weights))
    except (TypeError, ValueError) as error:
        option = "student-config" if sizes else f"teacher-layers {settings.teacher_layers}"
        raise InputError(f"--{option}: {error}") from error
    return cast(PreTrainedModel, student)


def layers_of(
    settings: Pairing, teacher: PreTrainedModel, batches: Batches | None = None
) -> list[int]:
    """Teacher layers of the student; a selection without ``batches`` gives uniform ones."""
    try:
        backbone = Backbone(teacher, "teacher")
        depth = backbone.num_layers
    except (TypeError, ValueError) as error:
        raise InputError(f"--teacher {settings.teacher}: {error}") from error
    scheme = settings.teacher_layers
    if scheme in (*SCHEMES, SELECT):
        wanted = settings.student_layers or max(1, depth // 2)
        check_depth("--student-layers", wanted, depth)
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
        layers = [int(part) for part in settings.teacher_layers.split(",")]
    except ValueError:
        raise InputError(
            f"--teacher-layers {settings.teacher_layers!r}: neither a scheme nor layer numbers "
            f"such as 2,4,6; {nearest(settings.teacher_layers, (*SCHEMES, SELECT))}"
        ) from None
    if settings.student_layers not in (None, len(layers)):
        raise InputError(
            f"--teacher-layers names {len(layers)} layers but --student-layers is "
            f"{settings.student_layers}"
        )
    return layers


def _student_from_path(
    settings: Pairing, name: str, teacher: Any, tokenizer: Any, task: Task, own_tokens: bool = False
) -> PreTrainedModel:
    """The student ``name``, checked against the ``teacher``'s configuration."""
    config = load("--student", name, AutoConfig, settings.trust_remote_code)
    known = config.vocab_size
    if own_tokens and len(tokenizer) > known:
        raise InputError(
            f"--student {name}: its tokenizer has {len(tokenizer)} tokens, its vocabulary {known}"
        )
    # Heads of language models are padded to unlike sizes.
    unlike = task.two_tokenizers != "spans" or len(tokenizer) > known
    if not own_tokens and known != teacher.vocab_size and unlike:
        raise InputError(f"--student {name}: {other_vocabulary(known, teacher.vocab_size)}")
    if not own_tokens:
        check_same_tokens("--student", name, tokenizer, settings.trust_remote_code)
    theirs = task.names or []
    fitting = theirs and task.num_labels == config.num_labels
    ours = (type(task).of(config).names if fitting else None) or []
    if ours != theirs and by_names(theirs, ours) not in (None, theirs):
        raise InputError(
            f"--student {name}: its head's classes are {', '.join(ours)} and the teacher's "
            f"{', '.join(theirs)}; both heads need one order"
        )
    fit_config(config, task, tokenizer)
    options = attention_for(settings.method, settings.attention)
    remote = settings.trust_remote_code
    student, fresh = _load_weights("--student", name, remote, type(task), config=config, **options)
    if fresh and settings.lora and task.head not in TRAINED:
        raise InputError(
            f"--student {name}: it has no {task.head_name} ({fresh[0]} would be random), and with "
            f"--lora adapters alone learn"
        )
    return student


def method_class(name: str) -> type[Method]:
    """Class of --method: a method, a baseline, or the user's package.module:Class."""
    if name == AUTO:
        raise InputError(f"--method {AUTO} is of one run; name the methods to compare")
    if ":" not in name and name not in NAMES:
        raise InputError(f"--method {name!r}; {nearest(name, NAMES)}")
    if ":" in name and "" not in sys.path:
        sys.path.append("")  # unlike python -m, the console script does not search here
    try:
        return BASELINES.get(name) or resolve(name)
    except (TypeError, ValueError) as error:
        raise InputError(f"--method: {error}") from error


def attention_for(method: str, attention: str | None) -> dict[str, Any]:
    """Options of ``from_pretrained`` for --attention; eager for methods with attention maps."""
    if attention is None and method != AUTO and issubclass(method_class(method), AttentionMSE):
        attention = "eager"
    return {} if attention is None else {"attn_implementation": attention}


def make_method(
    name: str,
    options: Mapping[str, Any],
    preset: str = "default",
    layers: list[int] | None = None,
    headless: bool = False,
    usual: Mapping[str, Any] = MappingProxyType({}),
) -> Method:
    """The method of --method, --preset and --set.

    ``layers``: teacher layers that it compares, unless --set names others. ``headless``: the models
    have no logits. ``usual``: default options, as far as the method has them.
    """
    kind = method_class(name)
    known = list(inspect.signature(kind).parameters)
    for option in options:
        if option not in known:
            raise InputError(f"--set {option}: {name} has no such option; {nearest(option, known)}")
    if layers is not None and "layers" in known:
        options = {"layers": layers, **options}
    options = {**{name: value for name, value in usual.items() if name in known}, **options}
    if headless:
        options = {**kind.headless, **options}
    try:
        return from_preset(kind, preset, options)
    except (TypeError, ValueError) as error:
        raise InputError(f"--method {name}: {error}") from error
