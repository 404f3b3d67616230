"""`verify`, which users run on their own model: the checks that it passes, and its output."""

import itertools
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers as t

from fastkd import distill
from fastkd.distill import Distiller, SoftTargets, method_by_name, student_from_teacher
from fastkd.distill.verify import Check, _check, _Step, begin, table, verify
from tests.distill.models import batch, classifier, config_of, pair, ready, recipe, step
from tests.distill.processes import CONTEXT
from tests.distill.support import data_of, model_of
from tests.distill.test_distiller import documents, packed
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")
MODULE = sys.modules[verify.__module__]
PLAIN_LOOP = {"accumulated_in_a_plain_loop": "by definition"}


def distiller_of(teacher, name, layers=(1, 3)):
    torch.manual_seed(1)
    return ready(teacher, student_from_teacher(teacher, layers), name)


def checked(distiller, data, **others):
    """Checks by name; the gradient of every way is equal, but of those with other verdicts."""
    checks = {x.name: x for x in verify(distiller, data, ranks=0, compile_backend=None)}
    for name, check in checks.items():
        wanted = others.get(name.replace(" ", "_"), "equal")
        assert check.verdict in (wanted, others.get("any", wanted)), check
    return checks


def test_memory_of_mc3kd_is_the_same_under_all_splits():
    """Micro-batches of one step enter it once, and a resumed run continues with its bits."""
    method = method_by_name("mc3kd", layers="uniform", beta=1.0)
    distiller = Distiller(*pair("bert"), method)
    distiller(**batch(rows=4)).loss.backward()
    for x in distiller.method.loss._memories[0]:
        assert x.isfinite().all() and x.count_nonzero()
    checked(distiller, batch(rows=6), any="not here", **PLAIN_LOOP)  # a graph: tests/test_cca.py


def test_classifiers_have_one_gradient_under_all_splits():
    distiller = distiller_of(classifier("bert", 3), "fcd")
    before = {key: value.clone() for key, value in distiller.state_dict().items()}
    checks = checked(distiller, batch(rows=6), packed_rows="not here", **PLAIN_LOOP)
    assert all(torch.equal(before[key], value) for key, value in distiller.state_dict().items())
    assert distiller.training and next(distiller.parameters()).dtype == torch.float32
    parts = checks["accumulated in a plain loop"]
    assert parts.why.startswith("samples") and parts.deviation > 1e-6


# What AOT Autograd makes of a loss is in the loss's own tests; a step's takes half a minute.
@pytest.mark.parametrize("name", ["lrc_bert", pytest.param("lrkd", marks=pytest.mark.thorough)])
def test_a_compiled_step_has_the_same_gradient(name, recwarn, monkeypatch):
    """The output is the table only: no graph breaks, no warnings of transformers."""
    heard = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = heard.append
    monkeypatch.setattr(logging.getLogger("torch._dynamo"), "handlers", [handler])
    distiller = distiller_of(classifier("distilbert", 1), name, [1])  # compiling takes seconds
    others = {} if name == "lrkd" else {"compile_backend": "eager"}
    check = verify(distiller, batch(rows=6), ranks=0, **others)[-1]
    assert check.name == f"compiled ({others.get('compile_backend', 'aot_eager')})", check
    assert check.verdict == ("not here" if name == "lrc_bert" else "equal"), check
    assert not heard and not [w for w in recwarn if issubclass(w.category, FutureWarning)]


def test_unequal_numbers_of_documents_are_expected_to_differ():
    """LRKD's projections are a mean over documents; a plain loop weighs its parts alike."""
    distiller = distiller_of(model_of("llama", "next word").double(), "lrkd", [1, 3])
    rows = [packed(documents(lengths)) for lengths in ((5, 3, 8), (9, 7))]
    both = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    step, parts = _Step(distiller, both), [{n: x[i] for n, x in both.items()} for i in ([0], [1])]
    check = _check("accumulated in a plain loop", step.accumulated, step)
    assert check.verdict == "by definition", check
    assert "micro-batches of 2 and 3 documents" in check.why
    assert _check("Distiller.accumulate", lambda: step.gradients(parts), step).verdict == "equal"


