"""`fastkd cache` and `--teacher-cache`; `fastkd verify`."""

import functools
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from fastkd.cli import cache_command, display
from fastkd.distill.cache import TeacherCache
from fastkd.distill.verify import _Step
from fastkd.train.saving import MANIFEST, read_json
from tests.support.runs import press_ctrl_c, report_of, stop_at
from tests.support.tiny import make_teacher, run, write_tsv
from tests.train.tasks.test_causal_lm import make_decoder, write_text

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache")
    make_teacher(path / "teacher", **STILL)
    write_tsv(path / "train.tsv", 45)
    write_tsv(path / "dev.tsv", 20, seed=1)
    return path


@pytest.fixture
def call(folder):
    def call(command, out, *flags, **options):
        usual = {"train": folder / "train.tsv", "eval": folder / "dev.tsv"}
        usual |= {"max_length": 16, "device": "cpu"}
        if command != "verify":
            usual |= {"out": out, "batch_size": 8}
        if command == "distill":
            usual |= {"epochs": 2, "learning_rate": 1e-3}
        if "teacher_cache" not in options:
            usual["teacher"] = folder / "teacher"
        return run(command, *flags, **{**usual, **options})

    return call


def test_what_a_killed_process_was_writing_is_no_cache_and_no_litter(call, tmp_path):
    out = tmp_path / "cache"
    out.mkdir()
    (out / f".{'1' * 32}").write_bytes(b"half")
    mine = tmp_path / "mine" / f".{'0' * 32}"
    mine.parent.mkdir()
    (mine.parent / "notes").write_text("")
    mine.write_text("")
    call("cache", mine.parent, expect=2)
    assert mine.exists()  # among files of somebody else
    call("cache", out)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


# Every method's losses are the same bits: tests/distill/test_cache.py.
def test_a_cached_teacher_gives_the_same_student(call, folder, tmp_path, monkeypatch):
    more = {"method": "mc3kd", "test": folder / "dev.tsv"}
    with monkeypatch.context() as patch:
        patch.setattr(display, "LINE_EVERY", 0.0)
        said = call("cache", tmp_path / "cache", method="mc3kd")
    assert "the teacher's scores, on 20 evaluation rows" in said and "42 different samples" in said
    assert "teacher  step 6/6" in said  # 45 rows, 8 a batch
    call("distill", tmp_path / "live", **more)
    output = call("distill", tmp_path / "cached", teacher_cache=tmp_path / "cache", **more)
    live, cached = report_of(tmp_path / "live"), report_of(tmp_path / "cached")
    for name in ("teacher", "student", "layers", "labels", "parameters", "bytes", "rows"):
        assert live[name] == cached[name], name
    assert cached["test"] == {"student": live["test"]["student"]}
    assert "times smaller" in output and "times faster" not in output
    a, b = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name / "student").state_dict()
        for name in ("live", "cached")
    )
    for name, value in a.items():
        if not name.endswith("key.bias"):  # no gradient but rounding's
            assert (value - b[name]).abs().max() <= 1e-5, name
    card = (tmp_path / "cached" / "student" / "README.md").read_text()
    assert str(tmp_path / "cache") in card and "faster" not in card


@pytest.mark.parametrize("made", [
    {"student_layers": 2, "teacher_layers": "select"},
    {"student_config": "hidden_size=12", "method": "lrc_bert"},  # with a projection
])  # fmt: skip
def test_a_cached_run_is_the_same_command_plus_one_option(call, folder, tmp_path, made):
    made = {**made, "teacher": folder / "teacher", "tokenizer": folder / "teacher", "epochs": 0.5}
    options = {name: value for name, value in made.items() if name != "epochs"}
    call("cache", tmp_path / "cache", **options)
    call("distill", tmp_path / "live", **made)
    call("distill", tmp_path / "cached", teacher_cache=tmp_path / "cache", **made)
    live, cached = report_of(tmp_path / "live"), report_of(tmp_path / "cached")
    for name in ("teacher", "student", "layers", "parameters"):
        assert live[name] == cached[name], name
    one, other = (entry["losses"] for entry in live["history"] + cached["history"])
    assert other == pytest.approx(one, rel=1e-5)


