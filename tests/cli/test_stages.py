"""`fastkd distill --stages`: each stage trains the student of the stage before."""

import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

from fastkd.study import grid, grid_report
from fastkd.study.grid import StudySettings
from fastkd.study.grid_runs import GridRuns
from tests.support.runs import press_ctrl_c, report_of, same_weights, stop_at, visible
from tests.support.tiny import make_teacher, run, sentences, write_tsv
from tests.train.tasks.through import write_text

PAGE = (Path(__file__).parents[2] / "docs" / "distill.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
(PLAN,) = (block for block in BLOCKS if "[stages." in block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the page's plan."""
    path = tmp_path_factory.mktemp("stages")
    make_teacher(path / "teacher")
    make_teacher(path / "larger", vocab_size=18)
    make_teacher(path / "bert", head=False)
    BertForMaskedLM(BertConfig.from_pretrained(path / "bert")).save_pretrained(path / "bert")
    write_text(path / "much.txt", 24, seed=2)
    write_text(path / "held-out.txt", 10, seed=4)
    write_tsv(path / "train.tsv", 16)
    write_tsv(path / "dev.tsv", 10, seed=1)
    (path / "more.txt").write_text("\n".join(text for text, _ in sentences(20, seed=3)))
    return path


@pytest.fixture
def distill(folder, tmp_path):
    """`fastkd distill` by a plan of this text."""

    def distill(plan, *flags, **options):
        (folder / "plan.toml").write_text(plan)
        return run("distill", *flags, **{"stages": folder / "plan.toml", **options})

    return distill


def test_the_pages_plan_goes_on_where_it_stopped(monkeypatch, distill, tmp_path):
    """Each stage begins with the student of the stage before; of another student it is run anew."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    output = distill(PLAN, out=whole)
    assert visible(whole) == ["1-general", "2-task", "student"]
    assert "stage 1 of 2: general" in output and "stage 2 of 2: task" in output
    assert output.rstrip().endswith(f"the student of the last stage: {whole / 'student'}")
    first, second = report_of(whole / "1-general"), report_of(whole / "2-task")
    general, task = first["settings"], second["settings"]
    assert (general["method"], general["epochs"]) == ("fcd", 3)
    assert task["options"] == {"temperature": 2.0} and task["follows"] == first["run"]
    assert task["student"] == str(whole / "1-general" / "student")
    assert second["rows"]["unlabelled"] == 20 and "unlabelled" not in first["rows"]
    student = AutoModelForSequenceClassification.from_pretrained(whole / "student")
    assert (student.config.num_hidden_layers, student.config.intermediate_size) == (2, 16)
    assert same_weights(whole, whole / "2-task") and not same_weights(whole, whole / "1-general")

    def stopped(step, flag):
        with monkeypatch.context() as patch:
            stop_at(patch, step, press_ctrl_c)
            return distill(PLAN, flag, out=out, expect=130)

    shutil.copytree(whole, out, symlinks=True)
    shutil.rmtree(out / "2-task")
    assert "--resume continues" in stopped(3, "--resume")
    assert len(list(out.glob("2-task/unfinished/*/*-3"))) == 1
    output = distill(PLAN, "--resume", out=out)
    assert f"{out / '1-general'}: this run is already complete" in output
    assert same_weights(out, whole)
    assert "already holds 1-general" in distill(PLAN, out=out, expect=2)
    stopped(2, "--overwrite")
    distill(PLAN, "--resume", out=out)
    follows = report_of(out / "2-task")["settings"]["follows"]
    assert follows == report_of(out / "1-general")["run"] != first["run"]
    assert same_weights(out, whole)
    error = f"--out {whole / '2-task'} holds a student of a run without --stages"
    assert error in distill(PLAN, out=whole / "2-task", expect=2)


# Wrong values of options, which files of studies name in the same way: tests/study/test_study.py.
MISTAKES = (
    ("epochs = 2", "epohcs = 2", "stages.task .* has no option 'epohcs'.*epochs'"),
    ("epochs = 2", "resume = true", "stages.task of .*: resume is of all stages"),
    ('"more.txt"', '"none.txt"', "stages.task of .*: unlabelled .*none.txt: no such"),
    ('= "teacher"', '= "larger"', "task of .*: teacher .* 18 tokens .*before has 17"),
    ('teacher = "teacher"', "", "task of .*: teacher is missing"),
    ("epochs = 2", "student_layers = 1", "student_layers is for the first stage"),
    ("[stages.task]", '[stages."a/b"]', "stages.a/b: letters, digits"),
    ("[stages.task]", "[stages]\ntask = 5\n[x]", "stages.task must be a table"),
    (PLAN, 'teacher = "x"', "has no stages; a table"),
    (PLAN, "teacher", "can't be read"),
)  # fmt: skip


def test_mistakes_are_one_sentence_before_the_first_stage(distill, tmp_path):
    for old, new, words in MISTAKES:
        assert old in PLAN
        error = distill(PLAN.replace(old, new, 1), out=tmp_path / "out", expect=2)
        assert re.search(words, error), error
    for more, words in (
        ({"stages": "nowhere.toml"}, "nowhere.toml: no such file"),
        ({"teacher": "x"}, "--stages and --teacher exclude each other: write it into the file"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite exclude"),
    ):
        assert words in distill(PLAN, out=tmp_path / "out", **more, expect=2)
    assert not (tmp_path / "out").exists()


SHARED = 'epochs = 1\ndevice = "cpu"\nmax_length = 16\n'
ROWS = 'train = "train.tsv"\neval = "dev.tsv"\n'
ASSISTANT = """
method = "soft_targets"
stages.assistant = {teacher = "teacher", student_layers = 2}
stages.student = {teacher = "stages.assistant", student_layers = 1, set = {temperature = 3.0}}
"""


def test_a_teacher_assistant(distill, folder, tmp_path):
    """Also as an arm of a study, which has the same scores."""
    out = tmp_path / "out"
    distill(SHARED + ROWS + ASSISTANT, out=out)
    first, second = report_of(out / "1-assistant"), report_of(out / "2-student")
    assert (first["layers"], second["layers"]) == (2, 1)
    assert second["settings"]["teacher"] == str(out / "1-assistant" / "student")
    assert second["settings"]["follows"] == first["run"]
    assert second["teacher"] == first["student"]  # the same model's scores on the same rows
    (folder / "arm.toml").write_text(
        f'{SHARED}seeds = 1\nteacher = "teacher"\n[methods.TAKD]{ASSISTANT}[tasks.own]\n{ROWS}'
    )
    run("study", folder / "arm.toml", out=tmp_path / "study")
    study = grid.read(StudySettings(spec=folder / "arm.toml"))
    result = GridRuns(study, tmp_path / "study").result(study.cells[0])
    assert result["scores"] == second["student"]
    assert result["seconds"] > result["history"][-1]["seconds"]  # those of both stages
    assert result["history"][0]["losses"] == second["history"][0]["losses"]
    assert "stages=assistant+student" in grid_report.plan(study)[1][3]
    assert not list((tmp_path / "study" / "runs").glob("*/"))
    for old, new, error in (
        ('"stages.assistant"', '"stages.assistent"', "no earlier stage; known: assistant"),
        ("student = {", 'student = {task = "masked-lm", ', "finetune_teacher EPOCHS"),
        ("student_layers = 1", "student_layers = 3", "the teacher has only 2 layers"),
        ("student_layers = 1, ", "", "both the student of the stage assistant"),
        ('"teacher"', '"stages.student"', "no earlier stage"),
    ):
        plan = SHARED + ROWS + ASSISTANT.replace(old, new)
        assert error in distill(plan, out=tmp_path / "no", expect=2)
    assert not (tmp_path / "no").exists()
