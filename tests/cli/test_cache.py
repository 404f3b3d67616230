"""`fastkd cache` and `--teacher-cache`; `fastkd verify`."""

import functools
import shutil

import pytest
import torch

from fastkd.cli import cache_command, display
from fastkd.train.saving import find_damage, read_json
from tests.support.runs import made, press_ctrl_c, report_of, stop_at, weights_of
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
        if command == "cache":
            given |= {"epochs": None, "learning_rate": None}
        if "teacher_cache" in options:
            given["teacher"] = None
        return run(command, *flags, **{**given, **options})

    return call


# Every method's losses are the same bits: tests/distill/test_cache.py.
def test_a_cached_teacher_gives_the_same_student(call, folder, tmp_path, monkeypatch):
    """Also after a stop, and without the teacher; of another cache no run goes on."""
    cache, out = tmp_path / "cache", tmp_path / "cached"
    teacher = shutil.copytree(folder / "teacher", tmp_path / "teacher")
    write = functools.partial(call, "cache", cache, method="mc3kd", teacher=teacher)
    more = {"method": "mc3kd", "test": folder / "dev.tsv"}
    with monkeypatch.context() as patch:
        patch.setattr(display, "LINE_EVERY", 0.0)
        said = write()
    for words in ("scores, on 20 evaluation rows", "teacher  step 6/6", "42 different samples"):
        assert words in said
    call("distill", tmp_path / "live", **more)
    more["teacher_cache"] = cache
    with monkeypatch.context() as patch:
        stop_at(patch, 4, press_ctrl_c)
        call("distill", out, **more, expect=130)
    kept = cache.rename(tmp_path / "kept")
    write(precision="bf16")
    error = call("distill", out, "--resume", **more, expect=2)
    assert "started with other teacher cache" in error
    assert "other settings (precision: bfloat16, now that of the weights)" in write(expect=2)
    shutil.rmtree(cache)
    kept.rename(cache)
    write()  # with nothing to add
    shutil.rmtree(teacher)
    output = call("distill", out, "--resume", **more)
    live, cached = report_of(tmp_path / "live"), report_of(out)
    for name in ("teacher", "student", "layers", "labels", "parameters", "bytes", "rows"):
        assert live[name] == cached[name], name
    assert cached["test"] == {"student": live["test"]["student"]}
    weights = weights_of(out)
    for name, value in weights_of(tmp_path / "live").items():
        if not name.endswith("key.bias"):  # no gradient but rounding's
            assert (value - weights[name]).abs().max() <= 1e-5, name
    card = (out / "student" / "README.md").read_text()
    assert "times smaller" in output and str(cache) in card
    assert "faster" not in output + card
    call("distill", tmp_path / "longer", **more, max_length=15)
    assert report_of(tmp_path / "longer")["teacher"] == {}  # its scores are of other tokens


@pytest.mark.parametrize("options", [
    {"student_layers": 2, "teacher_layers": "select"},
    {"student_config": "hidden_size=12", "method": "lrc_bert"},  # with a projection
    {"student_layers": 2, "student_weights": "random", "seed": 1},
])  # fmt: skip
def test_a_cached_run_is_the_same_command_plus_one_option(call, folder, tmp_path, options):
    options["tokenizer"] = folder / "teacher"
    seed = options.pop("seed", 0)  # may be another than the cache's
    call("cache", tmp_path / "cache", **options)
    selected, weights, losses = [], [], []
    for more in ({}, {"teacher_cache": tmp_path / "cache"}):
        run, models = made(**usual(folder, tmp_path, seed=seed, **options, **more))
        weights.append({name: x.clone() for name, x in models.student.state_dict().items()})
        (batch, *_) = run.sets.train.batches(run.sets.collate, 8)
        torch.manual_seed(0)
        models.distiller.prepare([batch])
        losses.append({k: x.item() for k, x in models.distiller(**batch).terms.items()})
        selected.append(models.selected)
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert selected[0] == selected[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_a_cache_cannot_do_is_one_sentence(call, folder, tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "out"
    call("cache", cache, method="lrkd")
    norm = make_teacher(tmp_path / "norm", layer_norm_eps=0.1, **STILL)
    other = make_teacher(tmp_path / "other", initializer_range=0.3, **STILL)
    bare = make_teacher(tmp_path / "bare", head=False)
    new = write_tsv(tmp_path / "new.tsv", 60, seed=9)
    damaged = shutil.copytree(cache, tmp_path / "damaged")
    (damaged / "student/model.safetensors").write_bytes(b"x")
    for options, words in (
        ({"teacher_cache": damaged},
         "its student is damaged (model.safetensors has changed since it was written)"),
        ({"student_layers": 1}, "was written with --student-layers left out, not 1; leave"),
        ({"teacher": norm},
         "another configuration of the teacher: layer_norm_eps: [1e-12], now [0.1]"),
        ({"finetune_teacher": 1}, "--teacher-cache and --finetune-teacher"),
        ({"method": "fcd"}, f"FCD compares teacher layers [2, 4], but {cache} stores only [4]"),
        ({"train": new}, "is not in it"),
        ({"max_length": 4}, "same --max-length"),
        ({"teacher_cache": tmp_path}, "no complete cache there"),
        ({"teacher_cache": None}, "--teacher is missing"),
    ):  # fmt: skip
        given = {"teacher_cache": cache, "method": "lrkd", **options}
        assert words in call("distill", out, **given, expect=2)
    for place, options, words in (
        (cache, {"teacher": other}, "was written with other settings (fingerprint: teacher"),
        (out, {"teacher": bare}, "no classification head"),
        (out, {"method": "tinybert"}, "--method tinybert: AttentionMSE compares attention maps"),
    ):
        assert words in call("cache", place, **{"method": "lrkd", **options}, expect=2)
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
    assert error.endswith("on device); the same command goes on with what is there\n")
    given = {"teacher_cache": out, "method": "fcd", "max_train_rows": 8}
    assert "no complete cache" in call("distill", tmp_path / "out", expect=2, **given)
    (out / f".{'1' * 32}").write_bytes(b"half")  # which a killed process was writing
    assert "42 different samples" in cache() and read_json(out / "fastkd.json")["samples"] == 42
    assert not list(out.glob(".*"))
    # The estimate is of rows of all lengths: within a third of what was written.
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    student = sum(x.numel() * 4 for x in weights_of(out).values())
    assert told - student == pytest.approx(size, rel=0.33)
    mine = tmp_path / "mine" / f".{'0' * 32}"
    mine.parent.mkdir()
    (mine.parent / "notes").write_text("")
    mine.write_text("")
    assert "holds other files than a cache" in call("cache", mine.parent, expect=2)
    assert mine.exists()  # among files of somebody else