def test_a_cache_is_enough(call, folder, tmp_path):
    teacher = shutil.copytree(folder / "teacher", tmp_path / "teacher")
    call("cache", tmp_path / "cache", teacher=teacher, teacher_layers="1,3,4")
    assert "42 different samples" in call(
        "cache", tmp_path / "cache", teacher=teacher, teacher_layers="1,3,4"
    )
    shutil.rmtree(teacher)
    call("distill", tmp_path / "out", teacher_cache=tmp_path / "cache")
    report = report_of(tmp_path / "out")
    assert report["layers"] == 3 and report["parameters"]["teacher"] > 0
    # Another student that is as deep, and a part of the rows.
    student = make_teacher(tmp_path / "student", layers=3)
    call(
        "distill", tmp_path / "other", teacher_cache=tmp_path / "cache", student=student,
        max_train_rows=20, max_length=20,
    )  # fmt: skip
    assert report["teacher"] and not report_of(tmp_path / "other")["teacher"]  # scored otherwise
    assert "already complete" in call(
        "distill", tmp_path / "out", "--resume", teacher_cache=tmp_path / "cache"
    )


def test_what_a_cache_cannot_do_is_one_sentence(call, folder, tmp_path):
    cache = tmp_path / "cache"
    call("cache", cache, method="lrkd")
    out, wrong = tmp_path / "out", {"teacher_cache": cache, "expect": 2}
    for options, parts in (
        ({"student_layers": 1}, ["was written with --student-layers left out, not 1; leave"]),
        (
            {"teacher": make_teacher(tmp_path / "else", layer_norm_eps=0.1, **STILL)},
            ["another configuration of the teacher: layer_norm_eps: [1e-12], now [0.1]"],
        ),
        ({"finetune_teacher": 1}, ["--teacher-cache and --finetune-teacher"]),
        ({"method": "fcd"}, ["--method fcd", "stores only [4]"]),
        (
            {"method": "lrkd", "train": write_tsv(tmp_path / "new.tsv", 60, seed=9)},
            [f"--teacher-cache {cache}", "new.tsv, row", "is not in it"],
        ),
        ({"method": "lrkd", "max_length": 4}, ["train.tsv, row", "same --max-length"]),
        ({"method": "lrkd", "teacher_cache": tmp_path}, ["no complete cache there"]),
    ):
        error = call("distill", out, **{**wrong, **options})
        assert all(part in error for part in parts), error
        assert not out.exists()
    assert "--teacher is missing" in call("distill", out, teacher=None, expect=2)
    other = make_teacher(tmp_path / "other", initializer_range=0.3, **STILL)
    error = call("cache", cache, method="lrkd", teacher=other, expect=2)
    assert f"--out {cache} was written with other settings (fingerprint: teacher" in error
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "holds other files than a cache" in call("cache", tmp_path / "mine", expect=2)
    bare = make_teacher(tmp_path / "bare", head=False)
    assert "no classification head" in call("cache", tmp_path / "x", teacher=bare, expect=2)
    error = call("cache", tmp_path / "x", method="tinybert", expect=2)
    assert "--method tinybert: AttentionMSE compares attention maps" in error
    assert not (tmp_path / "x").exists()


def test_a_cache_that_was_cut_off_goes_on(call, folder, tmp_path, monkeypatch):
    """After a full disk, too."""
    cache = functools.partial(call, "cache", tmp_path / "cache", method="fcd")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_command, "write_json", full)
        error = cache(max_train_rows=20, expect=1)
    words = "(No space left on device); the same command goes on with what is there\n"
    assert error.endswith(words)
    words = {"teacher_cache": tmp_path / "cache", "method": "fcd"}
    error = call("distill", tmp_path / "out", expect=2, **words)
    assert "no complete cache" in error
    assert "42 different samples" in cache()
    assert read_json(tmp_path / "cache" / "fastkd.json")["samples"] == 42
    call("distill", tmp_path / "out", **words)


def test_a_run_goes_on_with_the_cache_that_it_had(call, tmp_path, monkeypatch):
    cache, out = tmp_path / "cache", tmp_path / "out"
    call("cache", cache)
    with monkeypatch.context() as patch:
        stop_at(patch, 7, press_ctrl_c)
        call("distill", out, teacher_cache=cache, expect=130)
    kept = cache.rename(tmp_path / "kept")
    call("cache", cache, precision="bf16")
    error = call("distill", out, "--resume", teacher_cache=cache, expect=2)
    assert "started with other teacher cache" in error
    error = call("cache", cache, expect=2)
    assert "was written with other settings (precision: bfloat16, now that of the weights)" in error
    shutil.rmtree(cache)
    kept.rename(cache)
    call("cache", cache)  # with nothing to add
    call("distill", out, "--resume", teacher_cache=cache)


