"""Teacher, student and tokenizer, loaded and fitted to the data."""

import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fastkd._core.extras import MissingExtra, require
from fastkd.distill.baselines import BASELINES
from fastkd.distill.methods import AttentionMSE, Method, from_preset, resolve
from fastkd.models.inputs import reads_last_token, reads_whole_rows
from fastkd.train import tasks
from fastkd.train.config import AUTO, MAX_LENGTH, NAMES, Config
from fastkd.train.errors import InputError, first_line, nearest
from fastkd.train.generation import Generation
from fastkd.train.hub import file_of, hub_answers, why_not
from fastkd.train.options import SERVED, check_place, without_weights
from fastkd.train.progress import Display
from fastkd.train.saving import MANIFEST, read_json
from fastkd.train.tasks.base import Corpus, Task

# Rows that are read with both tokenizers, characters of each, and rows in memory at a time.
ROWS, CHARACTERS, BATCH = 1024, 4096, 32
# Tokens of a row that a message shows.
SHOWN = 8


def sample(corpus: Corpus) -> tuple[list[int], list[str]]:
    """Numbers and beginnings of texts of the first training rows."""
    train = corpus.train
    numbers: list[int] = []
    found: list[str] = []
    for start in range(0, min(len(train), ROWS), BATCH):
        rows = train.select(list(range(start, min(start + BATCH, len(train), ROWS))))
        texts, pairs = type(corpus.task).texts(rows)
        both = [*texts, *(pairs or ())]
        # A row may have several texts.
        numbers += [rows.number(i * len(rows) // len(texts)) for i in range(len(texts))]
        numbers += numbers[-len(texts) :] * bool(pairs)
        found += [text[:CHARACTERS] for text in both]
    return numbers, found


def difference(
    first: Any, second: Any, rows: tuple[list[int], list[str]], special: bool = True
) -> tuple[int, list[str], list[str]] | None:
    """The first of ``rows`` that two tokenizers read differently, and both readings from there.

    ``special``: special tokens around a text count.
    """
    both = (_ids(each, rows[1], special) for each in (first, second))
    for number, ids, others in zip(rows[0], *both, strict=True):
        if ids != others:
            pairs = enumerate(itertools.zip_longest(ids, others))
            at = next(i for i, (one, other) in pairs if one != other)
            part = slice(max(0, at - 1), at - 1 + SHOWN)
            tokens = first.convert_ids_to_tokens(ids[part])
            return number, tokens, second.convert_ids_to_tokens(others[part])
    return None


def other_token(first: Any, second: Any, texts: Sequence[str]) -> tuple[int, str, str] | None:
    """An id of ``texts`` read by ``first`` that is another token of ``second``, and both tokens."""
    own = {i: token for token, i in second.get_vocab().items()}
    known = first.get_vocab()
    used = {i for ids in _ids(first, texts, True) for i in ids}
    for token, i in sorted(known.items(), key=lambda pair: pair[1]):
        if i in used and own.get(i, token) != token:
            return i, token, own[i]
    return None


def _ids(tokenizer: Any, texts: Sequence[str], special: bool) -> Iterator[list[int]]:
    for start in range(0, len(texts), BATCH):
        part = list(texts[start : start + BATCH])
        yield from tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"]


# A model with a tokenizer has one of these files.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def load(option: str, name: str, auto: Any, remote_code: bool, **options: Any) -> Any:
    """``auto.from_pretrained``, with errors of transformers and the hub as one sentence.

    Code that comes with a model runs only with ``remote_code``.
    """
    if without_weights(name) == SERVED:
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


def load_tokenizer(config: Config, who: str = "teacher") -> Any:
    """The tokenizer of --tokenizer, or the teacher's or student's."""
    named = {"teacher": config.teacher, "student": config.student, "tokenizer": config.tokenizer}
    name = who if config.tokenizer is None else "tokenizer"
    return tokenizer_of(f"--{name}", str(named[name]), config.trust_remote_code)


def load_tokenizers(config: Config, corpus: Corpus, display: Display) -> tuple[Any, Any]:
    """The student's tokenizer, and the teacher's if it differs, else None.

    Tokenizers are compared on training rows. Where --tokenizer, or the teacher's tokenizer for the
    student, reads a row otherwise than the model's own, a line shows both readings.

    Raises:
        InputError: an id of --tokenizer is another token of a model's own tokenizer.
    """
    read = load_tokenizer(config)
    if config.tokenizer is None and config.student is None:
        return read, None
    rows = sample(corpus)
    task, remote = corpus.task, config.trust_remote_code
    whose = "the teacher's" if config.tokenizer is None else f"--tokenizer {config.tokenizer}"
    for option, name in (("--teacher", config.teacher), ("--student", config.student)):
        own_reads = option == "--teacher" and config.tokenizer is None
        if name is None or own_reads or not _has_tokenizer(option, name):
            continue
        own = tokenizer_of(option, name, remote)
        special = task.two_tokenizers != "spans"
        if config.tokenizer is not None:
            other = other_token(read, own, rows[1])
            if other is not None:
                raise InputError(
                    f"{whose}: its token {other[0]} is {other[1]!r}, and {other[2]!r} in the "
                    f"tokenizer of {option} {name}; leave --tokenizer out"
                )
        found = difference(read, own, rows, special)
        if config.tokenizer is None and task.two_tokenizers:
            # One may have further tokens, with further ids.
            mine, theirs = own.get_vocab().items(), read.get_vocab().items()
            if found is not None or not (mine <= theirs or mine >= theirs):
                return own, read
        if found is None and len(read) > load(option, name, AutoConfig, remote).vocab_size:
            read = own  # without the teacher's further tokens
        if found is not None:
            row, here, there = found
            display.say(
                f"warning: {whose} tokenizer reads row {row} as ... {' '.join(here)}, that of "
                f"{option} {name} as ... {' '.join(there)}"
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
    report = read_json(Path(name).expanduser() / MANIFEST)
    trained = report.get("task")
    trained = trained if isinstance(trained, str) else None
    kind = tasks.of_model(f"--model {name}", task, trained, config)
    model, fresh = load_weights("--model", name, remote_code, kind)
    if fresh:
        raise InputError(f"--model {name}: it has no {kind.head_name} ({fresh[0]} would be random)")
    found = kind.of(model.config, report)
    fit_config(model.config, found, tokenizer)
    if kind.generation is not None:
        found = replace(found, generation=Generation.of(report.get("settings")))
    return model, tokenizer, found


def load_weights(
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
    if task.head == "AutoModelForCausalLM" and reads_whole_rows(model.config):
        raise InputError(
            f"{option} {name}: a {model.config.model_type} model attends to both sides, and so "
            "sees the token to predict; use a decoder, or --task masked-lm"
        )
    fresh = sorted(loaded["missing_keys"]) + sorted(key[0] for key in loaded["mismatched_keys"])
    headless = task.head == "AutoModel"
    body = "" if headless else f"{model.base_model_prefix}."
    # Encoders are often published without their pooler, which belongs to the head.
    lost = [key for key in fresh if key.startswith(body) and "pooler" not in key]
    if lost:
        raise InputError(
            f"{option} {name}: its weights don't fit its configuration ({lost[0]} is missing or of "
            "another size)"
        )
    return model, [] if headless else fresh


def be_quiet() -> None:
    """Silence transformers and datasets; fastkd has a display of its own."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    require("datasets", "train").disable_progress_bars()


def check_depth(option: str, wanted: int, depth: int) -> None:
    """Raise if the student is to have more layers than the teacher's ``depth``."""
    if wanted > depth:
        raise InputError(f"{option} {wanted}: the teacher has only {depth} layers")


def fit_config(config: Any, task: Task, tokenizer: Any) -> None:
    """Set the head of a task and the padding token in a model's configuration.

    Classifiers of decoders find the last token by the padding token. Other families keep an id that
    is set: RoBERTa counts positions from it.
    """
    if task.num_labels is not None:
        config.num_labels, config.problem_type = task.num_labels, task.problem
    if task.names is not None:
        config.id2label = dict(enumerate(task.names))
        config.label2id = {label: i for i, label in enumerate(task.names)}
    if config.pad_token_id is None or (
        tokenizer.pad_token_id is not None
        and reads_last_token(config)
        and not config.is_encoder_decoder
    ):
        config.pad_token_id = tokenizer.pad_token_id


def longest(
    tokenizer: Any, model: PreTrainedModel, max_length: int | None = None, who: str = ""
) -> int:
    """Maximum number of tokens that ``model`` reads, at most ``max_length``.

    Raises:
        InputError: a ``max_length`` other than the default exceeds the limit of the model, which
            is called ``who``.
    """
    limit = min(tokenizer.model_max_length, sys.maxsize)  # 1e30 without a limit
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet has -1: no limit
        # RoBERTa and related models count positions from padding_idx + 1.
        tables = (x for name, x in model.named_modules() if name.endswith("position_embeddings"))
        padding = (getattr(table, "padding_idx", None) for table in tables)
        first = next((index + 1 for index in padding if index is not None), 0)
        limit = min(limit, positions - first)
    if max_length is None:
        return limit
    if max_length > limit and max_length != MAX_LENGTH:
        raise InputError(f"--max-length {max_length}: the {who} reads at most {limit}")
    return min(max_length, limit)


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


#: The page with the study, and the method of each kind in a table.
PAGE = "docs/studies/method_by_task.md"


class Choice(NamedTuple):
    """A method of `--method auto`, and why it is taken."""

    method: str
    why: str


_LIKE = "not studied; that of "
#: By the name of the task. `PAGE` has the same table, which a test compares.
METHODS = {
    "causal-lm": Choice("fcd", "above soft targets beyond noise"),
    "chat": Choice("fcd", _LIKE + "causal-lm"),
    "classification": Choice("soft_targets", "nothing is above it beyond noise"),
    "embedding": Choice("lrkd", "above FCD, MC3KD and LRC-BERT beyond noise"),
    "masked-lm": Choice("fcd", _LIKE + "causal-lm"),
    "multi-label": Choice("soft_targets", _LIKE + "classification"),
    "multiple-choice": Choice("soft_targets", _LIKE + "classification"),
    "question-answering": Choice("soft_targets", _LIKE + "token-classification"),
    "regression": Choice("fcd", "above soft targets beyond noise, cheaper than MC3KD"),
    "reranking": Choice("soft_targets", "not studied; KL over each list"),
    "seq2seq": Choice("fcd", _LIKE + "causal-lm"),
    "token-classification": Choice("soft_targets", "nothing is above it beyond noise"),
}


def choose(task: Task | type[Task], own_tokens: bool = False) -> Choice:
    """The method for ``task``; ``own_tokens``: the tokenizer is the student's own.

    A user's task has the method of the task that it derives from, else of one with the same head.
    """
    own = task if isinstance(task, type) else type(task)
    bases = [base for base in own.__mro__ if issubclass(base, Task) and base is not Task]
    alike = [other for other in map(tasks.named, METHODS) if other.head == own.head]
    kind = next((x.name() for x in (*bases, *alike) if x.name() in METHODS), None)
    if kind is None:
        return Choice("soft_targets", f"--task {task.name()} is of no kind that was studied")
    found, why = METHODS[kind]
    if own_tokens and task.head != "AutoModel":
        return Choice("soft_targets", "the student has a tokenizer of its own")
    return Choice(found, f"--task {kind}: {why} ({PAGE})")
