"""Teacher, student and tokenizer, loaded and made to fit the data, or one sentence why not."""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from fastkd._core.extras import MissingExtra
from fastkd.analysis.layers import Batches
from fastkd.distill.baselines import BASELINES, NAMES
from fastkd.distill.cache import TeacherCache
from fastkd.distill.capture import Backbone
from fastkd.distill.layers import SCHEMES, layer_map, select_layers
from fastkd.distill.methods import AttentionMSE, Method, from_preset, resolve
from fastkd.distill.student import student_from_teacher
from fastkd.train.data import Corpus, meaning, read_as_ids
from fastkd.train.errors import InputError, nearest
from fastkd.train.hub import hub_answers, why_not
from fastkd.train.rows import Rows
from fastkd.train.saving import damage, read_marker
from fastkd.train.settings import SELECT, Pairing

# Where a cache of `fastkd cache` keeps the student as it begins, with the tokenizer.
STUDENT = "student"


def load(option: str, name: str, auto: Any, remote_code: bool, **options: Any) -> Any:
    """``auto.from_pretrained``, which runs no code of the model's own unless that is allowed.

    What transformers and the hub raise is one sentence.
    """
    local = Path(name).expanduser()
    if not local.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"{option} {name}: no such directory")
    if local.is_file():
        raise InputError(
            f"{option} {name}: this is a file; give the directory that holds the model"
        )
    if not local.exists():
        hub_answers()
    try:
        path = str(local) if name.startswith("~") else name
        return auto.from_pretrained(path, trust_remote_code=remote_code, **options)
    except MissingExtra:
        raise
    except Exception as error:  # damaged files make transformers raise anything
        if local.exists():
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            reason = f"can't be loaded from there ({line})"
        else:
            reason = f"no such directory, and the hub doesn't give it ({why_not(error)})"
        if "trust_remote_code" in str(error):
            reason = (
                "can't be loaded from there without running code that comes with it; "
                "--trust-remote-code allows that"
            )
        raise InputError(f"{option} {name}: {reason}") from error


def load_tokenizer(settings: Pairing) -> Any:
    """The tokenizer from a path or hub name, the teacher's if none is given; able to pad."""
    option = "--teacher" if settings.tokenizer is None else "--tokenizer"
    name = settings.tokenizer or settings.teacher
    tokenizer = load(option, name, AutoTokenizer, settings.trust_remote_code)
    let_pad(tokenizer, option, name)
    return tokenizer


