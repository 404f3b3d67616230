"""A teacher cache of the most probable tokens: `Distiller.cache_teacher(..., top_k=)`."""

import pytest
import torch

from fastkd import TopK, linear_soft_target_loss
from fastkd.distill import (
    Distiller,
    Method,
    Several,
    SoftTargets,
    prediction_losses,
    student_from_teacher,
)
from fastkd.distill.prediction_losses import PredictionOptions, soft_loss
from tests.distill import support
from tests.distill.test_vocabulary import data_of, pair, tokenizer
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:the student's head has")


def models(family="llama", head="next word"):
    return pair(60, 60, family, head)


def distilled(teacher, student, temperature=2.0, **options):
    method = SoftTargets(alpha=0.5, temperature=temperature)
    return Distiller(teacher, student, method, **options).eval()


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize(("family", "head"), [("llama", "next word"), ("bert", "masked words")])
def test_soft_targets_are_the_top_k_of_the_teacher(
    tmp_path, family, head, keep_logits, monkeypatch
):
    teacher, student = models(family, head)
    data = data_of(family, head)
    live = distilled(teacher, student)
    cache = live.cache_teacher([data], tmp_path, top_k=5)
    out = distilled(cache, student, keep_logits=keep_logits)(**data)
    kept = {}
    hook = teacher.get_output_embeddings().register_forward_pre_hook(
        lambda layer, args: kept.update(states=args[0])
    )
    inputs = {name: x for name, x in data.items() if name != "labels"}
    teacher(**inputs)
    hook.remove()
    logits = student(**inputs).logits
    known = kept["states"].detach() @ teacher.get_output_embeddings().weight.detach().T
    bias = teacher.get_output_embeddings().bias
    known = known if bias is None else known + bias.detach()
    labels, mask = data["labels"], data.get("attention_mask")
    counted = labels != -100 if mask is None else (labels != -100) & mask.bool()
    if head == "next word":
        logits, known, counted = logits[:, :-1], known[:, :-1], counted[:, 1:]
        counted = counted if mask is None else counted & mask[:, :-1].bool()
    top = TopK(*reversed(known.div(2).log_softmax(-1).topk(5)))
    top = TopK(top.ids, top.log_probs.float())
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
    soft = linear_soft_target_loss(logits, identity, top, mask=counted, temperature=2.0)
    torch.testing.assert_close(out.terms["soft"], soft.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(out.terms["task"], live(**data).terms["task"])
    out.loss.backward()
    assert student.get_output_embeddings().weight.grad.any()
    if not keep_logits:  # the logits of all tokens are never computed
        monkeypatch.setattr(prediction_losses, "_logits_of", None)
        again = distilled(cache, student)(**data)
        torch.testing.assert_close(again.loss, out.loss)


@pytest.mark.parametrize("padded", [False, True])
def test_all_tokens_equal_the_teacher_itself(tmp_path, padded):
    """But for the padding of its head."""
    teacher, student = pair(60, 64 if padded else 60)
    data = data_of()
    with torch.no_grad():
        teacher.lm_head.weight[60:] *= 50  # the most probable tokens, which no test reads
    live = distilled(teacher, student)
    cache = live.cache_teacher([data], tmp_path, top_k=60)
    options = {"tokenizers": tokenizer(60)} if padded else {}
    found = distilled(cache, student, **options)(**data).terms
    torch.testing.assert_close(found, live(**data).terms, rtol=1e-5, atol=1e-7)


def test_methods_of_one_teacher_have_one_temperature(tmp_path):
    teacher, student = models()
    data = data_of()

    def several(teacher, *temperatures):
        methods = [SoftTargets(alpha=1.0, temperature=t) for t in temperatures]
        without_soft_targets = SoftTargets(alpha=0.0, temperature=5.0)
        return Distiller(teacher, student, Several(*methods, without_soft_targets)).eval()

    live = several(teacher, 2.0, 2.0)
    cache = live.cache_teacher([data], tmp_path / "a", top_k=60)
    found, expected = several(cache, 2.0, 2.0)(**data).terms, live(**data).terms
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"top_k: the methods have temperatures \[2\.0, 3\.0\]"):
        several(teacher, 3.0, 2.0).cache_teacher([data], tmp_path / "b", top_k=60)
    raises("top_k: the methods have temperatures", several, cache, 2.0, 3.0)


def test_temperature_of_a_method_of_your_own(tmp_path):
    class Own(Method):
        logit_terms = ("soft",)
        prediction_options = PredictionOptions(temperature=2.0)

        def weights(self, progress):
            return {"soft": 1.0}

        def soft(self, step):
            return soft_loss(step, self.prediction_options)

    teacher, student = models()
    live = Distiller(teacher, student, Own()).eval()
    cache = live.cache_teacher([data_of()], tmp_path, top_k=60)
    found = Distiller(cache, student, Own()).eval()(**data_of()).terms
    torch.testing.assert_close(found, live(**data_of()).terms, rtol=1e-5, atol=1e-7)


def test_bytes_of_a_token(tmp_path):
    teacher, student = models()
    data = data_of()
    cache = distilled(teacher, student).cache_teacher([data], tmp_path, top_k=5)
    tokens = int(data.get("attention_mask", torch.ones_like(data["input_ids"])).sum())
    files = list(tmp_path.glob("*.safetensors"))
    stored = sum(path.stat().st_size for path in files)
    samples = len(cache)
    assert tokens * 40 <= stored <= tokens * 40 + samples * 24 + 600 * len(files)
    assert not (tmp_path / "head.safetensors").exists()


def test_wrong_caches_raise_one_sentence(tmp_path):
    teacher, student = models()
    data = [data_of()]
    live = distilled(teacher, student)
    cache = live.cache_teacher(data, tmp_path, top_k=5)
    raises(r"has temperature 3\.0, but", distilled, cache, student, temperature=3.0)
    words = r"share 50 tokens, but .* stores log-probabilities of 60"
    raises(words, distilled, cache, student, tokenizers=tokenizer(50))
    other = tmp_path / "other"
    for words, path, options in (
        (r"other settings \(top_k: k: \[5\], now \[6\]\)", tmp_path, {"top_k": 6}),
        ("was written with other settings", tmp_path, {}),
        ("top_k must be at most 60", other, {"top_k": 61}),
        ("top_k must be at least 1", other, {"top_k": 0}),
    ):
        raises(words, live.cache_teacher, data, path, **options)
    teacher = support.model_of("bert", "sequence")
    live = Distiller(teacher, student_from_teacher(teacher, [1]), SoftTargets())
    data = [support.data_of("bert", "sequence")]
    words = "top_k: SoftTargets reads no predictions of tokens"
    raises(words, live.cache_teacher, data, other, top_k=2)
    assert not (other / "teacher.json").exists()