@pytest.mark.parametrize(("family", "head", "way", "why"), [
    ("mpnet", "masked words", "left_padded", ""), ("gpt2", "next word", "left_padded", ""),
    ("bloom", "next word", "packed", "BloomForCausalLM takes no position_ids"),
])  # fmt: skip
def test_rows_as_a_user_passes_them(family, head, way, why, monkeypatch):
    calls, forward = [], Distiller.forward
    distiller = distiller_of(model_of(family, head).eval(), "fcd", [1, 3])
    step = _Step(distiller, data_of(family, head))
    monkeypatch.setattr(
        Distiller, "forward", lambda self, **batch: calls.append(batch) or forward(self, **batch)
    )
    check = _check("way", getattr(step, way), step)
    assert (check.verdict, check.why) == ("not here" if why else "equal", why)
    assert len(calls) == (way == "left_padded")
    assert not any("position_ids" in x for x in calls)


def forked(folder, world):
    """Starts the processes as `verify` does, with all imports done."""
    process = CONTEXT.Process(target=MODULE._fork, args=(folder, world))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_processes(monkeypatch):
    """Of four one gets no row. Layers were chosen from hidden states, which leave hooks behind."""
    monkeypatch.setattr(MODULE, "_run_processes", forked)
    torch.manual_seed(0)
    teacher, student = pair()
    mc3kd = method_by_name("mc3kd", preset="paper")
    distiller = Distiller(teacher, student, distill.Several(recipe("fcd"), mc3kd))
    distiller.prepare([batch(rows=6)])
    hooks = [hook for module in teacher.modules() for hook in module._forward_hooks.values()]
    step = _Step(distiller, batch(rows=6))
    check = _check("way", lambda: step.processes(4), step)
    assert check.verdict == "equal", check
    kept = [hook for module in teacher.modules() for hook in module._forward_hooks.values()]
    assert kept == hooks


def test_processes_that_cannot_start(monkeypatch):
    """An object that can't be pickled is named; forks need Linux."""
    distiller = distiller_of(classifier("bert", 3), "fcd")
    hook = distiller.student.register_forward_hook(lambda module, args, output: None)
    step = _Step(distiller, batch(rows=4))
    check = _check("way", lambda: step.processes(2), step)
    assert check.verdict == "not here" and "can't be pickled for a process: " in check.why, check
    hook.remove()
    monkeypatch.setattr(MODULE, "sys", SimpleNamespace(platform="darwin"))
    check = _check("way", lambda: step.processes(2), step)
    text = table([Check("wider padding", 1e-15, "equal"), check])
    assert check.ok and "wider padding   1.0e-15  equal" in text
    assert "not here: processes are forked, which needs Linux; this is darwin" in text


@pytest.mark.thorough
def test_a_process_that_fails_ends_the_others():
    distiller = distiller_of(classifier("bert", 3), "fcd")
    step = _Step(distiller, batch(rows=4))
    step.batch["unknown"] = torch.zeros(4)
    raises("takes no input 'unknown'", step.processes, 2, error=RuntimeError)


def test_a_wrong_gradient_is_detected():
    distiller = distiller_of(classifier("bert", 3), "lrkd")
    calls = []

    def differs(module, args, output):
        calls.append(1)
        return output * (1 + 1e-3 * len(calls))

    distiller.student.bert.encoder.layer[0].output.dense.register_forward_hook(differs)
    check = next(begin(distiller, batch(rows=4))[1])
    assert not check.ok and check.verdict == "differs"
    raises("fewer than two rows", verify, distiller, batch(rows=1), ranks=0)


def test_an_average_that_a_checkpoint_forgets_is_detected(monkeypatch):
    torch.manual_seed(0)
    student = student_from_teacher(classifier("bert"), [2, 4])
    step = _Step(Distiller(distill.EMATeacher(student, 0.5), student, SoftTargets()), batch(rows=4))
    ways = step.reloaded, step.resumed
    assert all(_check("way", way, step).verdict == "equal" for way in ways)
    monkeypatch.setattr("fastkd.distill.distiller.averaging_teachers", lambda teacher: {})
    assert all(_check("way", way, step).verdict == "differs" for way in ways)
    assert _check("way", step.cached, step).why == "an EMATeacher changes in each step"