def let_pad(tokenizer: Any, option: str, name: str) -> None:
    """Pad with the end token where there is no padding token."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(f"{option} {name}: its tokenizer has no padding and no end token")
        tokenizer.pad_token = tokenizer.eos_token


def load_classifier(name: str, remote_code: bool) -> tuple[PreTrainedModel, Any]:
    """A finished classifier, called --model, and its tokenizer."""
    tokenizer = load("--model", name, AutoTokenizer, remote_code)
    let_pad(tokenizer, "--model", name)
    model, fresh = _load_weights("--model", name, remote_code)
    if fresh:
        raise InputError(
            f"--model {name}: it has no classification head ({fresh[0]} would be random)"
        )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def class_names(config: Any) -> list[str] | None:
    """The classes of a head; None if it predicts a number."""
    if config.num_labels == 1:
        return None
    return [str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels)]


def _load_weights(
    option: str, name: str, remote_code: bool, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """A classifier, and the names of the weights that its files don't hold, in its head only."""
    model, loaded = load(
        option,
        name,
        AutoModelForSequenceClassification,
        remote_code,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    fresh = sorted(loaded["missing_keys"]) + sorted(key[0] for key in loaded["mismatched_keys"])
    body = f"{model.base_model_prefix}."
    # Encoders are often published without their pooler, which belongs to the head.
    lost = [key for key in fresh if key.startswith(body) and "pooler" not in key]
    if lost:
        raise InputError(
            f"{option} {name}: its weights don't fit its configuration ({lost[0]} is missing or of "
            "another size)"
        )
    return model, fresh


def be_quiet() -> None:
    """Leave the talking to fastkd's own display."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def load_teacher(
    settings: Pairing, name: str, corpus: Corpus, tokenizer: Any, fresh_head: bool = False
) -> tuple[PreTrainedModel, Corpus]:
    """The teacher called ``name`` with a head for this corpus, and the corpus in its order.

    The head may be random only where a ``fresh_head`` will do.
    """
    config = load("--teacher", name, AutoConfig, settings.trust_remote_code)
    fitting = config.num_labels == corpus.num_labels
    head = class_names(config) if fitting else None
    fit_config(config, corpus.names, tokenizer)
    set_seed(settings.seed)
    options = attention_for(settings.method, settings.attention)
    if fresh_head:
        options["dtype"] = torch.float32  # see `assemble`
    teacher, fresh = _load_weights(
        "--teacher", name, settings.trust_remote_code, config=config, **options
    )
    if fresh and not fresh_head:
        what = "no classification head" if fitting else f"no head for {corpus.num_labels} labels"
        raise InputError(
            f"--teacher {name}: it has {what} ({', '.join(fresh[:3])} would be random); "
            "pass --finetune-teacher EPOCHS to train it first"
        )
    if len(tokenizer) > teacher.config.vocab_size:
        raise InputError(
            f"--tokenizer has {len(tokenizer)} tokens but the teacher's vocabulary has "
            f"{teacher.config.vocab_size}"
        )
    who = f"--teacher {settings.teacher}"
    corpus = _in_order_of_head(settings.label_order, corpus, head, who, fresh_head)
    fit_config(teacher.config, corpus.names, tokenizer)
    return teacher, corpus


def check_depth(option: str, wanted: int, depth: int) -> None:
    """Raise unless a teacher of ``depth`` layers has so many for the student."""
    if wanted > depth:
        raise InputError(f"{option} {wanted}: the teacher has only {depth} layers")


def fit_config(config: Any, names: list[str] | None, tokenizer: Any) -> None:
    """Make ``config`` one for these classes, or for a number, whatever it was trained on before."""
    config.num_labels = 1 if names is None else len(names)
    config.problem_type = "regression" if names is None else "single_label_classification"
    if names is not None:
        config.id2label = dict(enumerate(names))
        config.label2id = {label: i for i, label in enumerate(names)}
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id


def _in_order_of_head(
    asked: str | None, corpus: Corpus, head: list[str] | None, who: str, fresh: bool = False
) -> Corpus:
    """``corpus`` with its classes in the order of those of ``who``'s ``head``, by their names.

    What is ``asked`` with --label-order goes before it. Without a fitting ``head`` the order is
    free. One that doesn't say what its classes are is taken in the order of numbered classes,
    unless it learns these ``fresh``.
    """
    names = corpus.names
    if names is None:
        if asked is not None:
            raise InputError("--label-order is about classes, and the labels are numbers")
        return corpus
    if asked is not None:
        return in_order_of(label_order(asked, names, "the data"), corpus)
    if head is None:
        return corpus
    order = _by_names(names, head)
    if order is not None or fresh:
        return in_order_of(order, corpus)
    if not corpus.numbered:
        raise InputError(
            f"{who}: its head names its classes {', '.join(head)}, the data {', '.join(names)}; "
            "pass --label-order with the data's classes in the head's order"
        )
    reading = read_as_ids(dict(enumerate(names)), head, who)
    return dataclasses.replace(corpus, reading=reading)


def label_order(given: str, names: list[str], whose: str) -> list[str]:
    """What --label-order says, which must be each of ``names`` once."""
    order = [name.strip() for name in given.split(",")]
    if sorted(order) != sorted(names):
        raise InputError(
            f"--label-order {given}: must name each class of {whose} once, "
            f"and they are {', '.join(names)}"
        )
    return order


def _by_names(names: list[str], head: list[str]) -> list[str] | None:
    """``names`` in the order of the ``head`` that has these, or their meanings; None if not."""
    if sorted(head) == sorted(names):
        return head
    ours = {meaning(name): name for name in names}
    meant = [meaning(name) for name in head]
    if len(ours) == len(names) and sorted(meant) == sorted(ours):
        return [ours[name] for name in meant]
    return None


def in_order_of(names: list[str] | None, corpus: Corpus) -> Corpus:
    """``corpus`` with the classes in the order of ``names``, if these are its classes."""
    if names is None or corpus.names is None or names == corpus.names:
        return corpus
    if sorted(names) != sorted(corpus.names):
        return corpus
    new = np.array([names.index(name) for name in corpus.names])

    def renumber(rows: Rows) -> Rows:
        return dataclasses.replace(rows, labels=new[rows.labels])

    return dataclasses.replace(
        corpus,
        train=renumber(corpus.train),
        evals={k: renumber(rows) for k, rows in corpus.evals.items()},
        test=corpus.test and renumber(corpus.test),
        names=names,
        positive=int(new[corpus.positive]),
    )


def longest(tokenizer: Any, model: PreTrainedModel) -> int:
    """How many tokens ``model`` can read."""
    limit = min(tokenizer.model_max_length, sys.maxsize)  # one that knows no limit says 1e30
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions <= 0:  # XLNet has -1: no limit
        return limit
    for name, table in model.named_modules():
        # RoBERTa and its kin count positions from the one behind the padding's.
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            positions -= table.padding_idx + 1
            break
    return min(limit, positions)


def check_length(max_length: int, tokenizer: Any, model: PreTrainedModel, who: str) -> None:
    """Raise unless ``model``, called ``who``, can read so many tokens."""
    limit = longest(tokenizer, model)
    if max_length > limit:
        raise InputError(f"--max-length {max_length}: the {who} reads at most {limit}")


def load_cached_teacher(
    settings: Pairing, folder: Path, corpus: Corpus
) -> tuple[TeacherCache, dict[str, Any], Any, Corpus]:
    """What `fastkd cache` wrote: cache, report, tokenizer; and the corpus in its order."""
    option = "--teacher-cache"
    about = read_marker(folder)
    if not (folder / STUDENT).is_dir() or about is None:
        raise InputError(f"{option} {folder}: no complete cache there; `fastkd cache` writes one")
    name = str(folder / STUDENT)
    tokenizer = load(option, name, AutoTokenizer, settings.trust_remote_code)
    let_pad(tokenizer, option, name)
    try:
        cache = TeacherCache(folder, tokenizer=tokenizer)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"{option} {folder}: {error}") from error
    why = damage(folder / STUDENT)
    if why:
        raise InputError(
            f"{option} {folder}: its student is damaged ({why}); the same `fastkd cache` again "
            "writes it"
        )
    config = _cached_config(settings, folder)
    if config.num_labels != corpus.num_labels:
        raise InputError(
            f"{option} {folder}: its teacher's head has {config.num_labels} outputs, the data "
            f"needs {corpus.num_labels}"
        )
    who, head = f"{option} {folder}", class_names(config)
    return cache, about, tokenizer, _in_order_of_head(settings.label_order, corpus, head, who)


def _cached_config(settings: Pairing, folder: Path) -> Any:
    """The configuration of the student in a cache; its head is the teacher's."""
    return load("--teacher-cache", str(folder / STUDENT), AutoConfig, settings.trust_remote_code)


def make_student(
    settings: Pairing,
    teacher: Any,
    tokenizer: Any,
    layers: list[int] | None = None,
    cache: Path | None = None,
) -> PreTrainedModel:
    """The student: a path or hub name, what a ``cache`` holds, or ``layers`` of the teacher.

    Those are by default what --teacher-layers says.
    """
    if cache is not None:
        if settings.student is not None:
            config = _cached_config(settings, cache)
            return _student_from_path(settings, settings.student, config, tokenizer)
        return load(
            "--teacher-cache",
            str(cache / STUDENT),
            AutoModelForSequenceClassification,
            settings.trust_remote_code,
            **attention_for(settings.method, settings.attention),
        )
    if settings.student is not None:
        return _student_from_path(settings, settings.student, teacher.config, tokenizer)
    chosen = layers or layers_of(settings, teacher)
    try:
        return cast(PreTrainedModel, student_from_teacher(teacher, chosen))
    except (TypeError, ValueError) as error:
        raise InputError(f"--teacher-layers {settings.teacher_layers}: {error}") from error


def layers_of(
    settings: Pairing, teacher: PreTrainedModel, batches: Batches | None = None
) -> list[int]:
    """The teacher layers that make the student; without ``batches`` as many as a choice takes."""
    try:
        depth = Backbone(teacher, "teacher").num_layers
    except (TypeError, ValueError) as error:
        raise InputError(f"--teacher {settings.teacher}: {error}") from error
    scheme = settings.teacher_layers
    if scheme in (*SCHEMES, SELECT):
        wanted = settings.student_layers or max(1, depth // 2)
        check_depth("--student-layers", wanted, depth)
        if scheme == SELECT and batches is not None:
            try:
                return select_layers(teacher, batches, wanted)
            except (TypeError, ValueError) as error:
                raise InputError(f"--teacher-layers {SELECT}: {error}") from error
        return layer_map("uniform" if scheme == SELECT else scheme, depth, wanted)
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
    settings: Pairing, name: str, teacher: Any, tokenizer: Any
) -> PreTrainedModel:
    """The student called ``name``, made to fit the ``teacher``, a configuration."""
    config = load("--student", name, AutoConfig, settings.trust_remote_code)
    if config.vocab_size != teacher.vocab_size:
        raise InputError(
            f"--student {name}: its vocabulary has {config.vocab_size} tokens, the teacher's "
            f"{teacher.vocab_size}; both must read the same tokens"
        )
    names = None if teacher.num_labels == 1 else [*(teacher.id2label or {}).values()]
    fit_config(config, names, tokenizer)
    options = attention_for(settings.method, settings.attention)
    return _load_weights("--student", name, settings.trust_remote_code, config=config, **options)[0]


def method_class(name: str) -> type[Method]:
    """The class called ``name`` on the command line: a method, a baseline, or one's own."""
    if ":" not in name and name not in NAMES:
        raise InputError(f"--method {name!r}; {nearest(name, NAMES)}")
    if ":" in name and "" not in sys.path:
        sys.path.append("")  # the console script, unlike python -m, doesn't look here
    try:
        return BASELINES.get(name) or resolve(name)
    except (TypeError, ValueError) as error:
        raise InputError(f"--method: {error}") from error


def attention_for(method: str, asked: str | None) -> dict[str, Any]:
    """How models are loaded for a method, by --attention or as attention maps need it."""
    if asked is None and issubclass(method_class(method), AttentionMSE):
        asked = "eager"
    return {} if asked is None else {"attn_implementation": asked}


def make_method(
    name: str,
    options: Mapping[str, Any],
    preset: str = "default",
    layers: list[int] | None = None,
) -> Method:
    """The method called ``name`` on the command line, with --preset and --set.

    ``layers`` are the teacher layers that it compares, if it can and --set doesn't say which.
    """
    kind = method_class(name)
    known = list(inspect.signature(kind).parameters)
    for option in options:
        if option not in known:
            raise InputError(f"--set {option}: {name} has no such option; {nearest(option, known)}")
    if layers is not None and "layers" in known:
        options = {"layers": layers, **options}
    try:
        return from_preset(kind, preset, options)
    except (TypeError, ValueError) as error:
        raise InputError(f"--method {name}: {error}") from error


def num_bytes(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def count(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
