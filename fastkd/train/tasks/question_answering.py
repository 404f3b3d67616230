"""Answers that are spans of a text: SQuAD 1.1, and 2.0 with questions without an answer."""

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from fastkd.models.inputs import accepted
from fastkd.train import files
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.files import Columns, field, text_of
from fastkd.train.tasks import base

ID, QUESTION, CONTEXT, ANSWERS = "id", "question", "context", "answers"
FROM, TO = "start_positions", "end_positions"
# As in the papers' scripts: tokens of a question, tokens that windows share, tokens of an answer,
# and number of starts and ends that are combined.
LONGEST_QUESTION, STRIDE, LONGEST_ANSWER, BEST = 64, 128, 30, 20


class Span(NamedTuple):
    """An answer: its place in the context, and the sum of its two logits."""

    score: float
    start: int
    end: int


class Reading(NamedTuple):
    """The best answers to a question, and the score of no answer."""

    best: list[Span]
    none: float


def _squad(path: Path, option: str, header: bool, blank: bool) -> files.Records:
    """The questions of SQuAD's file, numbered in their order; or rows, in an array or as lines."""
    lines = list(files.text_lines(path, option))
    row, first = lines[0]
    found = None
    if not first.lstrip().startswith("["):
        try:
            found = json.loads(first)
        except (ValueError, RecursionError):
            found = files.loads("".join(line for _, line in lines), path, row)
    if not isinstance(found, dict) or "data" not in found:
        yield from files.json_rows(path, option, header, blank)
        return
    number = 0
    for a, article in enumerate(_objects(found, "data", str(path))):
        where = f"{path}, data[{a}]"
        for p, paragraph in enumerate(_objects(article, "paragraphs", where)):
            prefix = f"{where}.paragraphs[{p}]"
            for record in _objects(paragraph, "qas", prefix):
                number += 1
                yield number, {**record, CONTEXT: field(paragraph, CONTEXT, prefix)}


