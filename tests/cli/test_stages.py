"""`fastkd distill --stages`: each stage trains the student of the stage before."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

from fastkd.train import distillation
from tests.support.runs import press_ctrl_c, report_of, same_weights, stop_at, visible
from tests.support.tiny import make_teacher, run, sentences, write_tsv
from tests.train.tasks.test_causal_lm import make_decoder, write_text

PAGE = Path(__file__).parents[2] / "docs" / "distill.md"
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
(PLAN,) = (block for block in BLOCKS if "[stages." in block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan")
    make_teacher(path / "teacher")
    make_teacher(path / "bert", head=False)
    BertForMaskedLM(BertConfig.from_pretrained(path / "bert")).save_pretrained(path / "bert")
    write_text(path / "much.txt", 40, seed=2)
    write_text(path / "held-out.txt", 20, seed=4)
    write_tsv(path / "train.tsv", 16)
    write_tsv(path / "dev.tsv", 20, seed=1)
    (path / "more.txt").write_text("\n".join(text for text, _ in sentences(20, seed=3)))
    (path / "plan.toml").write_text(PLAN)
    return path


@pytest.fixture(scope="module")
def finished(folder):
    return run("distill", stages=folder / "plan.toml", out=folder / "out"), folder / "out"


def test_the_pages_plan(finished):
    output, out = finished
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


def test_a_plan_goes_on_where_it_stopped(finished, monkeypatch, folder, tmp_path):
    """Each stage begins with the student of the stage before."""
    plan, out = folder / "plan.toml", shutil.copytree(finished[1], tmp_path / "out", symlinks=True)
    started, began, original = [], [], distillation.fit

    def distil(run, distiller, *rest):
        started.append(run.sets.train)
        began.append({name: x.clone() for name, x in distiller.student.state_dict().items()})
        return original(run, distiller, *rest)

    monkeypatch.setattr(distillation, "fit", distil)
    shutil.rmtree(out / "2-task")
    with monkeypatch.context() as patch:
        stop_at(patch, 3, press_ctrl_c)
        error = run("distill", "--resume", stages=plan, out=out, expect=130)
    assert "--resume continues" in error and len(list(out.glob("2-task/unfinished/*/*-3"))) == 1
    before = load_file(out / "1-general" / "student" / "model.safetensors")
    body = [name for name in before if name.startswith("bert.")]
    assert len(body) > 30
    assert all(torch.equal(before[name], began[0][name]) for name in body)
    output = run("distill", "--resume", stages=plan, out=out)
    assert f"{out / '1-general'}: this run is already complete" in output
    assert [len(rows) for rows in started] == [16, 16] and same_weights(out, finished[1])
    assert report_of(out / "1-general") == report_of(finished[1] / "1-general")


def test_a_stage_of_another_student_is_run_anew(finished, monkeypatch, folder, tmp_path):
    plan, out = folder / "plan.toml", shutil.copytree(finished[1], tmp_path / "out", symlinks=True)
    assert "already holds 1-general" in run("distill", stages=plan, out=out, expect=2)
    with monkeypatch.context() as patch:
        stop_at(patch, 2, press_ctrl_c)
        run("distill", "--overwrite", stages=plan, out=out, expect=130)
    run("distill", "--resume", stages=plan, out=out)
    general, task = report_of(out / "1-general"), report_of(out / "2-task")
    assert task["settings"]["follows"] == general["run"]
    for before, now in (("1-general", general), ("2-task", task)):
        assert report_of(finished[1] / before)["run"] != now["run"]
    assert same_weights(out, finished[1])


MISTAKES = {
    "option": ([("epochs = 2", "epohcs = 2")], "stages.task .* has no option 'epohcs'.*epochs'"),
    "flag": ([("epochs = 2", "resume = true")], "stages.task of .*: resume is of all stages"),
    "type": ([("epochs = 2", 'epochs = "2"')], "stages.task of .*: epochs must be float, got '2'"),
    "set": ([("set = {temperature = 2.0}", "set = 5")], "stages.task of .*: set must be Mapping"),
    "path": ([('unlabelled = "more.txt"', "unlabelled = 5")], "task.*: unlabelled must be a path"),
    "file": ([('"more.txt"', '"none.txt"')], "stages.task of .*: unlabelled .*none.txt: no such"),
    "value": ([("epochs = 2", "epochs = 0")], "stages.task of .*: epochs must be greater than 0"),
    "method": ([('"soft_targets"', '"sof_targets"')], "stages.task .*: method 'sof_targets'"),
    "hyper-parameter": ([("temperature", "temperatur")], "stages.task of .*: set temperatur"),
    "column": ([("epochs = 2", 'label_column = "x"')], "stages.task of .*'x'"),
    "teacher": ([('teacher = "teacher"', 'teacher = "./no"')], "task of .*: teacher ./no: no s"),
    "no teacher": ([('teacher = "teacher"', "")], "task of .*: teacher is missing"),
    "student": ([("epochs = 2", "student_layers = 1")], "student_layers is for the first stage"),
    "name": ([("[stages.task]", '[stages."a/b"]')], "stages.a/b: letters, digits"),
    "stage": ([("[stages.task]", "[stages]\ntask = 5\n[x]")], "stages.task must be a table"),
    "no stages": ([(PLAN, 'teacher = "x"')], "has no stages; a table"),
    "no toml": ([(PLAN, "teacher")], "can't be read"),
    "no file": (None, "nowhere.toml: no such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence_before_the_first_stage(folder, tmp_path, case):
    changes, words = MISTAKES[case]
    plan = folder / "nowhere.toml"
    if changes is not None:
        plan = folder / f"{tmp_path.name}.toml"
        text = PLAN
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        plan.write_text(text)
    error = run("distill", stages=plan, out=tmp_path / "out", expect=2)
    assert re.search(words, error), error
    assert not (tmp_path / "out").exists()


OTHERS = """
teacher = "gpt2"
finetune_teacher = 1
max_length = 16
device = "cpu"
[stages.text]
task = "causal-lm"
train = "more.txt"
eval = "more.txt"
student_config = {n_embd = 12, intermediate_size = 24}
[stages.classes]
train = "train.tsv"
eval = "dev.tsv"
"""


def test_stages_of_other_tasks(folder, tmp_path):
    make_decoder(folder / "gpt2")
    plan, out = folder / "others.toml", tmp_path / "out"
    plan.write_text(OTHERS)
    run("distill", stages=plan, out=out)
    assert "perplexity" in report_of(out / "1-text")["student"]
    assert report_of(out / "2-classes")["student"].keys() == {"accuracy"}
    student = AutoModelForSequenceClassification.from_pretrained(out / "student")
    assert (student.config.n_layer, student.config.n_embd, student.config.n_inner) == (2, 12, 24)

    make_teacher(folder / "larger", vocab_size=18)
    plan.write_text(OTHERS.replace("[stages.classes]", '[stages.classes]\nteacher = "larger"'))
    error = run("distill", stages=plan, out=tmp_path / "x", expect=2)
    assert re.search("stages.classes of .*: teacher .* 18 tokens, .* before 17", error), error


def test_what_excludes_stages(finished, folder, tmp_path):
    plan, out = folder / "plan.toml", tmp_path / "out"
    error = run("distill", stages=plan, out=out, teacher=folder / "teacher", expect=2)
    assert "--stages and --teacher exclude each other: it stands in the file" in error
    error = run("distill", "--resume", "--overwrite", stages=plan, out=out, expect=2)
    assert "--resume and --overwrite exclude" in error
    shutil.copytree(finished[1] / "2-task", out)
    error = run("distill", stages=plan, out=out, expect=2)
    assert f"--out {out} holds a student of a run without --stages" in error


ASSISTANT = """
train = "train.tsv"
eval = "dev.tsv"
epochs = 1
device = "cpu"
max_length = 16
method = "soft_targets"
[stages.assistant]
teacher = "teacher"
student_layers = 2
[stages.student]
teacher = "stages.assistant"
student_layers = 1
"""


def assistants(folder, tmp_path, text=ASSISTANT):
    (folder / "assistant.toml").write_text(text)
    return {"stages": folder / "assistant.toml", "out": tmp_path / "out"}


def test_a_teacher_assistant(folder, tmp_path):
    plan = assistants(folder, tmp_path)
    run("distill", **plan)
    first, second = report_of(plan["out"] / "1-assistant"), report_of(plan["out"] / "2-student")
    assert (first["layers"], second["layers"]) == (2, 1)
    assert second["settings"]["teacher"] == str(plan["out"] / "1-assistant" / "student")
    assert second["settings"]["follows"] == first["run"]
    assert second["teacher"] == first["student"]  # the same model's scores on the same rows
    run("distill", "--overwrite", **plan)
    again = report_of(plan["out"] / "2-student")
    assert again["settings"]["follows"] != second["settings"]["follows"]


@pytest.mark.parametrize(("old", "new", "error"), [
    ('"stages.assistant"', '"stages.assistent"', "no earlier stage; known: assistant"),
    ("[stages.student]\n", '[stages.student]\ntask = "masked-lm"\n', "finetune_teacher EPOCHS"),
    ("student_layers = 1", "student_layers = 3", "the teacher has only 2 layers"),
    ("student_layers = 1", "", "both the student of the stage assistant"),
    ('"teacher"', '"stages.student"', "no earlier stage"),
])  # fmt: skip
def test_a_teacher_assistant_is_checked_before_the_first_stage(folder, tmp_path, old, new, error):
    plan = assistants(folder, tmp_path, ASSISTANT.replace(old, new))
    assert error in run("distill", expect=2, **plan)
    assert not plan["out"].exists()
