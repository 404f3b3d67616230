"""`fastkd demo --task causal-lm`: the whole run on a tiny library."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastkd.cli import demo_text
from fastkd.cli.demo import TITLES
from fastkd.distill import METHODS
from fastkd.train.errors import InputError
from tests.support.tiny import run


def write_library(root, files):
    root.mkdir()
    for i in range(files):
        lines = [f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(40)]
        (root / f"module{i}.py").write_text("\n".join(lines))
    (root / "test").mkdir()
    (root / "test" / "module.py").write_text("never = 'read'\n")
    (root / "empty.py").write_text("\n")
    return root


def test_whole_demo(tmp_path, monkeypatch):
    root = write_library(tmp_path / "library", 24)
    monkeypatch.setattr(demo_text.sysconfig, "get_path", lambda name: str(root))
    out = tmp_path / "demo"
    output = run("demo", "--fast", task="causal-lm", out=out, device="cpu")
    report = json.loads((out / "demo.json").read_text())
    assert {*report["students"], *report["left_out"]} == set(METHODS)
    assert set(report["left_out"]) <= {"knn"}  # which wants classes
    for name, row in report["students"].items():
        assert row["perplexity"] > 1 and len(row["curve"]) == 1
        assert row["parameters"] < report["teacher"]["parameters"] and TITLES[name] in output
    assert report["sample"].startswith("def ") and report["sample"] in output
    assert (out / "students.png").stat().st_size > 5000
    AutoModelForCausalLM.from_pretrained(out / "student")
    tokenizer = AutoTokenizer.from_pretrained(out / "student")
    text = "def f(x):\n\treturn  'é'\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert "never" not in (out / "text/train.jsonl").read_text()
    run("demo", "--fast", task="causal-lm", out=out, device="cpu", steps=1)


def test_a_python_without_sources_is_one_sentence(tmp_path):
    root = write_library(tmp_path / "library", 0)
    with pytest.raises(InputError, match="too few sources"):
        demo_text.write_texts(tmp_path, demo_text.Size(train_files=6, eval_files=2), root)
