"""`--preset paper`, every value typed here from the papers; `Config`, the same in Python."""

import dataclasses
from pathlib import Path

import pytest

from fastkd.distill import method_by_name
from fastkd.train import Config
from fastkd.train.errors import InputError
from fastkd.train.fitting import arguments_of, settled
from fastkd.train.options import as_json
from fastkd.train.processes import Computation
from fastkd.train.recipes import RECIPES, compared, lines, sentence

TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
#: By method: options of every task, those that tasks share in part, and hyper-parameters.
EXPECTED = {
    "fcd": (
        dict(batch_size=32, learning_rate=1e-5, weight_decay=0.5, schedule="cosine", max_length=128,
             student_layers=6, teacher_layers="bottom", num_train_epochs=5, warmup=1.0),
        {"cola": dict(num_train_epochs=25, warmup=0.2, max_length=64), "sst2": dict(max_length=64)},
        dict(soft_weight=0.0, layers="uniform", normalize="l2", distance="pearson")),
    "knn": (
        dict(num_train_epochs=5, batch_size=32, learning_rate=3e-5, max_length=128,
             student="huawei-noah/TinyBERT_General_6L_768D"),
        {}, dict(alpha2=0.5, alpha3=0.5, temperature=5.0)),
    "lrc_bert": (
        dict(num_train_epochs=18, student_layers=4, student_weights="random", batch_size=16,
             learning_rate=1e-4, student_config=dict(
                 hidden_size=312, intermediate_size=1200, num_attention_heads=12)),
        {task: dict(num_train_epochs=90) for task in ("mrpc", "rte", "cola")},
        dict(alpha=1.0, beta=1.0, gamma=3.0, temperature=1.1, first_stage=0.8, perturb=True)),
    "mc3kd": (
        dict(num_train_epochs=4, batch_size=32, learning_rate=3e-5, student_layers=6),
        {}, dict(temperature=20.0, layers=None)),
    "lrkd": (
        dict(batch_size=16, learning_rate=3e-5, max_length=128,
             student="google/bert_uncased_L-6_H-768_A-12"),
        {}, dict(gamma=0.3, projection_layers=2, scale_by_t2=False)),
}  # fmt: skip


def options(**values):
    return Config.of(**{"teacher": "teacher", "preset": "paper", "task": "rte", **values})


def values_of(config, names):
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("method", RECIPES)
def test_the_papers_training(method):
    every, some, hyperparameters = EXPECTED[method]
    for task in TASKS:
        values, found = every | some.get(task, {}), options(method=method, task=task)
        plain = Config.of(teacher="teacher", method=method, task=task)
        kept = vars(plain).keys() - values.keys() - {"preset"}
        assert values_of(found, values) == values
        assert values_of(found, kept) == values_of(plain, kept)
    report = compared(options(method=method), method_by_name(method, preset="paper"))
    assert not report["given"] and all(entry["place"] for entry in report["set"].values())
    searched = [entry for entry in report["set"].values() if entry.get("grid")]
    assert searched and all(entry["value"] in entry["grid"] for entry in searched)
    assert hyperparameters == {name: report["set"][name]["value"] for name in hyperparameters}
    own = dict(num_train_epochs=3.0, batch_size=32, learning_rate=5e-5)
    assert values_of(options(method=method, **own), own) == own
    assert options(method=method, student="mine").student == "mine"
    plain = dict(student=None, teacher_layers="uniform", student_weights="cut", student_config={})
    assert values_of(options(method=method, student_layers=2), plain) == plain


def test_values_that_depend_on_others():
    teacher = dict(finetune_teacher=2, teacher_learning_rate=3e-5)
    for given, values in (
        *((dict(method="fcd", num_train_epochs=epochs, **more), dict(warmup=warmup))
          for epochs, more, warmup in (
            (10, {}, 0.5), (3, {}, 1.0), (10, {"warmup": 0.1}, 0.1), (10, {"task": "cola"}, 0.5),
        )),
        (dict(method="fcd", command="cache"),
         dict(student_layers=6, teacher_layers="bottom", max_length=128)),
        (dict(method="fcd", teacher=None, teacher_cache=Path("cache")),
         dict(student_layers=None, teacher_layers="uniform", learning_rate=1e-5)),
        *((dict(method=name, finetune_teacher=2), teacher) for name in ("knn", "lrkd")),
        (dict(method="knn"), dict(finetune_teacher=0)),
        (dict(method="pkd", recipe="fcd"), EXPECTED["fcd"][0]),
        (dict(method="pkd"), dict(learning_rate=5e-5)),
    ):  # fmt: skip
        assert values_of(options(**given), values) == values
    config = settled(options(task="cola", method="fcd", device_name="cpu"))
    assert config.passed["lr_scheduler_type"] == "cosine" and config.warmup == 0.2
    # A config of a config keeps its values.
    again = dataclasses.replace(config, learning_rate=1.0)
    assert (again.learning_rate, again.num_train_epochs, again.weight_decay) == (1.0, 25, 0.5)


def test_a_short_run_and_a_second_stage_say_what_deviates(tmp_path):
    def told(**given):
        found = compared(options(method="fcd", task="cola", **given), method_by_name("fcd"))
        return set(found["given"]), sentence(found)

    given, text = told(training_steps=1, labelled=100, max_train_rows=200)
    assert given == {"steps", "labelled", "max_train_rows"}
    assert "s: steps 1 (4.2, instead of 25 epochs); labelled 100 (not in the paper)" in text
    stage = {"student": str(tmp_path / "1-general/student"), "out": tmp_path / "2-task"}
    assert "student" in told(**stage)[0]
    assert told(**stage, follows="0123")[1].endswith(", without a deviation. ")
    table = lines(compared(options(method="fcd", num_train_epochs=3), method_by_name("fcd")))
    assert "open in the paper" in "".join(table) and not lines({})
    assert "the learning rate only warms up" in table[-1]


def test_an_option_has_one_name():
    rows = {"teacher": "t", "task": "sst2", "device_name": "cpu"}
    for name in ("bf16", "output_dir", "per_device_train_batch_size", "warmup_steps", "use_cpu"):
        with pytest.raises(TypeError, match=name):
            Config.of(**rows, **{name: 1})
    with pytest.raises(ImportError, match=r"DistillConfig\(...\) is now Config.of"):
        __import__("fastkd.train", fromlist=["DistillConfig"])
    for given, words in (
        ({"learning_rate": 0.0}, "--learning-rate must be greater than 0"),
        ({"schedule": "cosin"}, "--schedule cosin:"), ({"recipe": "fcd"}, "needs --preset paper"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            settled(Config.of(**rows, **given))
    config = Config.of(**rows, precision="bf16", batch_size=4, warmup=0.46)
    arguments = arguments_of(config, Computation.of(config), config.out, rows=40)
    assert arguments.bf16 and arguments.per_device_train_batch_size == 4
    assert arguments.warmup_steps == 14 and as_json(config)["warmup"] == 0.46
    assert arguments.to_dict()["method"] == "auto"  # as trackers record it
