"""What a reader walks through: functions, files and depth of a small run, and of an LM's step."""

import functools
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import fastkd
from fastkd._core import extension
from fastkd.distill import Distiller, SoftTargets
from tests.distill.models import batch, model
from tests.support.tiny import write_tsv

ROOT = Path(fastkd.__file__).resolve().parent
OURS = (f"{ROOT}/", f"{ROOT.parent}/kernels/")


@functools.cache
def own(code) -> bool:
    """Whether a named function is fastkd's."""
    return code.co_name[0] != "<" and str(Path(code.co_filename).resolve()).startswith(OURS)


def assert_short(work, *most) -> None:
    """``work()`` calls at most so many named functions of fastkd, in so many files, so deep."""
    functions, depths = set(), [0]

    def count(frame, event, argument):
        if event in ("call", "return") and own(frame.f_code):
            functions.add(frame.f_code)
            depths.append(depths[-1] + (1 if event == "call" else -1))

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    found = len(functions), len({code.co_filename for code in functions}), max(depths)
    assert all(a <= b for a, b in zip(found, most, strict=True)), found


def test_the_walk_through_a_run_is_short(distill, tmp_path):
    rows = write_tsv(tmp_path / "train.tsv", 16)
    distill(train=rows)  # imports everything
    rows.write_text(rows.read_text() + "good film\t1\n")  # its tokens are new
    assert_short(lambda: distill(train=rows, out=tmp_path / "second"), 400, 45, 16)


@pytest.mark.skipif(not extension.CPU, reason="needs the C++ extension")
def test_the_walk_through_a_step_of_language_models_is_short():
    """The second step: the first one compares each head with the model's logits."""
    models = (model(LlamaForCausalLM, "llama", hidden_size=n) for n in (32, 16))
    distiller, data = Distiller(*models, SoftTargets()), batch(padding=0)
    data["labels"] = data["input_ids"]
    distiller(**data).loss.backward()
    assert_short(lambda: distiller(**data).loss.backward(), 100, 18, 12)