def test_a_changed_file_trains_no_other_student(call, tmp_path):
    cache, wrong = tmp_path / "cache", {"teacher_cache": tmp_path / "cache", "expect": 2}
    call("cache", cache, method="soft_targets")
    (shard,) = cache.glob("shard-*")
    content = shard.read_bytes()
    tensors = load_file(shard)
    save_file({**tensors, "logits": -tensors["logits"]}, shard)
    error = call("distill", tmp_path / "out", method="soft_targets", **wrong)
    assert f"--teacher-cache {cache}" in error and f"{shard} was changed" in error
    shard.write_bytes(content)
    student = cache / "student" / "model.safetensors"
    weights = bytearray(student.read_bytes())
    weights[-20] ^= 1
    student.write_bytes(weights)
    error = call("distill", tmp_path / "out", method="soft_targets", **wrong)
    assert "its student is damaged (model.safetensors has changed since it was written)" in error
    call("cache", cache, method="soft_targets")
    call("distill", tmp_path / "out", method="soft_targets", teacher_cache=cache)


def test_verify_prints_a_table(call, tmp_path, monkeypatch):
    # tests/distill/test_verify.py compiles.
    monkeypatch.setattr(_Step, "compiled", lambda step, backend: step.again())
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    output = call("verify", None, method="soft_targets", rows=4, ranks=0)
    assert "checks  step 12/12" in output
    assert "4 rows, device cpu, float64" in output
    for name in ("left padding", "cached teacher", "saved and loaded"):
        assert name in output
    assert "differs" not in output
    bare = make_teacher(tmp_path / "bare", head=False, **STILL)
    options = {"teacher": bare, "method": "mc3kd", "rows": 4, "ranks": 0, "eval": None}
    assert "by definition" in call("verify", None, **options)
    assert "--rows" in call("verify", None, rows=1, expect=2)


def test_a_full_disk_is_foreseen(call, tmp_path, monkeypatch):
    """Before the first batch; without an earlier cache the sentence names none."""
    out, free = tmp_path / "cache", [2**14]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[0]))
    error = call("cache", out, method="mc3kd", expect=2)
    assert f"--out {out}: the cache takes about " in error and "the disk has 16 KiB left" in error
    free[0] = 2**40
    call("cache", out, method="mc3kd")
    # The estimate is of rows of all lengths: within a third of what was written.
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    told = float(error.split("takes about ")[1].split(" KiB")[0].replace(",", "")) * 2**10
    student = sum(x.numel() * 4 for x in load_file(out / "student/model.safetensors").values())
    assert told - student == pytest.approx(size, rel=0.33)


def test_random_students_of_several_seeds(call, folder, tmp_path):
    made = {"student_layers": 2, "student_weights": "random"}
    call("cache", tmp_path / "cache", **made)
    losses = []
    for seed in (0, 1):
        call("distill", tmp_path / f"live{seed}", seed=seed, **made)
        out = tmp_path / f"cached{seed}"
        call("distill", out, teacher_cache=tmp_path / "cache", seed=seed)
        live, cached = report_of(tmp_path / f"live{seed}"), report_of(out)
        losses.append(live["history"][0]["losses"])
        assert cached["history"][0]["losses"] == pytest.approx(losses[-1], rel=1e-5)
    assert losses[0] != losses[1]


def test_a_student_learns_from_the_most_probable_tokens(tmp_path):
    teacher = make_decoder(tmp_path / "teacher")
    options = {
        "task": "causal-lm", "method": "soft_targets", "max_length": 8, "device": "cpu",
        "train": write_text(tmp_path / "train.txt", 60), "batch_size": 4, "student_layers": 2,
        "eval": write_text(tmp_path / "dev.txt", 20, seed=1),
    }  # fmt: skip
    out = tmp_path / "cache"
    run("cache", teacher=teacher, out=out, top_k=5, **options)
    (shard,) = out.glob("shard-*.safetensors")
    stored = load_file(shard)
    assert stored["top_k.ids"].shape == stored["top_k.log_probs"].shape
    assert stored["top_k.ids"].shape[1] == 5 and not (out / "head.safetensors").exists()
    whole = TeacherCache(out).digest
    for path in (shard, out / MANIFEST):  # as a process that was killed before it wrote them
        path.unlink()
    assert "other settings" in run("cache", teacher=teacher, out=out, top_k=6, expect=2, **options)
    run("cache", teacher=teacher, out=out, top_k=5, **options)
    assert TeacherCache(out).digest == whole
    student = tmp_path / "student"
    more = {"teacher_cache": out, "epochs": 1}
    run("distill", out=student, **more, **options)
    assert list(student.rglob("model.safetensors"))
    found = run("cache", teacher=teacher, out=tmp_path / "c", top_k=99, expect=2, **options)
    assert "--top-k: top_k must be at most 17" in found
