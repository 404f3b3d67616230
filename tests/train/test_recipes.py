"""`--preset paper`, every value typed here from the papers; `Config`, the same in Python."""

import dataclasses
import re
from pathlib import Path

import pytest

from fastkd.distill import method_by_name
from fastkd.train import Config
from fastkd.train.errors import InputError
from fastkd.train.fitting import arguments_of, settled
from fastkd.train.options import as_json
from fastkd.train.processes import Computation
from fastkd.train.recipes import RECIPES, compared, lines, sentence
from fastkd.train.saving import read_json
from tests.support.runs import report_of
from tests.support.tiny import make_teacher

TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
#: By method: options of every task, those that tasks share in part, and hyper-parameters.
EXPECTED = {
    "fcd": ({
        "batch_size": 32, "learning_rate": 1e-5, "weight_decay": 0.5, "schedule": "cosine",
        "student_layers": 6, "teacher_layers": "bottom", "num_train_epochs": 5, "warmup": 1.0,
        "max_length": 128,
    }, {"cola": {"num_train_epochs": 25, "warmup": 0.2, "max_length": 64},
        "sst2": {"max_length": 64}},
        {"soft_weight": 0.0, "layers": "uniform", "normalize": "l2", "distance": "pearson"}),
    "knn": ({
        "num_train_epochs": 5, "batch_size": 32, "learning_rate": 3e-5, "max_length": 128,
        "student": "huawei-noah/TinyBERT_General_6L_768D",
    }, {}, {"alpha2": 0.5, "alpha3": 0.5, "temperature": 5.0}),
    "lrc_bert": ({
        "num_train_epochs": 18, "student_layers": 4, "student_weights": "random", "batch_size": 16,
        "learning_rate": 1e-4, "student_config": {
            "hidden_size": 312, "intermediate_size": 1200, "num_attention_heads": 12},
    }, {task: {"num_train_epochs": 90} for task in ("mrpc", "rte", "cola")},
        {"alpha": 1.0, "beta": 1.0, "gamma": 3.0, "temperature": 1.1, "first_stage": 0.8,
         "perturb": True}),
    "mc3kd": ({
        "num_train_epochs": 4, "batch_size": 32, "learning_rate": 3e-5, "student_layers": 6,
    }, {}, {"temperature": 20.0, "layers": None}),
    "lrkd": ({
        "batch_size": 16, "learning_rate": 3e-5, "max_length": 128,
        "student": "google/bert_uncased_L-6_H-768_A-12",
    }, {}, {"gamma": 0.3, "projection_layers": 2, "scale_by_t2": False}),
}  # fmt: skip


def options(**values):
    return Config.of(**{"teacher": "teacher", "preset": "paper", "task": "rte", **values})


@pytest.mark.parametrize("method", RECIPES)
def test_the_papers_training_and_what_overrides_it(method):
    every, some, hyperparameters = EXPECTED[method]
    for task in TASKS:
        values, found = every | some.get(task, {}), options(method=method, task=task)
        plain = Config.of(teacher="teacher", method=method, task=task)
        kept = vars(plain).keys() - values.keys() - {"preset"}
        assert {name: getattr(found, name) for name in values} == values
        assert {k: getattr(found, k) for k in kept} == {k: getattr(plain, k) for k in kept}
    report = compared(options(method=method), method_by_name(method, preset="paper"))
    assert not report["given"] and all(entry["place"] for entry in report["set"].values())
    searched = [entry for entry in report["set"].values() if entry.get("grid")]
    assert searched and all(entry["value"] in entry["grid"] for entry in searched)
    found = {name: report["set"][name]["value"] for name in hyperparameters}
    assert found == hyperparameters
    own = {"num_train_epochs": 3.0, "batch_size": 32, "learning_rate": 5e-5, "student_layers": 2}
    found = options(method=method, **own)
    assert {name: getattr(found, name) for name in own} == own
    assert (found.student, found.teacher_layers) == (None, "uniform")
    assert found.student_weights == "cut" and not found.student_config
    assert options(method=method, student="mine").student == "mine"