def test_a_loss_of_neighbouring_rows_depends_on_their_order():
    class Neighbours(SoftTargets):
        across_samples = ("soft",)

        def soft(self, step):
            return step.whole(step.student.logits).diff(dim=0).square().sum()

    distiller = Distiller(classifier("bert"), classifier("bert"), Neighbours())
    _, checks = begin(distiller, batch(rows=4))
    verdicts = {check.name: check.verdict for check in itertools.islice(checks, 2)}
    assert verdicts["other order of samples"] == "differs"


def test_gradients_that_are_not_finite_equal_or_there():
    """In any parameter, the last as well as the first, of the way or of the step itself."""

    def check_of(found, expected):
        return _check("way", lambda: (found, expected), None)

    one, zeros = {"first": torch.ones(2), "last": torch.ones(2)}, {"first": torch.zeros(2)}
    for name, value in itertools.product(one, (float("nan"), float("inf"))):
        bad = {**one, name: torch.tensor([1.0, value])}
        for check in (check_of(bad, one), check_of(one, bad), check_of(bad, bad)):
            assert not check.ok and check.verdict == "differs", check
            assert check.why == f"the gradient of {name} is NaN or infinite"
            assert "differs: the gradient of" in table([check])
    fewer = {"first": torch.ones(2)}
    for check in (check_of(fewer, one), check_of(one, fewer), check_of(fewer, zeros)):
        assert check.verdict == "differs" and (check.deviation == 1 or check.why), check
    assert check_of(fewer, {**fewer, "last": torch.zeros(2)}).verdict == "equal"
    nothing, why = check_of(zeros, zeros), "all gradients are zero; nothing was compared"
    assert (nothing.verdict, nothing.why) == ("not here", why)


EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def of_experts(family):
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "num_experts_per_tok": 2, **EXPERTS[family]}
    return t.AutoModelForCausalLM.from_config(config_of(family, 2, **sizes))


@pytest.mark.parametrize("family", EXPERTS)
def test_mixtures_of_experts(family):
    teacher = of_experts(family).eval()
    distiller, data = distiller_of(teacher, "soft_targets", [1, 2]), data_of("llama", "next word")
    # DeepSeek's router computes in float32.
    checked(distiller, data, any="rounding" if family == "deepseek_v3" else "equal")
    assert teacher.config._experts_implementation == "grouped_mm"
    distiller.double()
    raises(r'is in float64, .*implementation\("eager"\)', distiller, **data)
    for side in (teacher, distiller.student):
        side.set_experts_implementation("eager")
    distiller(**data).loss.backward()


@pytest.mark.parametrize("name", ["fcd", "labels"])
def test_the_routers_loss_is_part_of_the_students_loss(name):
    teacher, student = (of_experts("qwen3_moe") for _ in range(2))
    distiller, data = ready(teacher, student, name), data_of("llama", "next word")
    plain, without = step(distiller, data)
    assert "router" not in plain.terms
    student.config.output_router_logits = True
    out, gradients = step(distiller, data)
    student.zero_grad()
    own, weight = student(**data), student.config.router_aux_loss_coef
    own.aux_loss.backward()
    torch.testing.assert_close(out.terms["router"], own.aux_loss)
    torch.testing.assert_close(out.loss, plain.loss + weight * own.aux_loss)
    assert out.terms.keys() == {*plain.terms, "router"}
    gate = "model.layers.0.mlp.gate.weight"
    difference = gradients[f"student.{gate}"] - without[f"student.{gate}"]
    expected = weight * student.get_parameter(gate).grad
    torch.testing.assert_close(difference, expected, atol=1e-6, rtol=1e-3)
    parts = [{key: x[rows] for key, x in data.items()} for rows in (slice(2), slice(2, 4))]
    shares = [out.terms["router"] for out in distiller.accumulate(parts)]
    means = [student(**part).aux_loss for part in parts]
    torch.testing.assert_close(sum(shares), sum(means) / 2)
    if name == "fcd":
        checks = verify(distiller, data, ranks=0, compile_backend=None)
        assert all(check.ok for check in checks) and student.config.output_router_logits
