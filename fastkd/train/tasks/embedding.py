"""Sentence embeddings: texts, or pairs of them, which may have a score of how alike they are."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fastkd._core.extras import require
from fastkd.train.columns import Columns, field, holds_text, settle_columns, text_of
from fastkd.train.corpus import Corpus
from fastkd.train.errors import InputError
from fastkd.train.glue import Glue
from fastkd.train.hub import why_not
from fastkd.train.labels import as_number
from fastkd.train.rows import BATCH, Encoded, Rows
from fastkd.train.score import accepted, evaluate
from fastkd.train.tasks.task import LABEL, Fitted, Given, Task

EXTRA = "sentence-transformers"
MODULES, LENGTH = "modules.json", "sentence_bert_config.json"
PARTS = ("Transformer", "Pooling", "Normalize")
SCORED = ("spearman", "pearson")
AGREEMENT = ("agreement", "overlap")
NEIGHBOURS = 10


@dataclass(frozen=True)
class Embedding(Task):
    """Texts, in columns ``text``, ``sentence``, or ``sentence1``, ``sentence2`` and ``score``.

    Each text is a row of tokens. Models are folders of sentence-transformers, and so are students:
    the teacher's pooling and normalisation make embeddings of their last hidden states. Where the
    rows to evaluate on have scores, those of a model are the correlations of its cosines with
    them. Without, they compare with the teacher: agreement is Pearson's correlation of the cosines
    of all texts, overlap the share of each text's ten nearest that are the teacher's, too.
    """

    metrics: ClassVar[tuple[str, ...]] = (*SCORED, *AGREEMENT)
    usual: ClassVar[tuple[str, ...]] = SCORED
    head: ClassVar[str] = "AutoModel"
    head_name: ClassVar[str] = "head"
    pipeline: ClassVar[str] = "sentence-similarity"
    library: ClassVar[str] = "sentence-transformers"
    supervised: ClassVar[bool] = False
    columns: ClassVar[Columns] = Columns(None, None, None)

    #: How the states of a text become one, and whether that gets length 1.
    pooling: tuple[str, ...] = ("mean",)
    normalized: bool = False
    #: Tokens that sentence-transformers reads of a text.
    max_seq_length: int | None = None
    #: Whether there are scores to evaluate on.
    scored: bool = True

    @classmethod
    def settle(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        if columns.text is None and not {"text", "sentence"} & set(record):
            usual = {"text": "sentence1", "pair": "sentence2", "label": "score"}
            found = {part: name for part, name in usual.items() if name in record}
            asked = {part: name for part in usual if (name := getattr(columns, part)) is not None}
            columns = replace(columns, **{**found, **asked})
        columns = settle_columns(columns, record, source)
        if columns.label is not None and columns.pair is None:
            raise InputError(
                f"{source}: column {columns.label!r} scores how alike two texts are; "
                "--text-pair-column says where the second is"
            )
        return columns

    @classmethod
    def features(cls, columns: Columns) -> dict[str, Any]:
        return {"text": "large_string", "pair": "large_string", LABEL: "float64"}

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        text = text_of(record, columns.text, where)
        pair = None if columns.pair is None else text_of(record, columns.pair, where)
        if columns.label is None:
            return {"text": text, "pair": pair, LABEL: None}
        value = field(record, columns.label, where)
        score = as_number(value)
        if score is None or score != score:
            raise InputError(f"{where}: score {value!r:.40} is not a finite number")
        return {"text": text, "pair": pair, LABEL: score}

    @classmethod
    def full(cls, row: Mapping[str, Any]) -> bool:
        pair = row.get("pair")
        return holds_text(row["text"]) and (pair is None or holds_text(pair))

    @classmethod
    def texts(cls, rows: Rows) -> list[str]:
        return [text for pair in rows.both_texts() for text in pair if text is not None]

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: Given) -> Fitted:
        return Fitted(cls(scored=all(map(_scored, evals.values()))), train, evals)

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> Task:
        """The pooling of the folder, or the name on the hub, that ``config`` is of."""
        return _of_folder(config.name_or_path)

    def match(
        self, corpus: Corpus, head: Task | None, asked: str | None, who: str, fresh: bool = False
    ) -> Corpus:
        corpus = super().match(corpus, head, asked, who, fresh)
        if not isinstance(head, Embedding):
            return corpus
        return replace(corpus, task=replace(head, scored=self.scored))

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        if not _scored(rows):
            raise InputError(
                f"{rows.source}: two texts a row and a score are needed; --text-pair-column and "
                "--label-column say where they are"
            )
        return super().read_labels(rows, asked)

    def chosen(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        if wanted in SCORED and not self.scored:
            raise InputError(
                f"--metric {wanted}: the rows to evaluate on have no scores; --text-pair-column "
                "and --label-column say where they are"
            )
        found = super().chosen(wanted, None)
        if self.scored:
            return found
        return tuple(dict.fromkeys((*((wanted,) if wanted else ()), *AGREEMENT)))

    def beside_teacher(self, metrics: Sequence[str]) -> bool:
        return not set(metrics).isdisjoint(AGREEMENT)

    def room(self, tokenizer: Any, rows: Rows) -> tuple[int, str]:
        return tokenizer.num_special_tokens_to_add(pair=False), "a text"

    def encode(
        self, batch: dict[str, list], tokenizer: Any, max_length: int
    ) -> Mapping[str, list[Any]]:
        rows = zip(batch["number"], batch["text"], batch["pair"], strict=True)
        each = [(number, text) for number, *pair in rows for text in pair if text is not None]
        numbers, texts = ([part[i] for part in each] for i in range(2))
        return {**tokenizer(texts, truncation=True, max_length=max_length), "number": numbers}

    def samples(self, tokenizer: Any, longest: int) -> list[dict[str, torch.Tensor]]:
        raise InputError(
            f"--task {self.name()}: fastkd exports logits, and this model has none; "
            'SentenceTransformer(folder, backend="onnx") exports it'
        )

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The embeddings of a batch's texts, (B, D)."""
        found = model(**accepted(model, batch))
        if "last_hidden_state" not in found:
            raise InputError(f"--onnx: --task {self.name()} needs hidden states, not logits")
        states = found.last_hidden_state.float()
        read = {"token_embeddings": states, "attention_mask": batch["attention_mask"]}
        embedded = self._pool(states.shape[-1])(read)["sentence_embedding"]
        return (F.normalize(embedded, dim=-1) if self.normalized else embedded).cpu().numpy()

    def _pool(self, width: int) -> Any:
        modules: Any = require("sentence_transformers.sentence_transformer.modules", EXTRA)
        return modules.Pooling(width, self.pooling)

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        if not self.finite(answers):
            return dict.fromkeys(metrics, float("nan"))
        found = {}
        wanted = [name for name in metrics if name in SCORED]
        if wanted:
            cosines = np.array([one[-1] for one in self._pairs(answers, examples)])
            truths = np.array([score for (score,) in examples.rows.columns(LABEL)])
            found = evaluate(wanted, cosines[:, None], truths)
        if self.beside_teacher(metrics):
            found.update(self._agreement(answers, examples))
        return {name: found[name] for name in metrics}

    def _agreement(self, answers: Any, examples: Encoded) -> dict[str, float]:
        if len(answers) <= NEIGHBOURS + 1:
            raise InputError(
                f"{examples.rows.source}: {len(answers)} texts, and {', '.join(AGREEMENT)} need at "
                f"least {NEIGHBOURS + 2}"
            )
        if examples.taught is None:
            raise InputError(
                f"{', '.join(AGREEMENT)} compare with the teacher, which isn't there; "
                f"take one of {', '.join(SCORED)}"
            )
        return dict(zip(AGREEMENT, agreement(answers, examples.taught), strict=True))

    def _pairs(self, answers: Any, examples: Encoded) -> Iterator[tuple[Any, Any, float | None]]:
        """The embeddings of each row that was read, and their cosine."""
        each = iter(answers)
        for (pair,) in examples.rows.columns("pair"):
            first, second = next(each), None if pair is None else next(each)
            cosine = None if second is None else float(_unit(first) @ _unit(second))
            yield first, second, cosine

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        found = []
        for first, second, cosine in self._pairs(answers, examples):
            row: dict[str, Any] = {"embedding": first.tolist()}
            if second is not None:
                row.update(pair_embedding=second.tolist(), cosine=cosine)
            found.append(row)
        return found

    def shown(self, rows: Rows) -> Iterator[dict[str, Any]]:
        for text, pair in rows.columns("text", "pair"):
            yield {"text": text} if pair is None else {"text": text, "pair": pair}

    def save(self, directory: Path, config: Any) -> None:
        modules = [
            {"idx": i, "name": str(i), "path": f"{i}_{part}" if i else "", "type": f"{TYPES}{part}"}
            for i, part in enumerate(PARTS[: 3 if self.normalized else 2])
        ]
        for module in modules[1:]:
            (directory / str(module["path"])).mkdir()
        self._pool(config.hidden_size).save(str(directory / str(modules[1]["path"])))
        length = {"max_seq_length": self.max_seq_length, "do_lower_case": False}
        for name, content in ((MODULES, modules), (LENGTH, length)):
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def report(self) -> dict[str, Any]:
        return {"labels": None, "pooling": self.pooling, "normalized": self.normalized}

    @classmethod
    def about(cls, report: Mapping[str, Any]) -> str:
        length = ", of length 1" if report["normalized"] else ""
        return f"It embeds a text: {' and '.join(report['pooling'])} of the tokens{length}."

    @classmethod
    def usage(cls, report: Mapping[str, Any], directory: str) -> str:
        return (
            "from sentence_transformers import SentenceTransformer\n\n"
            f'model = SentenceTransformer("{directory}")\n'
            'print(model.similarity(model.encode("..."), model.encode("...")))'
        )


