"""`fastkd analyze` from the command line, on a tiny model saved to disk."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast
from typer.testing import CliRunner

from fastkd.analysis import adjacent_layer_cca, cka_matrix, svcca_matrix
from fastkd.app import analyze as report
from fastkd.app.cli import app

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "model", "of", "words"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(path)
    BertTokenizerFast(vocab=str(path / "vocab.txt")).save_pretrained(path)
    lines = ["a small model", "words", "", "a model of words a model of words", "small small"] * 8
    (path / "text.txt").write_text("\n".join(lines))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def test_numbers_and_pictures(folder, tmp_path):
    result = run("--model", folder, "--text", folder / "text.txt", "--out", tmp_path / "out",
                 "--batch-size", 7)  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out" / "layers.json").read_text())
    model, tokenizer = report.load_model(str(folder), torch.device("cpu"))
    texts = report.read_lines(folder / "text.txt")
    assert len(texts) == 32
    whole = list(report.batches_of(tokenizer, texts, batch_size=100))
    for name, expected in (
        ("svcca", svcca_matrix(model, whole)),
        ("cka", cka_matrix(model, whole)),
        ("adjacent_cca", adjacent_layer_cca(model, whole)),
    ):
        actual = torch.tensor(written[name], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert written["tokens"] == int(whole[0]["attention_mask"].sum())
    assert f"{written['adjacent_cca'][2]:.4f}" in result.output
    assert f"{written['rccc']:.4f}" in result.output
    for name in ("svcca.png", "cka.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "{folder}"], "give either --text FILE or --task NAME"),
        (["--model", "{folder}", "--text", "/no/such.txt"], "/no/such.txt: no such file"),
        (["--model", "/no/model", "--text", "{folder}/text.txt"], "/no/model: no such directory"),
        (["--model", "{folder}", "--task", "sst"], "--task 'sst' is not an option"),
        (["--model", "{folder}", "--text", "{folder}/text.txt", "--variance", "2"], "--variance"),
    ],
)
def test_mistakes_are_one_sentence(folder, arguments, message):
    result = run(*(part.format(folder=folder) for part in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
