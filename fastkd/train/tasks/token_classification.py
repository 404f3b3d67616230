"""A tag for every word: names, parts of speech."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from fastkd.train import files
from fastkd.train.arrow_rows import UNLABELLED, Encoded
from fastkd.train.errors import InputError
from fastkd.train.files import Columns, field, words_of
from fastkd.train.glue import Glue
from fastkd.train.tasks.base import TEXT, Corpus, ListedTask, Tokens, check_fast, logits

OUTSIDE = "O"
# Begin, inside, middle; end, last; single, unit: IOB1, IOB2, IOBES, BMES, BILOU. The type may be
# missing.
MARKED = re.compile(r"([BIMELSU])(?:-(.+))?", re.DOTALL)

# Marks after which an entity may continue, and marks that continue it.
INNER, FOLLOWING = ("B", "I", "M"), ("I", "M", "E", "L")

Entity = tuple[int, int, str]


def is_marked(tag: str) -> bool:
    """Whether ``tag`` is a mark and a type, such as ``B-LOC``."""
    return "-" in tag and MARKED.fullmatch(tag) is not None


def _parts(tag: str) -> tuple[str, str]:
    """Mark and type; a tag without a mark is inside of its own type."""
    if tag == OUTSIDE:
        return "", ""
    match = MARKED.fullmatch(tag)
    return (match[1], match[2] or "") if match else ("I", tag)


def entities(tags: Iterable[str]) -> set[Entity]:
    """First word, end and type of each entity, as conlleval and seqeval find them in any scheme.

    Equal tags without a mark in a row are one entity: ``LOC LOC O``.
    """
    found, start, mark, kind = set(), 0, "", ""
    for at, tag in enumerate((*tags, OUTSIDE)):
        now, type_now = _parts(tag)
        if not (mark in INNER and now in FOLLOWING and kind == type_now):
            if mark:
                found.add((start, at, kind))
            start = at
        mark, kind = now, type_now
    return found


def precision_recall_f1(
    found: Iterable[Sequence[str]], true: Iterable[Sequence[str]]
) -> tuple[float, float, float]:
    """Precision, recall and F1 of the entities of all rows; 0 where a divisor is 0."""
    right = predicted = expected = 0
    for tags, true_tags in zip(found, true, strict=True):
        ours, theirs = entities(tags), entities(true_tags)
        right += len(ours & theirs)
        predicted += len(ours)
        expected += len(theirs)
    f1 = 2 * right / max(1, predicted + expected)
    return right / max(1, predicted), right / max(1, expected), f1


TOKENS, LABELS = "tokens", "labels"
BLANKS = " \t\r\n"
# CoNLL-U: number of columns, first column of a line, and most comments.
COLUMNS_OF_CONLLU = 10
NUMBER = re.compile(r"\d+([-.]\d+)?")
ASSIGNMENT = re.compile(r"#\s*\w+\s*=\s")


def conll(path: Path, option: str, header: bool, blank: bool) -> files.Records:
    """Sentences of lines with a word first and its tag last; "-DOCSTART-" begins a document.

    Comments of CoNLL-U are skipped. Its other lines number the words and have the tag in another
    column, so that the file is refused.
    """
    first: tuple[int, int] | None = None  # row and columns of the first word
    numbered = files.text_lines(path, option)
    for between, group in itertools.groupby(
        numbered, lambda row: not row[1].strip(BLANKS) or row[1].startswith("-DOCSTART-")
    ):
        sentence = list(group)
        tabs = any("\t" in line for _, line in sentence)  # a word may be "#", too
        comments = [
            bool(ASSIGNMENT.match(line)) or (tabs and "\t" not in line and line.startswith("# "))
            for _, line in sentence
        ]
        # A no-break space belongs to its word.
        lines = [
            (n, re.findall(rf"[^{BLANKS}]+", line))
            for (n, line), comment in zip(sentence, comments, strict=True)
            if not comment
        ]
        if between or not lines:
            continue
        first = first or (lines[0][0], len(lines[0][1]))
        for n, parts in lines:
            if len(parts) != first[1]:
                raise InputError(
                    f"{path}, row {n}: {len(parts)} columns where row {first[0]} has {first[1]}"
                )
        if first[1] == COLUMNS_OF_CONLLU and all(NUMBER.fullmatch(parts[0]) for _, parts in lines):
            raise InputError(
                f"{path}, row {lines[0][0]}: CoNLL-U, which numbers its words; write a file with "
                "the word first and the tag last"
            )
        row = {TOKENS: [parts[0] for _, parts in lines]}
        if first[1] > 1:
            row[LABELS] = [parts[-1] for _, parts in lines]
        yield lines[0][0], row


@dataclass(frozen=True)
class TokenClassification(ListedTask):
    """Words and their tags: ``.conll``, or columns ``tokens`` and ``labels`` with lists of words.

    A word's first token carries its tag. Words beyond --max-length have no answer; the metrics
    count them as outside of every entity. Metrics of entities are conlleval's, in any scheme (IOB1,
    IOB2, IOBES, BMES, BILOU); equal tags without a mark in a row are one entity.
    """

    metrics = ("f1", "precision", "recall", "accuracy")
    default_metrics = metrics[:3]
    head = "AutoModelForTokenClassification"
    head_name = "token classification head"
    pipeline = "token-classification"
    readers: ClassVar[files.Readers] = {**files.READERS, ".conll": conll}
    columns = Columns(TOKENS, None, LABELS)
    stored: ClassVar[Mapping[str, Any]] = {"text": [TEXT], "label": [TEXT]}
    optional = ("label",)
    collator_class = "DataCollatorForTokenClassification"
    evaluation_columns = ("words",)
    label_noun = "tag"

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        words = words_of(record, columns.text, where)
        empty = next((i for i, word in enumerate(words) if not word.strip()), None)
        if empty is not None:
            raise InputError(f"{where}: word {empty + 1} is empty")
        if columns.label is None:
            return {"text": words}
        tags = _tags_of(record, columns.label, where)
        if len(tags) != len(words):
            raise InputError(f"{where}: {len(words)} words and {len(tags)} tags")
        if "" in tags:
            raise InputError(f"{where}: a tag is empty")
        return {"text": words, "label": tags}

    def describe(self, corpus: Corpus) -> Iterator[str]:
        yield f"{len(self.classes)} tags: {', '.join(self.classes)}"

    def select_metrics(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        """Without tags that mark entities, accuracy is the default."""
        found = super().select_metrics(wanted, glue)
        marked = any(map(is_marked, self.classes))
        return found if marked or wanted is not None else ("accuracy",)

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        check_fast(self, tokenizer, "word of each token")
        # RoBERTa and others read a word without a space before it as the end of the last word.
        apart = tokenizer(["a", "a"], is_split_into_words=True)["input_ids"]
        joins = getattr(tokenizer, "add_prefix_space", None) is False
        if joins and apart != tokenizer("a a")["input_ids"]:
            raise InputError(
                f"--task {self.name()}: the tokenizer reads words without the space before them; "
                "load it with add_prefix_space=True, save it, and pass --tokenizer its folder"
            )
        found = tokenizer(
            batch["text"], is_split_into_words=True, truncation=True, max_length=max_length
        )
        ids = {tag: i for i, tag in enumerate(self.classes)}
        words, labels = [], []
        for i, tags in enumerate(batch.get("label", [None] * len(batch["text"]))):
            pieces = itertools.pairwise([None, *found.word_ids(i)])
            first = [-1 if word in (None, before) else word for before, word in pieces]
            words.append(first)
            labels.append([UNLABELLED if w < 0 or tags is None else ids[tags[w]] for w in first])
        return {**found, "words": words, "labels": labels}

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The class id of each token of a row, NaN where its outputs are not finite."""
        found = logits(model, batch)
        best = found.argmax(-1).double().masked_fill(~found.isfinite().all(-1), torch.nan).cpu()
        masks = batch["attention_mask"].bool().cpu()
        return [row[mask].tolist() for row, mask in zip(best, masks, strict=True)]

    def _tags(self, answers: Any, examples: Encoded) -> Iterator[list[str | None]]:
        """The tag of every word, None for words that the model did not read."""
        rows, places = examples.rows.column("text"), examples.evaluation_columns["words"][:]
        for words, answer, seen in zip(rows, answers, places, strict=True):
            tags: list[str | None] = [None] * len(words)
            for word, tag in zip(seen, answer, strict=True):
                if word >= 0:
                    tags[word] = self.classes[int(tag)]
            yield tags

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        found = [[tag or OUTSIDE for tag in tags] for tags in self._tags(answers, examples)]
        true = list(examples.rows.column("label"))
        precision, recall, f1 = precision_recall_f1(found, true)
        right = [a == b for row in zip(found, true, strict=True) for a, b in zip(*row, strict=True)]
        accuracy = sum(right) / len(right)
        return {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy}

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        found = {tag for tags in self._tags(answers, examples) for tag in tags if tag is not None}
        return f"are all {found.pop()!r}" if len(found) == 1 else None

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        return [{LABELS: [tag or "" for tag in tags]} for tags in self._tags(answers, examples)]


def _tags_of(record: dict[str, Any], column: str, where: str) -> list[str]:
    """The tags in ``column``, words or numbers."""
    value = field(record, column, where)
    if isinstance(value, list) and value and all(type(tag) is int for tag in value):
        return list(map(str, value))
    return [tag.strip() for tag in words_of(record, column, where)]


TASK = TokenClassification
