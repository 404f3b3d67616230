"""A tiny teacher with its tokenizer, and tiny data, for tests of the command line."""

import inspect
import random
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
from typer.testing import CliRunner

from fastkd.cli.main import app
from fastkd.train import scoring
from fastkd.train.config import Config

# A run times its models for its report: a round of passes, not five, half of all passes otherwise.
scoring.REPEATS = 1
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS = ["good", "fine", "nice", "bad", "poor", "dull", "a", "the", "film", "is", "very", "so"]


def make_teacher(path, labels=2, layers=4, head=True, words=WORDS, longest=32, **config) -> Path:
    """Save a random BERT classifier (or, without ``head``, encoder) and its tokenizer.

    ``labels``: how many, or their names.
    """
    path.mkdir()
    if not isinstance(labels, int):
        config["label2id"] = {name: i for i, name in enumerate(labels)}
        config["id2label"], labels = dict(enumerate(labels)), len(labels)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = path / "vocab.txt"
    vocab.write_text("\n".join(specials + words))
    tokenizer = BertTokenizer(str(vocab), model_max_length=longest)
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    settings = {
        "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": longest, "num_labels": labels,
        "vocab_size": len(specials) + len(words), "initializer_range": 0.2, **config,
    }  # fmt: skip
    model = BertForSequenceClassification(BertConfig(**settings))
    (model if head else model.bert).save_pretrained(path)
    return path


def read_otherwise(path: Path) -> None:
    """Give a model of `make_teacher` a tokenizer with the words in another order."""
    words = (path / "vocab.txt").read_text().split()
    for old in path.glob("tokenizer*"):
        old.unlink()
    (path / "vocab.txt").write_text("\n".join(words[:5] + words[:4:-1]))
    BertTokenizer(str(path / "vocab.txt"), model_max_length=32).save_pretrained(path)


def words_of(command: str, *flags: object, **options: object) -> list[str]:
    """A command line; an option that is None is left out, one that is True is a flag."""
    words = [command, *map(str, flags)]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def run(command: str, *flags: object, expect: int = 0, **options: object) -> str:
    """Output of a command; if it must fail with ``expect``, its error sentence."""
    words = words_of(command, *flags, **options)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    if result.exit_code != expect:
        raise AssertionError(result.output) from result.exception
    if expect in (1, 2):
        assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr if expect else result.output


def usual(tiny: Path, folder: Path, **options: object) -> dict[str, object]:
    """Options of `fastkd distill` on the files of ``tiny``, with those given here above them."""
    return {
        "teacher": tiny / "teacher", "train": tiny / "train.tsv", "eval": tiny / "dev.tsv",
        "epochs": 1, "batch_size": 8, "max_length": 16, "device": "cpu", "learning_rate": 1e-3,
        "out": folder / "out", **options,
    }  # fmt: skip


def source(**options: object) -> Config:
    """The options of rows, checked as those of a command."""
    return Config.of(command="verify", **options)


def sentences(rows: int, seed: int) -> list[tuple[str, int]]:
    """Texts whose first word determines the class, 0 or 1."""
    rng = random.Random(seed)
    made = []
    for i in range(rows):
        label = i % 2
        first = rng.choice(WORDS[3 * (1 - label) : 3 * (1 - label) + 3])
        made.append((" ".join([first, *rng.choices(WORDS[6:], k=rng.randint(1, 6))]), label))
    return made


def write_tsv(path: Path, rows: int = 40, seed: int = 0, label=lambda y: y) -> Path:
    """A file of `sentences`, with the header of SST-2."""
    lines = [f"{text}\t{label(y)}" for text, y in sentences(rows, seed)]
    path.write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return path


class _Graph(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, names: list[str], outputs: tuple[str, ...]):
        super().__init__()
        self.model, self.names, self.outputs = model, names, outputs

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model(**dict(zip(self.names, inputs, strict=True)))
        return tuple(getattr(found, name) for name in self.outputs)


def write_onnx(model: torch.nn.Module, path: Path, *outputs: str) -> None:
    """An ONNX file of the named outputs, for batches of any size."""
    for module in ("onnx", "onnxruntime"):
        pytest.importorskip(module)
    inputs = {"input_ids": torch.ones(2, 8).long(), "attention_mask": torch.ones(2, 8).long()}
    inputs["attention_mask"][1, 5:] = 0
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["token_type_ids"] = torch.zeros(2, 8).long()
    names, free = [*inputs, *outputs], {0: "rows", 1: "tokens"}
    # The exporter by torch.export takes ten seconds more.
    torch.onnx.export(
        _Graph(model, list(inputs), outputs).eval(), tuple(inputs.values()), str(path),
        input_names=list(inputs), output_names=list(outputs), dynamo=False, verbose=False,
        dynamic_axes=dict.fromkeys(names, free),
    )  # fmt: skip
