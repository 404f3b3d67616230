"""Documents in the order of their relevance to a query, by a cross-encoder."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fastkd.train.arrow_rows import Encoded, Rows
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns, text_of, words_of
from fastkd.train.labels import score_of
from fastkd.train.tasks.base import TEXT, Collate, Corpus, Task, Tokens, logits
from fastkd.train.tasks.multiple_choice import paired_tokens

QUERY, POSITIVE = ("query", "anchor"), ("pos", "positive")
NEGATIVE = re.compile(r"neg|negatives|negative(_\d+)?")
DOCUMENTS = "documents"
POSITIVE_SCORES, NEGATIVE_SCORES = "pos_scores", "neg_scores"
LABELS = ("label", "labels", "margins", "scores")
MOST = 10  # of nDCG@10


@dataclass(frozen=True)
class Reranking(Task):
    """A query with relevant and other documents, and their scores where a teacher gave them.

    - FlagEmbedding's ``query``, ``pos``, ``neg``, and ``pos_scores`` and ``neg_scores``.
    - sentence-transformers' ``anchor`` (or ``query``), ``positive`` and ``negative``,
      ``negative_1``, ...; ``label`` has the scores of all documents, or the margin of the positive
      over each negative.

    A row is a list: a model reads the query with each document, and the losses compare the scores
    of a list. Metrics are nDCG@10 and the mean reciprocal rank of the first relevant document;
    among equal scores the relevant document is the last.
    """

    metrics = ("ndcg@10", "mrr")
    problem = "regression"
    pipeline = "text-ranking"
    library = "sentence-transformers"
    columns = Columns(None, None, LABELS[0])
    #: ``label``: relevance of all documents, 1 or 0, and then their scores, NaN without.
    stored: ClassVar[Mapping[str, Any]] = {"text": TEXT, "pair": [TEXT], "label": ["float64"]}
    optional = ()
    indivisible = True
    every_text = True
    summary = "It scores documents for a query."
    usage = (
        "from sentence_transformers import CrossEncoder\n\n"
        'model = CrossEncoder("$directory")\n'
        'print(model.rank("...", ["...", "..."]))'
    )

    @property
    def num_labels(self) -> int:
        return 1

    @classmethod
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        text, pair = (
            own or next((name for name in usual if name in record), None)
            for own, usual in ((columns.text, QUERY), (columns.pair, POSITIVE))
        )
        bare = columns.label is None and (DOCUMENTS in record or _negatives(record))
        if text is None or (pair is None and not bare):
            raise InputError(
                f"{source}: which columns are the query and its documents? {' or '.join(QUERY)}, "
                f"{' or '.join(POSITIVE)}, and neg or negative; others by --text-column and "
                f"--text-pair-column; {nearest('', record)}"
            )
        return Columns(text, pair, columns.label, columns.header, columns.teacher)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        query = text_of(record, columns.text, where)
        names = [columns.pair] if columns.pair in record else []
        positives = [text for name in names for text in _texts(record, name, where)]
        others = _negatives(record) or [DOCUMENTS] * (DOCUMENTS in record)
        negatives = [
            text for name in others if record[name] is not None
            for text in _texts(record, name, where)
        ]  # fmt: skip
        if columns.label is not None and not (positives and negatives):
            raise InputError(
                f"{where}: {len(positives)} relevant and {len(negatives)} other documents; a list "
                "needs one of each"
            )
        sizes = len(positives), len(negatives)
        relevance = [1.0] * sizes[0] + [0.0] * sizes[1]
        scores = _scores(record, columns.label, sizes, where) if columns.label else None
        scores = [math.nan] * sum(sizes) if scores is None else scores
        return {"text": query, "pair": positives + negatives, "label": relevance + scores}

    @classmethod
    def shown(cls, row: Mapping[str, Any]) -> dict[str, Any]:
        count = int(sum(row["label"][: len(row["label"]) // 2]))
        return {"query": row["text"], "pos": row["pair"][:count], "neg": row["pair"][count:]}

    def without_labels(self, rows: Rows) -> Rows:
        return rows

    def describe(self, corpus: Corpus) -> Iterator[str]:
        rows = list(corpus.train.column("label"))
        sizes = sorted(len(label) // 2 for label in rows)
        scored = sum(not math.isnan(math.fsum(label)) for label in rows)
        yield (
            f"lists of {sizes[0]} to {sizes[-1]} documents; {scored} of {len(rows)} training lists "
            "have scores"
        )

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        labels = [
            list(map(list, zip(x[: len(x) // 2], x[len(x) // 2 :], strict=True)))
            for x in batch["label"]
        ]
        return {**paired_tokens(batch, tokenizer, max_length), "labels": labels}

    def collator(self, tokenizer: Any) -> Collate:
        return ListCollator(super().collator(tokenizer))

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The scores of each list's documents."""
        scores = logits(model, batch).float().flatten().cpu()
        sizes = batch["labels"][:, 0].long().cpu().bincount().tolist()
        return [part.tolist() for part in scores.split(sizes)]

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        found = [_ranked(*one) for one in zip(answers, self._relevance(examples), strict=True)]
        return dict(zip(self.metrics, np.mean(found, 0).tolist(), strict=True))

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        values = {round(score, 6) for scores in answers for score in scores}
        return f"are all {values.pop():.4g}" if len(values) == 1 else None

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        counts = [int(sum(x)) for x in self._relevance(examples)]
        return [
            {POSITIVE_SCORES: scores[:count], NEGATIVE_SCORES: scores[count:]}
            for count, scores in zip(counts, answers, strict=True)
        ]

    def _relevance(self, examples: Encoded) -> list[list[float]]:
        return [label[: len(label) // 2] for label in examples.rows.column("label")]


@dataclass(frozen=True)
class ListCollator:
    """``collate`` for the pairs of all lists; labels (R, 3) are those of a Distiller's `Lists`."""

    collate: Collate

    def __call__(self, rows: list[dict[str, Any]]) -> Mapping[str, Any]:
        labels = [(i, *label) for i, row in enumerate(rows) for label in row["labels"]]
        names = [name for name in rows[0] if name != "labels"]
        pairs = [
            {name: row[name][k] for name in names}
            for row in rows
            for k in range(len(row[names[0]]))
        ]
        return {**self.collate(pairs), "labels": torch.tensor(labels)}


def _negatives(record: Mapping[str, Any]) -> list[str]:
    return [name for name in record if NEGATIVE.fullmatch(name)]


def _texts(record: dict[str, Any], name: str | None, where: str) -> list[str]:
    listed = isinstance(record[name or ""], list)
    return words_of(record, name, where) if listed else [text_of(record, name, where)]


def _scores(
    record: Mapping[str, Any], label: str | None, sizes: tuple[int, int], where: str
) -> list[float] | None:
    """The scores of all documents, relevant ones first; None if the row has none."""
    given = [record.get(name) for name in (POSITIVE_SCORES, NEGATIVE_SCORES)]
    if given != [None, None]:
        for name, values, size in zip(
            (POSITIVE_SCORES, NEGATIVE_SCORES), given, sizes, strict=True
        ):
            if not isinstance(values, list) or len(values) != size:
                raise InputError(f"{where}: column {name!r} is not a list of {size} scores")
        return [score_of(x, where) for values in given for x in values or ()]
    column = next((x for x in (label, *LABELS) if record.get(x or "") is not None), None)
    if column is None:
        return None
    value = record[column]
    found = [score_of(x, where) for x in (value if isinstance(value, list) else [value])]
    if len(found) == sum(sizes):
        return found
    if sizes[0] == 1 and len(found) == sizes[1]:  # margins
        return [0.0, *(-x for x in found)]
    raise InputError(
        f"{where}: column {column!r} has {len(found)} numbers for {sizes[0]} relevant and "
        f"{sizes[1]} other documents; give the scores of all, or the margin over each other one"
    )


def _ranked(scores: Sequence[float], relevance: Sequence[float]) -> tuple[float, float]:
    """nDCG@10 and the reciprocal rank; among equal scores relevant documents are last."""
    known = np.asarray(relevance)
    order = np.lexsort((known, -np.asarray(scores)))
    found, gain = known[order], 1 / np.log2(np.arange(2, len(scores) + 2))
    best = np.sort(known)[::-1]
    ndcg = (found * gain)[:MOST].sum() / max((best * gain)[:MOST].sum(), 1e-12)
    return float(ndcg), float(1 / (1 + found.argmax())) if found.any() else 0.0


TASK = Reranking
