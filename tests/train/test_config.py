"""`DistillConfig`, the options of `fastkd distill` in Python."""

from dataclasses import replace

import pytest
from transformers import TrainingArguments

from fastkd.train import DistillConfig, run_distillation
from fastkd.train.errors import InputError
from tests.support.tiny import make_teacher, write_tsv


def test_a_run_in_python(tmp_path):
    write_tsv(tmp_path / "train.tsv", 16)
    write_tsv(tmp_path / "dev.tsv", 8, seed=1)
    config = DistillConfig(
        teacher=str(make_teacher(tmp_path / "teacher")), train=str(tmp_path / "train.tsv"),
        evals=str(tmp_path / "dev.tsv"), out=str(tmp_path / "out"), method="soft_targets",
        num_train_epochs=1, batch_size=8, max_length=16, device_name="cpu",
        gradient_accumulation_steps=2,
    )  # fmt: skip
    assert isinstance(config, TrainingArguments) and config.device.type == "cpu"
    report = run_distillation(config)
    assert [entry["step"] for entry in report["history"]] == [1]
    assert report["settings"]["epochs"] == 1
    assert report["settings"]["trainer_args"] == {"gradient_accumulation_steps": 2}
    with pytest.raises(InputError, match="was started with trainer_args"):
        run_distillation(replace(config, resume=True, gradient_accumulation_steps=1))
    assert (tmp_path / "out" / "student" / "README.md").exists()


def test_an_option_has_one_name():
    rows = {"teacher": "t", "task": "sst2", "device_name": "cpu"}
    for name in ("bf16", "output_dir", "per_device_train_batch_size", "warmup_steps", "use_cpu"):
        with pytest.raises(TypeError, match=name):
            DistillConfig(**rows, **{name: 1})
    with pytest.raises(InputError, match="--learning-rate must be greater than 0"):
        DistillConfig(**rows, learning_rate=0.0)
    config = DistillConfig(**rows, precision="bf16", batch_size=4, warmup=0.5)
    assert config.bf16 and config.per_device_train_batch_size == 4
    assert config.saved()["warmup"] == 0.5 and config.to_dict()["out"] == "runs/distill"
