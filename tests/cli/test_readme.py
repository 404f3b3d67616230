"""The commands of README's table "I have ... I use ...", each at a tiny size."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastkd.cli.main import app
from fastkd.train.saving import read_json
from tests.support.protocol_server import Server
from tests.support.tiny import make_teacher, sentences, words_of
from tests.train.tasks.through import (
    make_bare,
    make_chat_teacher,
    make_decoder,
    make_embedder,
    write_chats,
    write_jsonl,
    write_lines,
    write_lists,
    write_text,
)

README = (Path(__file__).parents[2] / "README.md").read_text()
TABLE = README.partition("## I have")[2].partition("\n## ")[0]
LINES = re.findall(r"(?m)^\| (.+) \| `(fastkd .+)` \|$", TABLE)
TINY = {"epochs": 1, "batch_size": 8, "max_length": 16, "device": "cpu"}
# The tiny decoder has fewer tokens than a server returns by default.
SERVED = {"top_k": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The models and files that the table names."""
    path = tmp_path_factory.mktemp("readme")
    for name, make, options in (
        ("classifier", make_teacher, {}), ("encoder", make_bare, {}),
        ("decoder", make_decoder, {}), ("chat-model", make_chat_teacher, {}),
        ("embedder", make_embedder, {}), ("cross-encoder", make_teacher, {"labels": 1}),
    ):  # fmt: skip
        make(path / name, **options)
    for name, seed in (("train", 0), ("dev", 1)):
        rows = [f"{text},{label}" for text, label in sentences(24, seed)]
        (path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    told = ({"text": text, "label": [0.8, 0.2][:: 1 - 2 * y]} for text, y in sentences(24, 2))
    write_jsonl(path / "probabilities.jsonl", told)
    write_lines(path / "texts.txt")
    write_text(path / "books.txt", 20)
    write_text(path / "held-out.txt", 8, seed=1)
    write_chats(path / "chats.jsonl", 12)
    write_lists(path / "lists.jsonl", 12)
    return path


@pytest.fixture(scope="module")
def server(folder):
    served = Server(folder / "decoder")
    yield served
    served.stop()


@pytest.mark.parametrize("line", [pytest.param(line, id=who) for who, line in LINES])
def test_every_line_of_the_table_trains_a_student(line, folder, tmp_path, monkeypatch, request):
    monkeypatch.chdir(folder)
    url = re.search(r"http://\S+", line)
    if url is not None:
        line = line.replace(url[0], f"{request.getfixturevalue('server').address}/v1")
    _, command, *words = shlex.split(line)
    more = TINY if url is None else {**TINY, **SERVED}
    words = [*words, *words_of(command, **more, out=tmp_path / "out")[1:]]
    result = CliRunner().invoke(app, [command, *words])
    assert result.exit_code == 0, result.output
    assert read_json(tmp_path / "out/student/fastkd.json")["complete"]


def test_the_order_of_the_page():
    titles = re.findall(r"(?m)^## (.+)$", README)
    first = ["A run", "Ten options", "I have … → I use …"]
    assert titles[:3] == first and titles.index("Speed") > titles.index("The losses")
    options = README.partition("## Ten options")[2].partition("\n## ")[0]
    assert len(re.findall(r"(?m)^\| `--", options)) == 10
    assert len(LINES) == 8
