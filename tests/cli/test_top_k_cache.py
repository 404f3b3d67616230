"""`fastkd cache --top-k`: a teacher's most probable tokens, from which a student learns."""

from safetensors.torch import load_file

from fastkd.distill.cache import TeacherCache
from fastkd.train.saving import MANIFEST
from tests.support.tiny import run
from tests.train.tasks.test_causal_lm import make_decoder, write_text


def test_a_student_learns_from_the_most_probable_tokens(tmp_path):
    """`fastkd cache --top-k`, killed and resumed, then a student without the teacher."""
    teacher = make_decoder(tmp_path / "teacher")
    options = {
        "task": "causal-lm",
        "method": "soft_targets",
        "train": write_text(tmp_path / "train.txt", 60),
        "eval": write_text(tmp_path / "dev.txt", 20, seed=1),
        "max_length": 8,
        "device": "cpu",
        "batch_size": 4,
        "student_layers": 2,
    }
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