TYPES = "sentence_transformers.models."
TASK = Embedding


def _scored(rows: Rows) -> bool:
    """Whether rows have scores: all of a file have, or none."""
    return len(rows) > 0 and rows.data[0][LABEL] is not None


def _unit(embedding: np.ndarray) -> np.ndarray:
    """Of length 1, in float64; 0 stays."""
    wide = embedding.astype(np.float64)
    length = np.linalg.norm(wide, axis=-1, keepdims=True)
    return wide / np.where(length > 0, length, 1)


def agreement(student: np.ndarray, teacher: np.ndarray) -> tuple[float, float]:
    """How alike embeddings (N, D) and (N, Dt) place N texts; N at least 12.

    Pearson's correlation of the cosines of all pairs, and the share of a text's ten nearest that
    are the other's too. Needs memory for 128 rows of cosines.
    """
    sides = _unit(student), _unit(teacher)
    count = len(student)
    shared, sums, products = 0, np.zeros(2), np.zeros((2, 2))
    # Cosines shifted by their means: no digits are lost where all are near 1.
    means = [((x.sum(0) ** 2).sum() - (x**2).sum()) / (count * (count - 1)) for x in sides]
    for start in range(0, count, BATCH):
        rows = range(start, min(start + BATCH, count))
        itself = np.arange(len(rows)), np.array(rows)
        near, centred = [], []
        for side, mean in zip(sides, means, strict=True):
            cosines = side[start : rows.stop] @ side.T
            cosines[itself] = -np.inf
            near.append(np.argpartition(-cosines, NEIGHBOURS, axis=1)[:, :NEIGHBOURS])
            cosines -= mean
            cosines[itself] = 0
            centred.append(cosines.ravel())
        shared += sum(len(np.intersect1d(a, b)) for a, b in zip(*near, strict=True))
        both = np.stack(centred)
        sums += both.sum(1)
        products += both @ both.T
    spread = products - np.outer(sums, sums) / (count * (count - 1))
    scale = np.sqrt(spread[0, 0] * spread[1, 1])
    pearson = float(spread[0, 1] / scale) if scale > 0 else 0.0
    return pearson, shared / (NEIGHBOURS * count)


def _of_folder(name: str) -> Embedding:
    """The task as the modules of a sentence-transformers model say."""
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
            f"{name}: {LENGTH} says do_lower_case, which is for the tokenizer to do; set it there"
        )
    if (_json_of(name, "config_sentence_transformers.json") or {}).get("default_prompt_name"):
        raise InputError(f"{name}: it puts a prompt before each text, which fastkd does not")
    library: Any = require("sentence_transformers.sentence_transformer.modules", EXTRA)
    try:
        modes = library.Pooling.load(name, subfolder=modules[1]["path"]).pooling_mode
    except (OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{name}: its pooling can't be loaded ({reason})") from error
    pooling = (modes,) if isinstance(modes, str) else tuple(modes)
    return Embedding(pooling, PARTS[2] in kinds, about.get("max_seq_length"))


def _json_of(name: str, file: str) -> Any:
    """The content of a file of a folder, or of a name on the hub; None if it isn't there."""
    hub: Any = require("transformers.utils", "train")
    try:
        found = hub.cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name}: its {file} can't be read ({why_not(error)})") from error
    except ValueError:
        raise InputError(f"{name}: its {file} is damaged") from None
