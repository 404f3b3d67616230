"""`fastkd cache` and `--teacher-cache`; `fastkd verify`."""

import functools
import shutil

import pytest
import torch

from fastkd.cli import cache_command, display
from fastkd.train.saving import find_damage, read_json
from tests.support.runs import first_step, made, press_ctrl_c, report_of, stop_at, weights_of
from tests.support.tiny import STILL, make_teacher, run, usual, write_tsv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache")
    make_teacher(path / "teacher", **STILL)
    write_tsv(path / "train.tsv", 45)
    write_tsv(path / "dev.tsv", 20, seed=1)
    return path


@pytest.fixture
def call(folder, tmp_path):
    def call(command, out, *flags, **options):
        given = usual(folder, tmp_path, out=out)
        if command != "distill":
            given = {**given, "epochs": None, "learning_rate": None}
        if "teacher_cache" in options:
            given["teacher"] = None
        return run(command, *flags, **{**given, **options})

    return call


def test_what_a_killed_process_was_writing_is_no_cache_and_no_litter(call, tmp_path):
    out = tmp_path / "cache"
    out.mkdir()
    (out / f".{'1' * 32}").write_bytes(b"half")
    mine = tmp_path / "mine" / f".{'0' * 32}"
    mine.parent.mkdir()
    (mine.parent / "notes").write_text("")
    mine.write_text("")
    assert "holds other files than a cache" in call("cache", mine.parent, expect=2)
    assert mine.exists()  # among files of somebody else
    call("cache", out)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


# Every method's losses are the same bits: tests/distill/test_cache.py.
def test_a_cached_teacher_gives_the_same_student(call, folder, tmp_path, monkeypatch):
    """Also after a stop; of another cache no run goes on."""
    cache = tmp_path / "cache"
    more = {"method": "mc3kd", "test": folder / "dev.tsv"}
    with monkeypatch.context() as patch:
        patch.setattr(display, "LINE_EVERY", 0.0)
        said = call("cache", cache, method="mc3kd")
    for words in ("scores, on 20 evaluation rows", "teacher  step 6/6", "42 different samples"):
        assert words in said
    call("distill", tmp_path / "live", **more)
    out, more["teacher_cache"] = tmp_path / "cached", cache
    with monkeypatch.context() as patch:
        stop_at(patch, 4, press_ctrl_c)
        call("distill", out, **more, expect=130)
    kept = cache.rename(tmp_path / "kept")
    call("cache", cache, method="mc3kd", precision="bf16")
    error = call("distill", out, "--resume", **more, expect=2)
    assert "started with other teacher cache" in error
    error = call("cache", cache, method="mc3kd", expect=2)
    assert "was written with other settings (precision: bfloat16, now that of the weights)" in error
    shutil.rmtree(cache)
    kept.rename(cache)
    call("cache", cache, method="mc3kd")  # with nothing to add
    output = call("distill", out, "--resume", **more)
    live, cached = report_of(tmp_path / "live"), report_of(out)
    for name in ("teacher", "student", "layers", "labels", "parameters", "bytes", "rows"):
        assert live[name] == cached[name], name
    assert cached["test"] == {"student": live["test"]["student"]}
    assert "times smaller" in output and "times faster" not in output
    a, b = weights_of(tmp_path / "live"), weights_of(out)
    for name, value in a.items():
        if not name.endswith("key.bias"):  # no gradient but rounding's
            assert (value - b[name]).abs().max() <= 1e-5, name
    card = (out / "student" / "README.md").read_text()
    assert str(cache) in card and "faster" not in card
    assert "already complete" in call("distill", out, "--resume", **more)


