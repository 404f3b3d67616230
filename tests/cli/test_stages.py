"""`fastkd distill --stages`: each stage trains the student of the stage before."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

from fastkd.study import grid, grid_report
from fastkd.study.grid import StudySettings
from fastkd.study.grid_runs import GridRuns
from fastkd.train import distillation
from tests.support.runs import (
    once,
    press_ctrl_c,
    report_of,
    same_weights,
    stop_at,
    visible,
    weights_of,
)
from tests.support.tiny import make_teacher, run, sentences, write_tsv
from tests.train.tasks.through import write_text

PAGE = Path(__file__).parents[2] / "docs" / "distill.md"
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
(PLAN,) = (block for block in BLOCKS if "[stages." in block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the page's plan, its run in ``out``, and its output."""

    def make(path):
        make_teacher(path / "teacher")
        make_teacher(path / "bert", head=False)
        BertForMaskedLM(BertConfig.from_pretrained(path / "bert")).save_pretrained(path / "bert")
        write_text(path / "much.txt", 24, seed=2)
        write_text(path / "held-out.txt", 10, seed=4)
        write_tsv(path / "train.tsv", 16)
        write_tsv(path / "dev.tsv", 10, seed=1)
        (path / "more.txt").write_text("\n".join(text for text, _ in sentences(20, seed=3)))
        make_teacher(path / "larger", vocab_size=18)
        (path / "plan.toml").write_text(PLAN)
        said = run("distill", stages=path / "plan.toml", out=path / "out")
        (path / "said").write_text(said)

    return once(tmp_path_factory, "plan", make)


@pytest.fixture
def plan(folder, tmp_path):
    """Options of a plan of one's own, of the same files."""

    def plan(text):
        for path in folder.iterdir():
            if path.name != "out" and not (tmp_path / path.name).exists():
                (tmp_path / path.name).symlink_to(path)
        (tmp_path / "own.toml").write_text(text)
        return {"stages": tmp_path / "own.toml", "out": tmp_path / "own"}

    return plan


def test_the_pages_plan(folder):
    output, out = (folder / "said").read_text(), folder / "out"
    assert visible(out) == ["1-general", "2-task", "student"]
    assert "stage 1 of 2: general" in output and "stage 2 of 2: task" in output
    general, task = report_of(out / "1-general"), report_of(out / "2-task")
    assert general["settings"]["method"] == "fcd" and general["settings"]["epochs"] == 3
    assert task["settings"]["options"] == {"temperature": 2.0}
    assert task["settings"]["student"] == str(out / "1-general" / "student")
    assert task["settings"]["follows"] == general["run"]
    assert set(general["student"]) == {"masked_perplexity"}
    assert task["rows"]["unlabelled"] == 20 and "unlabelled" not in general["rows"]
    student = AutoModelForSequenceClassification.from_pretrained(out / "student")
    assert (student.config.num_hidden_layers, student.config.intermediate_size) == (2, 16)
    assert same_weights(out, out / "2-task") and not same_weights(out, out / "1-general")
    assert output.rstrip().endswith(f"the student of the last stage: {out / 'student'}")


def test_a_plan_goes_on_where_it_stopped(monkeypatch, folder, tmp_path):
    """Each stage begins with the student of the stage before; of another student it is run anew."""
    whole, out = folder / "out", tmp_path / "out"
    shutil.copytree(whole, out, symlinks=True)
    options = {"stages": folder / "plan.toml", "out": out}
    began, original = [], distillation.fit

    def distil(run, distiller, *rest):
        began.append({name: x.clone() for name, x in distiller.student.state_dict().items()})
        return original(run, distiller, *rest)

    def stopped(step, *flags):
        with monkeypatch.context() as patch:
            stop_at(patch, step, press_ctrl_c)
            return run("distill", *flags, **options, expect=130)

    monkeypatch.setattr(distillation, "fit", distil)
    shutil.rmtree(out / "2-task")
    assert "--resume continues" in stopped(3, "--resume")
    assert len(list(out.glob("2-task/unfinished/*/*-3"))) == 1
    before = weights_of(out / "1-general")
    body = [name for name in before if name.startswith("bert.")]
    assert len(body) > 30
    assert all(torch.equal(before[name], began[0][name]) for name in body)
    output = run("distill", "--resume", **options)
    assert f"{out / '1-general'}: this run is already complete" in output
    assert len(began) == 2 and same_weights(out, whole)
    assert "already holds 1-general" in run("distill", **options, expect=2)
    stopped(2, "--overwrite")
    run("distill", "--resume", **options)
    general, task = report_of(out / "1-general"), report_of(out / "2-task")
    assert task["settings"]["follows"] == general["run"] != report_of(whole / "1-general")["run"]
    assert same_weights(out, whole)


