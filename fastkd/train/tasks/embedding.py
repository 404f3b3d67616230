"""Sentence embeddings: texts; pairs with a score; queries with their answers; triples."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fastkd._core.extras import require
from fastkd.models.inputs import accepted, reads_last_token
from fastkd.train.arrow_rows import BATCH, Encoded, Rows
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns, field, settle_columns, text_of, words_of
from fastkd.train.glue import Glue
from fastkd.train.hub import file_of
from fastkd.train.labels import score_of
from fastkd.train.tasks.base import TEXT, LabelInfo, Prepared, Task, Tokens
from fastkd.train.tasks.regression import number_scores

EXTRA = "sentence-transformers"
MODULES, LENGTH = "modules.json", "sentence_bert_config.json"
USED = "config_sentence_transformers.json"
PARTS = ("Transformer", "Pooling", "Normalize")
SCORED = ("spearman", "pearson")
RANKED = ("ndcg@10", "recall@10")
TRIPLES = ("accuracy",)
AGREEMENT = ("agreement", "overlap")
NEIGHBOURS = 10
# Similarities of queries and documents in memory at a time.
SIMILARITIES = 2**24
# Why rows have no reference values for a metric.
WITHOUT = {
    **dict.fromkeys(SCORED, "have no scores; pass --text-pair-column and --label-column"),
    **dict.fromkeys(RANKED, "have no columns query and positive"),
    **dict.fromkeys(TRIPLES, "have no columns anchor, positive and negative"),
}
# Column names of sentence-transformers and its users.
ALONE = ("text", "sentence")
ALIKE = ("sentence1", "sentence2", "score")
ASKING, ANSWERING = ("query", "anchor"), ("positive", "passage")
NEGATIVE = re.compile(r"negatives|negative(_\d+)?")
NEGATIVES = "negatives"
ROW = ("text", "pair", NEGATIVES)  # stored columns with texts


@dataclass(frozen=True)
class TextColumns(Columns):
    """Columns, and the names of those with wrong answers, for messages."""

    negatives: str = NEGATIVES


@dataclass(frozen=True)
class Embedding(Task):
    """Texts, or texts with their relation, by the columns of the file.

    - ``text`` or ``sentence``: one text a row.
    - ``sentence1``, ``sentence2`` and ``score``: the similarity of two texts.
    - ``query`` or ``anchor``, ``positive`` or ``passage``: a query, which may occur in several
      rows, and an answer. Wrong answers are in ``negative``, ``negative_1``, ..., or a list
      ``negatives``; with one of them in the first row the rows are scored as triples.

    Each text is a row of tokens. Models are folders of sentence-transformers, and so are students:
    the teacher's pooling and normalisation make embeddings of their last hidden states, of at most
    ``max_seq_length`` tokens of the folder.

    Metrics follow the evaluation rows: correlations of cosines with scores; the ranks of a query's
    answers among all documents of the file, by sentence-transformers' evaluator; the fraction of
    triples whose positive is nearer than the negative. Texts alone compare with the teacher:
    agreement is Pearson's correlation of the cosines of all texts, overlap the fraction of each
    text's ten nearest texts that are the teacher's.
    """

    metrics = (*SCORED, *RANKED, *TRIPLES, *AGREEMENT)
    teacher_metrics = frozenset(AGREEMENT)
    head = "AutoModel"
    head_name = "head"
    pipeline = "sentence-similarity"
    library = "sentence-transformers"
    supervised = False
    of_model = ("pooling", "normalized", "max_seq_length", "similarity")
    outputs = ("sentence_embedding",)
    two_tokenizers = "texts"
    columns = Columns(None, None, None)
    stored: ClassVar[Mapping[str, Any]] = {
        "text": TEXT,
        "pair": TEXT,
        NEGATIVES: [TEXT],
        "label": "float64",
    }
    optional = ()
    every_text = True
    summary = "It embeds a text. Pooling: {pooling}; unit length: {normalized}."
    usage = (
        "from sentence_transformers import SentenceTransformer\n\n"
        'model = SentenceTransformer("$directory")\n'
        'print(model.similarity(model.encode("..."), model.encode("...")))'
    )

    #: Pooling of the hidden states of a text, and whether the embedding gets length 1.
    pooling: tuple[str, ...] = ("mean",)
    normalized: bool = False
    #: Maximum number of tokens that sentence-transformers reads of a text.
    max_seq_length: int | None = None
    #: Similarity function of the folder, for its users; metrics are of cosines.
    similarity: str | None = None
    #: Metrics for which the evaluation rows have reference values; none for texts alone.
    answered: tuple[str, ...] = SCORED

    @classmethod
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        if columns.text is None and not set(ALONE) & set(record):
            columns = columns.over(_columns_by_name(record, source))
        columns = settle_columns(columns, record, source)
        if columns.label is not None and columns.pair is None:
            raise InputError(
                f"{source}: column {columns.label!r} is the similarity of two texts; "
                "pass --text-pair-column for the second"
            )
        negatives = " or ".join(_negatives(columns, record))
        names = columns.text, columns.pair, columns.label, columns.header, columns.teacher
        return TextColumns(*names, negatives)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        text = text_of(record, columns.text, where)
        pair = None if columns.pair is None else text_of(record, columns.pair, where)
        negatives: list[str] = []
        for name in _negatives(columns, record):  # rows of .jsonl may differ in number
            if isinstance(record[name], str):
                negatives.append(text_of(record, name, where))
            elif record[name] is not None:
                negatives += words_of(record, name, where)
        score = None
        if columns.label is not None:
            score = score_of(field(record, columns.label, where), where)
        return {"text": text, "pair": pair, NEGATIVES: negatives, "label": score}

    @classmethod
    def texts(cls, rows: Rows) -> tuple[list[str], None]:
        return [text for row in rows.columns(*ROW) for text in _texts_of(*row)], None

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> Task:
        each = [_answered(rows) for rows in evals.values()]
        return cls(answered=tuple(x for x in each[0] if all(x in names for names in each)))

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> Task:
        """The pooling of the folder, or hub name, of ``config``."""
        return _of_folder(config.name_or_path)

    def prepare(self, rows: Rows, labelled: bool = True, order: str | None = None) -> Prepared:
        answered = _answered(rows) if labelled else ()
        if labelled and not answered:
            raise InputError(
                f"{rows.source}: needs two texts a row, and a score if the second does not answer "
                "the first; pass --text-pair-column and --label-column"
            )
        task = replace(self, answered=answered)
        return super().prepare(rows, labelled, order)._replace(task=task)

    def select_metrics(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        if wanted in WITHOUT and wanted not in self.answered:
            raise InputError(f"--metric {wanted}: the rows to evaluate on {WITHOUT[wanted]}")
        super().select_metrics(wanted)
        first = () if wanted is None else (wanted,)
        return tuple(dict.fromkeys((*first, *(self.answered or AGREEMENT))))

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        rows = zip(*(batch[name] for name in ("number", *ROW)), strict=True)
        each = [(number, text) for number, *row in rows for text in _texts_of(*row)]
        numbers, texts = ([part[i] for part in each] for i in range(2))
        max_length = min(max_length, self.max_seq_length or max_length)
        return {**tokenizer(texts, truncation=True, max_length=max_length), "number": numbers}

    def method_options(self, teacher: Any, student: Any) -> dict[str, Any]:
        """``pooling`` and ``unit_length`` of `fastkd.distill.baselines.Embeddings`."""
        pooling = " and ".join(self.pooling)
        if pooling in ("cls", "lasttoken"):
            last = [reads_last_token(config) for config in (teacher, student)]
            if last == [pooling == "lasttoken"] * 2:  # what the families' own heads read
                pooling = "cls"
        return {"pooling": pooling, "unit_length": self.normalized}

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The embeddings of a batch's texts, (B, D)."""
        found = model(**accepted(model, batch))
        if hasattr(found, "sentence_embedding"):  # an ONNX file has pooled them
            return found.sentence_embedding.cpu().numpy()
        states = found.last_hidden_state.float()
        read = {"token_embeddings": states, "attention_mask": batch["attention_mask"]}
        embedded = self._pool(states.shape[-1])(read)["sentence_embedding"]
        return (F.normalize(embedded, dim=-1) if self.normalized else embedded).cpu().numpy()

    def _pool(self, width: int) -> Any:
        modules: Any = require("sentence_transformers.sentence_transformer.modules", EXTRA)
        return modules.Pooling(width, self.pooling)

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        found: dict[str, float] = {}
        if not set(metrics).isdisjoint(SCORED):
            cosines = np.array([_cosine(*one[:2]) for _, one in self._embedded(answers, examples)])
            found = number_scores(cosines, examples.rows.labels)
        if not set(metrics).isdisjoint(RANKED):
            found.update(self._ranked(answers, examples))
        if not set(metrics).isdisjoint(TRIPLES):
            nearer = [
                _cosine(first, second) > _cosine(first, other)
                for _, (first, second, *others) in self._embedded(answers, examples)
                for other in others
            ]
            found[TRIPLES[0]] = float(np.mean(nearer))
        return found

    def _ranked(self, answers: Any, examples: Encoded) -> dict[str, float]:
        """Ranks of the answers among the documents of all rows, by cosine."""
        library: Any = require("sentence_transformers.sentence_transformer.evaluation", EXTRA)
        util: Any = require("sentence_transformers.util", EXTRA)
        vectors: dict[str, np.ndarray] = {}
        documents: dict[str, str] = {}
        relevant: dict[str, set[str]] = {}
        for texts, found in self._embedded(answers, examples):
            for text, vector in zip(texts, found, strict=True):
                vectors.setdefault(text, vector)
            documents.update({text: text for text in texts[1:]})
            relevant.setdefault(texts[0], set()).add(texts[1])

        def encode(texts: Sequence[str], **_: Any) -> torch.Tensor:
            return torch.from_numpy(np.stack([vectors[text] for text in texts]))

        kinds = ("mrr", "ndcg", "accuracy", "precision_recall", "map")
        evaluator = library.InformationRetrievalEvaluator(
            {text: text for text in relevant},
            documents,
            relevant,
            corpus_chunk_size=max(1, SIMILARITIES // len(relevant)),
            score_functions={"cosine": util.cos_sim},
            **{f"{kind}_at_k": [10] for kind in kinds},
        )
        model = SimpleNamespace(encode_query=encode, encode_document=encode)
        scores = evaluator.compute_all_metrics(model)["cosine"]
        return {name: float(scores[name.replace("@10", "@k")][10]) for name in RANKED}

    def agreement(self, answers: Any, examples: Encoded) -> dict[str, float]:
        if len(answers) <= NEIGHBOURS + 1:
            raise InputError(
                f"{examples.rows.source}: {len(answers)} texts, and {', '.join(AGREEMENT)} need at "
                f"least {NEIGHBOURS + 2}"
            )
        if examples.teacher_answers is None:
            raise InputError(
                f"{', '.join(AGREEMENT)} compare with the teacher, and there is none; "
                f"use one of {', '.join(SCORED)}"
            )
        return dict(zip(AGREEMENT, agreement(answers, examples.teacher_answers), strict=True))

    def _embedded(
        self, answers: Any, examples: Encoded
    ) -> Iterator[tuple[list[str], list[np.ndarray]]]:
        """The texts of each row, and their embeddings."""
        each = iter(answers)
        rows = (_texts_of(*row) for row in examples.rows.columns(*ROW))
        return ((texts, [next(each) for _ in texts]) for texts in rows)

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        found = []
        for _, (first, *others) in self._embedded(answers, examples):
            row: dict[str, Any] = {"embedding": first.tolist()}
            if others:
                row.update(pair_embedding=others[0].tolist(), cosine=_cosine(first, others[0]))
            found.append(row)
        return found

    def save(self, directory: Path, config: Any) -> None:
        modules = [
            {"idx": i, "name": str(i), "path": f"{i}_{part}" if i else "", "type": f"{TYPES}{part}"}
            for i, part in enumerate(PARTS[: 3 if self.normalized else 2])
        ]
        for module in modules[1:]:
            (directory / str(module["path"])).mkdir()
        self._pool(config.hidden_size).save(str(directory / str(modules[1]["path"])))
        longest, limit = self.max_seq_length, getattr(config, "max_position_embeddings", None)
        if longest and limit and longest > limit:  # a student with another body
            longest = None
        length = {"max_seq_length": longest, "do_lower_case": False}
        used = {"similarity_fn_name": self.similarity}
        for name, content in ((MODULES, modules), (LENGTH, length), (USED, used)):
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def report(self) -> dict[str, Any]:
        return {"labels": None, "pooling": self.pooling, "normalized": self.normalized}


TYPES = "sentence_transformers.models."
TASK = Embedding


def _columns_by_name(record: Mapping[str, Any], source: str) -> Columns:
    """The columns of a file that have default names."""
    if ALIKE[0] in record:
        text, pair, score = (name if name in record else None for name in ALIKE)
        return Columns(text, pair, score)
    query, answer = (next((x for x in names if x in record), None) for names in (ASKING, ANSWERING))
    if query and answer:
        return Columns(query, answer, None)
    raise InputError(
        f"{source}: which columns are the texts? {' or '.join(ALONE)}; {', '.join(ALIKE)}; or "
        f"{' or '.join(ASKING)} with {' or '.join(ANSWERING)}, and perhaps negative; others by "
        f"--text-column and --text-pair-column; {nearest('', record)}"
    )


def _negatives(columns: Columns, record: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns with wrong answers."""
    asks = columns.pair is not None and columns.label is None
    return tuple(name for name in record if asks and NEGATIVE.fullmatch(name))


def _texts_of(text: str, pair: str | None, negatives: list[str]) -> list[str]:
    """The texts of a row, in the order of their tokens."""
    return [text, *([] if pair is None else [pair]), *negatives]


def _answered(rows: Rows) -> tuple[str, ...]:
    """Metrics for which rows have reference values; all rows of a file have the same columns."""
    first = rows.data[0]
    if first["label"] is not None:
        return SCORED
    if first["pair"] is None:
        return ()
    negatives = len(first[NEGATIVES])
    if negatives == 1:
        return (*TRIPLES, *RANKED)
    return (*RANKED, *TRIPLES) if negatives else RANKED


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(_unit(first) @ _unit(second))


def _unit(embedding: np.ndarray) -> np.ndarray:
    """``embedding`` scaled to length 1, in float64; zeros stay."""
    wide = embedding.astype(np.float64)
    length = np.linalg.norm(wide, axis=-1, keepdims=True)
    return wide / np.where(length > 0, length, 1)


def agreement(student: np.ndarray, teacher: np.ndarray) -> tuple[float, float]:
    """Agreement of embeddings (N, D) and (N, Dt) of N texts; N at least 12.

    Pearson's correlation of the cosines of all pairs, and the fraction of a text's ten nearest
    texts that both have in common. Needs memory for 128 rows of cosines.
    """
    both = _unit(student), _unit(teacher)
    count = len(student)
    shared, sums, products = 0, np.zeros(2), np.zeros((2, 2))
    # Cosines shifted by their means: no digits are lost where all are near 1.
    means = [((x.sum(0) ** 2).sum() - (x**2).sum()) / (count * (count - 1)) for x in both]
    for start in range(0, count, BATCH):
        rows = range(start, min(start + BATCH, count))
        itself = np.arange(len(rows)), np.array(rows)
        near, centred = [], []
        for embeddings, mean in zip(both, means, strict=True):
            cosines = embeddings[start : rows.stop] @ embeddings.T
            cosines[itself] = -np.inf
            near.append(np.argpartition(-cosines, NEIGHBOURS, axis=1)[:, :NEIGHBOURS])
            cosines -= mean
            cosines[itself] = 0
            centred.append(cosines.ravel())
        shared += sum(len(np.intersect1d(a, b)) for a, b in zip(*near, strict=True))
        pair = np.stack(centred)
        sums += pair.sum(1)
        products += pair @ pair.T
    covariance = products - np.outer(sums, sums) / (count * (count - 1))
    scale = np.sqrt(covariance[0, 0] * covariance[1, 1])
    pearson = float(covariance[0, 1] / scale) if scale > 0 else 0.0
    return pearson, shared / (NEIGHBOURS * count)


def _of_folder(name: str) -> Embedding:
    """The task of a sentence-transformers model, from the files of its modules."""
    modules = _json_of(name, MODULES)
    if modules is None:
        raise InputError(
            f"{name}: it has no {MODULES}; --task embedding takes folders of sentence-transformers"
        )
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in ([*PARTS], [*PARTS[:2]]) or modules[0]["path"]:
        raise InputError(
            f"{name}: its modules are {', '.join(kinds)}; --task embedding takes "
            f"{', '.join(PARTS[:2])} and perhaps {PARTS[2]}, the first of them in the folder itself"
        )
    about = _json_of(name, LENGTH) or {}
    if about.get("do_lower_case"):
        raise InputError(
            f"{name}: {LENGTH} sets do_lower_case, which fastkd does not support; "
            "set it in the tokenizer"
        )
    using = _json_of(name, USED) or {}
    used = [role for role, prompt in (using.get("prompts") or {}).items() if prompt]
    if used:
        raise InputError(
            f"{name}: it adds prompts to texts ({', '.join(used)}), which fastkd does not support"
        )
    if using.get("truncate_dim") is not None:
        raise InputError(
            f"{name}: {USED} cuts embeddings to truncate_dim {using['truncate_dim']}, which fastkd "
            "does not support; remove it there"
        )
    library: Any = require("sentence_transformers.sentence_transformer.modules", EXTRA)
    try:
        modes = library.Pooling.load(name, subfolder=modules[1]["path"]).pooling_mode
    except (OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{name}: its pooling can't be loaded ({reason})") from error
    pooling = (modes,) if isinstance(modes, str) else tuple(modes)
    longest, similarity = about.get("max_seq_length"), using.get("similarity_fn_name")
    return Embedding(pooling, PARTS[2] in kinds, longest, similarity)


def _json_of(name: str, file: str) -> Any:
    """The JSON content of a file of a folder or hub name; None if there is no such file."""
    found = file_of(name, file)
    try:
        return None if found is None else json.loads(found.read_text(encoding="utf-8"))
    except ValueError:
        raise InputError(f"{name}: its {file} is damaged") from None
