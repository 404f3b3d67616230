"""What a reader walks through: functions, files and depth of a small run, and of an LM's step."""

import functools
import sys
import traceback
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastkd
from fastkd._core import extension
from fastkd.distill import Distiller, SoftTargets
from tests.support.tiny import make_teacher, run, write_tsv

ROOT = Path(fastkd.__file__).resolve().parent
#: Named functions, files and depth of calls, at most.
MOST = {"run": (400, 45, 16), "step": (100, 18, 12)}


@functools.cache
def own(code) -> bool:
    """Whether a named function is fastkd's."""
    parents = Path(code.co_filename).resolve().parents
    return code.co_name[0] != "<" and (ROOT in parents or ROOT.parent / "kernels" in parents)


def walked(work) -> tuple[int, int, int]:
    """Named functions of fastkd that ``work()`` calls, their files, and the deepest call."""
    functions, deepest = set(), 0

    def count(frame, event, argument):
        nonlocal deepest
        if event == "call" and own(frame.f_code):
            functions.add(frame.f_code)
            stack = (at.f_code for at, _ in traceback.walk_stack(frame))
            deepest = max(deepest, sum(map(own, stack)))

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(functions), len({code.co_filename for code in functions}), deepest


def test_the_walk_through_a_run_is_short(tmp_path):
    rows = {"train": write_tsv(tmp_path / "train.tsv", 16), "eval": write_tsv(tmp_path / "dev.tsv")}
    options = {"teacher": make_teacher(tmp_path / "teacher"), "batch_size": 8, "max_length": 16}
    again = {**rows, **options, "epochs": 1, "device": "cpu"}
    run("distill", **again, out=tmp_path / "first")  # imports everything
    rows["train"].write_text(rows["train"].read_text() + "good film\t1\n")  # its tokens are new
    found = walked(lambda: run("distill", **again, out=tmp_path / "second"))
    assert all(a <= b for a, b in zip(found, MOST["run"], strict=True)), found


@pytest.mark.skipif(not extension.CPU, reason="needs the C++ extension")
def test_the_walk_through_a_step_of_language_models_is_short():
    """The second step: the first one compares each head with the model's logits."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    teacher, student = (
        LlamaForCausalLM(LlamaConfig(hidden_size=n, intermediate_size=2 * n, **sizes))
        for n in (32, 16)
    )
    distiller = Distiller(teacher, student, SoftTargets())
    ids = torch.randint(0, 64, (2, 10))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    distiller(**batch).loss.backward()
    found = walked(lambda: distiller(**batch).loss.backward())
    assert all(a <= b for a, b in zip(found, MOST["step"], strict=True)), found