def _objects(record: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    found = field(record, name, where)
    if not isinstance(found, list) or not all(isinstance(part, dict) for part in found):
        raise InputError(f"{where}: {name!r} is not a list of objects but {found!r:.40}")
    return found


def _with_unique_ids(read: Callable[..., files.Records]) -> Callable[..., files.Records]:
    """The reader ``read``; it raises if two rows have the same id, which names a prediction."""

    def records(path: Path, option: str, header: bool, blank: bool) -> files.Records:
        seen = set()
        for number, record in read(path, option, header, blank):
            where = f"{path}, row {number}"
            name = _id(record, where)
            if name in seen:
                raise InputError(f"{where}: question {name!r:.60} occurs twice")
            seen.add(name)
            yield number, record

    return records


def _id(record: dict[str, Any], where: str) -> str:
    """The id of a question: text, or a whole number as text."""
    name = field(record, ID, where)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError(f"{where}: column {ID!r} is not text but {name!r:.40}")
    return str(name)


@dataclass(frozen=True)
class QuestionAnswering(base.Task):
    """SQuAD's ``.json``, or rows with ``id``, ``question``, ``context`` and ``answers``.

    A context longer than --max-length is read in overlapping windows. The answer is the best span
    of all windows. If training rows lack answers, the answer is empty where the first token scores
    more than that span, in the window with its lowest score.
    """

    metrics = ("f1", "exact_match", "best_f1", "best_exact_match")
    default_metrics = ("f1", "exact_match")
    unlabelled = True
    percent = frozenset(metrics)
    head = "AutoModelForQuestionAnswering"
    head_name = "question answering head"
    outputs = ("start_logits", "end_logits")
    pipeline = "question-answering"
    columns = Columns(QUESTION, CONTEXT, ANSWERS)
    stored: ClassVar[Mapping[str, Any]] = {
        ID: base.TEXT,
        "text": base.TEXT,
        "pair": base.TEXT,
        "label": {"text": [base.TEXT], "answer_start": ["int64"]},
    }
    optional = ("label",)
    short_column = "text"
    readers: ClassVar[files.Readers] = {
        kind: _with_unique_ids(read) for kind, read in {**files.READERS, ".json": _squad}.items()
    }
    every_text = True
    evaluation_columns = ("starts", "ends", "none", "begins")
    summary = "It finds the answer to a question in a text."
    usage = (
        f"{base.LOADING}"
        'tokens = tokenizer("question", "text", return_tensors="pt")\n'
        "found = model(**tokens)\n"
        "start, end = found.start_logits.argmax(), found.end_logits.argmax()\n"
        'print(tokenizer.decode(tokens["input_ids"][0, start : end + 1]))'
    )

    #: Whether a question may have no answer; None: if one of the scored rows has none.
    empty: bool | None = None

    @property
    def num_labels(self) -> int:
        return 2

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        name = _id(record, where)
        where = f"{where}, question {name!r:.60}"
        context = text_of(record, columns.pair, where)
        row: dict[str, Any] = {
            ID: name,
            "text": text_of(record, columns.text, where),
            "pair": context,
        }
        if columns.label is not None:
            given = field(record, columns.label, where)
            row["label"] = _answers(given, columns.label, context, where)
        return row

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: base.LabelInfo) -> base.Task:
        return cls(_some_empty(train))

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> base.Task:
        empty = (report or {}).get("no_answer")
        return cls(empty if isinstance(empty, bool) else None)

    def report(self) -> dict[str, Any]:
        return {**super().report(), "no_answer": self.empty}

    @classmethod
    def shown(cls, row: Mapping[str, Any]) -> dict[str, Any]:
        return {ID: row[ID], **super().shown(row)}

    def describe(self, corpus: base.Corpus) -> Iterator[str]:
        if self.empty:
            without = sum(not found["text"] for found in corpus.train.column("label"))
            yield f"{without} of {len(corpus.train)} training questions have no answer"
        elif any(map(_some_empty, corpus.evals.values())):
            yield "warning: evaluation questions without an answer, and none in the training rows"

    # Tokens

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> base.Tokens:
        base.check_fast(self, tokenizer, "place of a token in the text")
        room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
        if room < 4:  # a question and its context need two tokens each to overlap at all
            raise InputError(
                f"--max-length {max_length}: leaves no room for text, as the tokenizer adds "
                f"{max_length - room} tokens to a question and its text; give a larger one"
            )
        longest = min(LONGEST_QUESTION, room // 2)
        found = tokenizer(
            _cut(batch["text"], tokenizer, longest),
            batch["pair"],
            truncation="only_second",
            max_length=max_length,
            stride=min(STRIDE, (room - longest) // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        rows, offsets = found.pop("overflow_to_sample_mapping"), found.pop("offset_mapping")
        columns: dict[str, list[Any]] = {name: [] for name in (*self.evaluation_columns, FROM, TO)}
        for i, (row, spans) in enumerate(zip(rows, offsets, strict=True)):
            inside = [part == 1 for part in found.sequence_ids(i)]
            starts, ends = (
                [span[k] if there else -1 for span, there in zip(spans, inside, strict=True)]
                for k in (0, 1)
            )
            ids = found["input_ids"][i]
            first = tokenizer.cls_token_id
            none = ids.index(first) if first in ids else 0
            answers = batch["label"][row] if "label" in batch else None
            at = (UNLABELLED,) * 2 if answers is None else _tokens(answers, starts, ends, none)
            begins = i == 0 or row != rows[i - 1]
            for name, value in zip(columns, (starts, ends, none, begins, *at), strict=True):
                columns[name].append(value)
        return {**found, **columns, "number": [batch["number"][row] for row in rows]}

    def collator(self, tokenizer: Any) -> base.Collate:
        # On the right in any family: positions count from the first token.
        return lambda rows: dict(tokenizer.pad(rows, padding_side="right", return_tensors="pt"))

    # Scores and predictions

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The start and end logits of each window's tokens, (2, tokens) a window."""
        inputs = {name: x for name, x in batch.items() if name not in (FROM, TO)}
        found = model(**accepted(model, inputs))
        both = torch.stack([found.start_logits, found.end_logits], 1).float().cpu().numpy()
        lengths = batch["attention_mask"].sum(-1).tolist()
        return [x[:, :length] for x, length in zip(both, lengths, strict=True)]

    def _readings(self, answers: Any, examples: Encoded) -> list[Reading]:
        """The reading of each row, from all of its windows."""
        windows: list[list[Reading]] = []
        columns = (examples.evaluation_columns[name][:] for name in self.evaluation_columns)
        for logits, *places, begins in zip(answers, *columns, strict=True):
            if begins:  # several rows may have the number of one line
                windows.append([])
            windows[-1].append(_read(logits, *places))
        readings = []
        for parts in windows:
            best: dict[tuple[int, int], Span] = {}
            for span in sorted((span for part in parts for span in part.best), reverse=True):
                best.setdefault((span.start, span.end), span)
            none = min(part.none for part in parts)
            readings.append(Reading([*best.values()][:BEST], none))
        return readings

    def _texts(self, readings: list[Reading], examples: Encoded) -> Iterator[str]:
        """The answer to each question; an empty one if there is none."""
        rows, empty = examples.rows, self.empty
        if empty is None:
            empty = "label" in rows.data.column_names and _some_empty(rows)
        for context, (best, none) in zip(rows.column("pair"), readings, strict=True):
            no = not best or (empty and none > best[0].score)
            yield "" if no else context[best[0].start : best[0].end]

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        """The metrics in percent, as in SQuAD's scripts."""
        gold = [found["text"] for found in examples.rows.column("label")]
        readings = self._readings(answers, examples)
        found = squad(list(self._texts(readings, examples)), gold)
        if not found.keys() >= {*metrics}:
            spans = list(replace(self, empty=False)._texts(readings, examples))
            doubts = [part.none - part.best[0].score if part.best else 0.0 for part in readings]
            found.update(squad_best(spans, gold, doubts))
        return found

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        readings = self._readings(answers, examples)
        texts = self._texts(readings, examples)
        return [
            {"text": text, "score": best[0].score if best else None, "no_answer": none}
            for text, (best, none) in zip(texts, readings, strict=True)
        ]

    def references(self, examples: Encoded) -> list[Any]:
        return [next(iter(found["text"]), "") for found in examples.rows.column("label")]


def _some_empty(rows: Rows) -> bool:
    """Whether a question has no answer."""
    return any(not found["text"] for found in rows.column("label"))


def _answers(given: Any, column: str, context: str, where: str) -> dict[str, list[Any]]:
    """Texts and their offsets, from SQuAD's list of objects or from the hub's object of lists."""
    names = ("text", "answer_start")
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {name: [one.get(name) for one in given] for name in names}
    parts = [given.get(name) if isinstance(given, dict) else None for name in names]
    texts, starts = (part if isinstance(part, list) else None for part in parts)
    if texts is None or starts is None or len(texts) != len(starts):
        raise InputError(
            f"{where}: column {column!r} is not a list of answers with text and answer_start but "
            f"{given!r:.40}"
        )
    for text, start in zip(texts, starts, strict=True):
        placed = isinstance(text, str) and text.strip() and isinstance(start, int) and start >= 0
        if not placed or context[start : start + len(text)] != text:
            raise InputError(
                f"{where}: answer {text!r:.60} is not at character {start!r:.20} of its text"
            )
    return {"text": texts, "answer_start": starts}


def _cut(questions: list[str], tokenizer: Any, longest: int) -> list[str]:
    """``questions`` cut to ``longest`` tokens."""
    found = tokenizer(
        questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    return [
        text if len(spans) <= longest else text[: spans[longest - 1][1]]
        for text, spans in zip(questions, found["offset_mapping"], strict=True)
    ]


def _tokens(
    answers: dict[str, list[Any]], starts: list[int], ends: list[int], none: int
) -> tuple[int, int]:
    """First and last token of the first answer, ``none`` if it is not inside this window."""
    inside = [i for i, start in enumerate(starts) if start >= 0]
    if not answers["text"] or not inside:
        return none, none
    text, start = answers["text"][0], answers["answer_start"][0]
    end = start + len(text.rstrip())
    start += len(text) - len(text.lstrip())
    if starts[inside[0]] > start or ends[inside[-1]] < end:
        return none, none
    first = max(i for i in inside if starts[i] <= start)
    return first, max(first, min(i for i in inside if ends[i] >= end))


def _read(logits: np.ndarray, starts: list[int], ends: list[int], none: int) -> Reading:
    """The best spans of a window."""
    inside = np.array([i for i, start in enumerate(starts) if start >= 0], dtype=int)
    tops = [inside[np.argsort(-x[inside], kind="stable")[:BEST]].tolist() for x in logits]
    begins, stops = logits.astype(float).tolist()
    spans = [
        Span(begins[i] + stops[j], starts[i], ends[j])
        for i in tops[0]
        for j in tops[1]
        if i <= j < i + LONGEST_ANSWER and starts[i] < ends[j]
    ]
    return Reading(sorted(spans, reverse=True)[:BEST], begins[none] + stops[none])


def _plain(text: str) -> str:
    """A text normalized as in SQuAD: lower case, no punctuation or articles, single spaces."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(found: list[str], gold: list[str], empty: bool) -> float:
    """F1 of words. In SQuAD 2.0 two answers without words are equal, in 1.1 they are not."""
    if empty and not (found and gold):
        return float(found == gold)
    same = sum((Counter(found) & Counter(gold)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def _right(found: Sequence[str], gold: Sequence[Sequence[str]]) -> Iterator[tuple[bool, float]]:
    """Exact match and F1 of each question, for the best of its ``gold`` answers."""
    empty = any(not answers for answers in gold)
    for text, answers in zip(found, gold, strict=True):
        plain, correct = _plain(text), [_plain(answer) for answer in answers]
        if empty:
            correct = [answer for answer in correct if answer] or [""]
        f1 = max(_f1(plain.split(), answer.split(), empty) for answer in correct)
        yield plain in correct, f1


def squad(found: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent.

    As evaluate-v1.1.py, or evaluate-v2.0.py where a question has no answer, of Rajpurkar et al.
    """
    exact, f1 = zip(*_right(found, gold), strict=True)
    return {"exact_match": 100.0 * sum(exact) / len(found), "f1": 100.0 * sum(f1) / len(found)}


def squad_best(
    found: Sequence[str], gold: Sequence[Sequence[str]], doubts: Sequence[float]
) -> dict[str, float]:
    """The best metrics over all thresholds: answers with larger ``doubts`` count as empty.

    As in evaluate-v2.0.py.
    """
    order = sorted(range(len(found)), key=doubts.__getitem__)
    right = list(_right(found, gold))
    best = {}
    for k, name in enumerate(("best_exact_match", "best_f1")):
        total = most = float(sum(not answers for answers in gold))
        for i in order:
            total += right[i][k] if gold[i] else -bool(found[i])
            most = max(most, total)
        best[name] = 100.0 * most / len(found)
    return best


TASK = QuestionAnswering