@pytest.mark.parametrize("options", [
    {"student_layers": 2, "teacher_layers": "select"},
    {"student_config": "hidden_size=12", "method": "lrc_bert"},  # with a projection
    {"student_layers": 2, "student_weights": "random", "seed": 1},
])  # fmt: skip
def test_a_cached_run_is_the_same_command_plus_one_option(call, folder, tmp_path, options):
    options["tokenizer"] = folder / "teacher"
    seed = options.pop("seed", 0)  # may be another than the cache's
    call("cache", tmp_path / "cache", **options)
    options = usual(folder, tmp_path, seed=seed, **options)
    found = [made(**options, **x) for x in ({}, {"teacher_cache": tmp_path / "cache"})]
    one, other = (models.student.state_dict() for _, models in found)
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert found[0][1].selected == found[1][1].selected
    losses = []
    for made_run, models in found:
        (batch, *_) = made_run.sets.train.batches(made_run.sets.collate, 8)
        torch.manual_seed(0)
        models.distiller.prepare([batch])
        losses.append({k: x.item() for k, x in models.distiller(**batch).terms.items()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_cache_is_enough(call, folder, tmp_path):
    teacher = shutil.copytree(folder / "teacher", tmp_path / "teacher")
    call("cache", tmp_path / "cache", teacher=teacher, teacher_layers="1,3,4")
    shutil.rmtree(teacher)
    given = {"teacher": None, "teacher_cache": tmp_path / "cache", "max_train_rows": 8}
    found, models = made(**usual(folder, tmp_path, **given))
    assert models.student.config.num_hidden_layers == 3 and found.data.cached["parameters"] > 0
    # Another student that is as deep, and a part of the rows.
    student = make_teacher(tmp_path / "student", layers=3)
    first_step(**usual(folder, tmp_path, **given, student=student, max_length=20))


def test_what_a_cache_cannot_do_is_one_sentence(call, folder, tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "out"
    call("cache", cache, method="lrkd")
    other = make_teacher(tmp_path / "else", layer_norm_eps=0.1, **STILL)
    damaged = shutil.copytree(cache, tmp_path / "damaged")
    (damaged / "student/model.safetensors").write_bytes(b"x")
    for options, words in (
        ({"method": "lrkd", "teacher_cache": damaged},
         "its student is damaged (model.safetensors has changed since it was written)"),
        ({"student_layers": 1}, "was written with --student-layers left out, not 1; leave"),
        ({"teacher": other},
         "another configuration of the teacher: layer_norm_eps: [1e-12], now [0.1]"),
        ({"finetune_teacher": 1}, "--teacher-cache and --finetune-teacher"),
        ({"method": "fcd"}, "--method fcd: the cache stores only [4]"),
        ({"method": "lrkd", "train": write_tsv(tmp_path / "new.tsv", 60, seed=9)},
         f"--teacher-cache {cache}: "),
        ({"method": "lrkd", "train": tmp_path / "new.tsv"}, "is not in it"),
        ({"method": "lrkd", "max_length": 4}, "same --max-length"),
        ({"method": "lrkd", "teacher_cache": tmp_path}, "no complete cache there"),
        ({"teacher_cache": None}, "--teacher is missing"),
    ):  # fmt: skip
        error = call("distill", out, **{"teacher_cache": cache, **options}, expect=2)
        assert all(word in error for word in words.split(": the cache ")), error
        assert not out.exists()
    other = make_teacher(tmp_path / "other", initializer_range=0.3, **STILL)
    bare = make_teacher(tmp_path / "bare", head=False)
    for place, options, words in (
        (cache, {"method": "lrkd", "teacher": other},
         f"--out {cache} was written with other settings (fingerprint: teacher"),
        (out, {"teacher": bare}, "no classification head"),
        (out, {"method": "tinybert"}, "--method tinybert: AttentionMSE compares attention maps"),
    ):  # fmt: skip
        assert words in call("cache", place, **options, expect=2)
    assert not out.exists()
    call("cache", damaged, method="lrkd")
    assert find_damage(damaged / "student") is None


def test_a_cache_that_was_cut_off_goes_on(call, tmp_path, monkeypatch):
    """After a full disk, too, which is foreseen before the first batch."""
    out, free = tmp_path / "cache", [2**14]
    cache = functools.partial(call, "cache", out, method="fcd")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[0]))
    error = cache(expect=2)
    assert f"--out {out}: the cache takes about " in error and "the disk has 16 KiB left" in error
    told = float(error.split("takes about ")[1].split(" KiB")[0].replace(",", "")) * 2**10
    free[0] = 2**40

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_command, "write_json", full)
        error = cache(max_train_rows=20, expect=1)
    words = "(No space left on device); the same command goes on with what is there\n"
    assert error.endswith(words)
    words = {"teacher_cache": out, "method": "fcd", "max_train_rows": 8}
    assert "no complete cache" in call("distill", tmp_path / "out", expect=2, **words)
    assert "42 different samples" in cache() and read_json(out / "fastkd.json")["samples"] == 42
    # The estimate is of rows of all lengths: within a third of what was written.
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    student = sum(x.numel() * 4 for x in weights_of(out).values())
    assert told - student == pytest.approx(size, rel=0.33)