# Wrong values of options, which files of studies name in the same way: tests/study/test_study.py.
MISTAKES = {
    "option": ([("epochs = 2", "epohcs = 2")], "stages.task .* has no option 'epohcs'.*epochs'"),
    "flag": ([("epochs = 2", "resume = true")], "stages.task of .*: resume is of all stages"),
    "file": ([('"more.txt"', '"none.txt"')], "stages.task of .*: unlabelled .*none.txt: no such"),
    "tokens": ([('= "teacher"', '= "larger"')], "task of .*: teacher .* 18 tokens .*before has 17"),
    "no teacher": ([('teacher = "teacher"', "")], "task of .*: teacher is missing"),
    "student": ([("epochs = 2", "student_layers = 1")], "student_layers is for the first stage"),
    "name": ([("[stages.task]", '[stages."a/b"]')], "stages.a/b: letters, digits"),
    "stage": ([("[stages.task]", "[stages]\ntask = 5\n[x]")], "stages.task must be a table"),
    "no stages": ([(PLAN, 'teacher = "x"')], "has no stages; a table"),
    "no toml": ([(PLAN, "teacher")], "can't be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence_before_the_first_stage(plan, tmp_path, case):
    changes, words = MISTAKES[case]
    text = PLAN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    options = plan(text)
    error = run("distill", **options, expect=2)
    assert re.search(words, error), error
    assert not options["out"].exists()


def test_what_excludes_stages(folder, tmp_path):
    shutil.copytree(folder / "out/2-task", tmp_path / "out")
    for more, words in (
        ({}, f"--out {tmp_path / 'out'} holds a student of a run without --stages"),
        ({"stages": "nowhere.toml"}, "nowhere.toml: no such file"),
        ({"teacher": "x"}, "--stages and --teacher exclude each other: write it into the file"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite exclude"),
    ):
        options = {"stages": folder / "plan.toml", "out": tmp_path / "out", **more}
        assert words in run("distill", expect=2, **options)


SHARED = """
epochs = 1
device = "cpu"
max_length = 16
"""
ASSISTANT = """
method = "soft_targets"
[stages.assistant]
teacher = "teacher"
student_layers = 2
[stages.student]
teacher = "stages.assistant"
student_layers = 1
learning_rate = 1e-3
set = {temperature = 3.0}
"""
ROWS = """
train = "train.tsv"
eval = "dev.tsv"
"""


def test_a_teacher_assistant(plan, tmp_path):
    """Also as an arm of a study, which has the same scores."""
    options = plan(SHARED + ROWS + ASSISTANT)
    out = options["out"]
    run("distill", **options)
    first, second = report_of(out / "1-assistant"), report_of(out / "2-student")
    assert (first["layers"], second["layers"]) == (2, 1)
    assert second["settings"]["teacher"] == str(out / "1-assistant" / "student")
    assert second["settings"]["follows"] == first["run"]
    assert second["teacher"] == first["student"]  # the same model's scores on the same rows
    arm = ASSISTANT.replace("[stages.", "[methods.TAKD.stages.")
    (tmp_path / "arm.toml").write_text(
        f'{SHARED}seeds = 1\nteacher = "teacher"\n[methods.TAKD]{arm}[tasks.own]{ROWS}'
    )
    run("study", tmp_path / "arm.toml", out=tmp_path / "study")
    study = grid.read(StudySettings(spec=tmp_path / "arm.toml"))
    result = GridRuns(study, tmp_path / "study").result(study.cells[0])
    assert result["scores"] == second["student"]
    assert result["history"][0]["losses"] == second["history"][0]["losses"]
    assert "stages=assistant+student" in grid_report.plan(study)[1][3]
    assert not list((tmp_path / "study" / "runs").glob("*/"))
    options["out"] = out.with_name("no")
    for old, new, error in (
        ('"stages.assistant"', '"stages.assistent"', "no earlier stage; known: assistant"),
        ("[stages.student]\n", '[stages.student]\ntask = "masked-lm"\n', "finetune_teacher EPOCHS"),
        ("student_layers = 1", "student_layers = 3", "the teacher has only 2 layers"),
        ("student_layers = 1", "", "both the student of the stage assistant"),
        ('"teacher"', '"stages.student"', "no earlier stage"),
    ):
        plan(SHARED + ROWS + ASSISTANT.replace(old, new))
        assert error in run("distill", expect=2, **options)
        assert not options["out"].exists()