def test_values_that_depend_on_others():
    for given, warmup in (  # FCD's is of five epochs
        ({"num_train_epochs": 10}, 0.5), ({"num_train_epochs": 3}, 1.0),
        ({"num_train_epochs": 10, "warmup": 0.1}, 0.1),
        ({"num_train_epochs": 10, "task": "cola"}, 0.5),
    ):  # fmt: skip
        assert options(method="fcd", **given).warmup == warmup
    config = settled(options(task="cola", method="fcd", device_name="cpu"))
    assert config.passed["lr_scheduler_type"] == "cosine" and config.warmup == 0.2
    # A config of a config keeps its values.
    again = dataclasses.replace(config, learning_rate=1.0)
    assert (again.learning_rate, again.num_train_epochs, again.weight_decay) == (1.0, 25, 0.5)
    assert options(method="knn").finetune_teacher == 0
    for method in ("knn", "lrkd"):
        tuned = options(method=method, finetune_teacher=2)
        assert (tuned.finetune_teacher, tuned.teacher_learning_rate) == (2, 3e-5)
    cache = options(command="cache", method="fcd")
    assert (cache.student_layers, cache.teacher_layers, cache.max_length) == (6, "bottom", 128)
    cached = options(method="fcd", teacher=None, teacher_cache=Path("cache"))
    assert (cached.student_layers, cached.teacher_layers) == (None, "uniform")
    assert cached.learning_rate == 1e-5
    pkd, every = options(method="pkd", recipe="fcd"), EXPECTED["fcd"][0]
    assert {name: getattr(pkd, name) for name in every} == every
    assert options(method="pkd").learning_rate == 5e-5


def test_a_short_run_and_a_second_stage_say_what_deviates(tmp_path):
    def told(**given):
        found = compared(options(method="fcd", task="cola", **given), method_by_name("fcd"))
        return set(found["given"]), sentence(found)

    given, text = told(training_steps=1, labelled=100, max_train_rows=200)
    assert given == {"steps", "labelled", "max_train_rows"}
    said = "deviations: steps 1 (4.2, instead of 25 epochs); labelled 100 (not in the paper)"
    assert said in text
    stage = {"student": str(tmp_path / "1-general/student"), "out": tmp_path / "2-task"}
    assert "student" in told(**stage)[0]
    assert told(**stage, follows="0123")[1].endswith(", without a deviation. ")
    only = lines(compared(options(method="fcd", num_train_epochs=3), method_by_name("fcd")))
    assert "the learning rate only warms up" in only[-1] and not lines({})


def test_a_short_run_prints_and_records_its_recipe(distill, tmp_path):
    """And that its schedule ends early. Steps are of the student; the teacher has its epochs."""
    given = {"steps": 4, "batch_size": 10, "student_layers": 2, "set": "first_stage=0.8"}
    output = distill(teacher=make_teacher(tmp_path / "teacher", head=False), finetune_teacher=2,
                     **dict.fromkeys(("epochs", "learning_rate")), **given, method="lrc_bert",
                     preset="paper")  # fmt: skip
    for words in (
        "warning: LRCBERT trains soft, task only near the end of its schedule",
        r"beyond the last of 4 steps \(at 75%\)", "recipe of LRC-BERT:",
        r"(?m)^ *learning_rate .*set by the paper: Distillation Setup, of 5e-05, 0.0001",
        r"(?m)^ *batch_size .*given by you: Distillation Setup: 16",
        r"(?m)^ *first_stage .*given by you: Distillation Setup, of 0, 0.05, ",
        r"(?m)^ *precision .*open in the paper",
    ):  # fmt: skip
        assert re.search(words, output), words
    report = report_of(tmp_path / "out")
    entry = {"value": 1e-4, "place": "Distillation Setup", "grid": [5e-5, 1e-4, 3e-4]}
    assert report["recipe"]["set"]["learning_rate"] == entry
    assert report["settings"]["learning_rate"] == 1e-4
    card = (tmp_path / "out/student/README.md").read_text()
    assert "steps 4 (Distillation Setup, instead of 18 epochs)" in card
    teacher = read_json(tmp_path / "out/teacher/fastkd.json")
    assert [x["history"][-1]["step"] for x in (report, teacher)] == [4, 8]


def test_an_option_has_one_name():
    rows = {"teacher": "t", "task": "sst2", "device_name": "cpu"}
    for name in ("bf16", "output_dir", "per_device_train_batch_size", "warmup_steps", "use_cpu"):
        with pytest.raises(TypeError, match=name):
            Config.of(**rows, **{name: 1})
    with pytest.raises(ImportError, match=r"DistillConfig\(...\) is now Config.of"):
        __import__("fastkd.train", fromlist=["DistillConfig"])
    for given, words in (
        ({"learning_rate": 0.0}, "--learning-rate must be greater than 0"),
        ({"schedule": "cosin"}, "--schedule cosin:"),
        ({"recipe": "fcd"}, "--recipe needs --preset paper"),
    ):
        with pytest.raises(InputError, match=words):
            settled(Config.of(**rows, **given))
    config = Config.of(**rows, precision="bf16", batch_size=4, warmup=0.5)
    arguments = arguments_of(config, Computation.of(config), config.out, rows=40)
    assert arguments.bf16 and arguments.per_device_train_batch_size == 4
    assert arguments.to_dict()["method"] == "auto"  # as trackers record it
    assert arguments.warmup_steps == 15 and as_json(config)["warmup"] == 0.5
