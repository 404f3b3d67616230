"""Options, layers, hyper-parameters and names of the methods, several at once, and a user's own.

Their terms: test_by_hand.py.
"""

import inspect
import warnings
from pathlib import Path

import pytest
import torch
import transformers as t

from fastkd import distill
from fastkd.distill import FCD, LRCBERT, LRKD, Distiller, method_by_name, student_from_teacher
from fastkd.distill.attention_relations import relation_divergence
from fastkd.distill.baselines import BASELINES
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import capture_qkv
from fastkd.models.outputs import LayerRequest, model_outputs
from tests.distill import draws
from tests.distill.models import batch, classifier, config_of, eager, model, pair, set_dropout
from tests.distill.own_method import HiddenAndAttention, Unfinished
from tests.distill.support import data_of, model_of
from tests.support.compare import raises

DESIGN = (Path(__file__).parents[2] / "docs/design.md").read_text()


def test_lrc_bert_warns_of_many_classes():
    many = pair(num_labels=150)
    with pytest.warns(UserWarning, match="the right one of 150 classes 0.02 of the target"):
        Distiller(*many, LRCBERT())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for models, method in (
            (many, LRCBERT(temperature=0.2)), (many, LRCBERT(gamma=0.0)), (pair(), LRCBERT())
        ):  # fmt: skip
            Distiller(*models, method)


def test_layers_are_chosen_from_what_a_decoder_reads_in_training():
    """A token without a label isn't compared, but tokens behind it attend to it."""
    teacher, data, seen = model_of("t5", "written words"), data_of("t5", "written words"), []
    data["labels"][:, 1] = -100
    teacher.decoder.final_layer_norm.register_forward_hook(lambda *given: seen.append(given[2]))
    distiller = Distiller(teacher, student_from_teacher(teacher, [1, 3]), distill.MC3KD())
    distiller.prepare([data])
    distiller(**data)
    torch.testing.assert_close(*seen)


def test_every_method_has_a_name_and_is_public():
    """Except methods on attention maps, which need eager attention."""
    classes = filter(inspect.isclass, vars(distill.methods).values())
    own = {x for x in classes if x.__module__ == distill.methods.__name__}
    found = {x for x in own if issubclass(x, distill.Method) and not x.__name__.startswith("_")}
    for kind in found - set(distill.METHODS.values()):  # what most tests go through
        maps = "step.attentions(" in inspect.getsource(kind)
        assert maps, f"METHODS has no name for {kind.__name__}"
        assert kind in vars(draws).values(), f"no random step has {kind.__name__}"
    for kind in found:
        assert kind.__name__ in distill.__all__, f"fastkd.distill lacks {kind.__name__}"
        assert f"`{kind.__name__}`" in DESIGN, f"docs/design.md has no {kind.__name__}"
    assert set(distill.__all__) <= set(dir(distill))


def test_methods_and_presets_are_found_by_name():
    assert FCD(task_weight=0.5).soft_weight == 0.5 and FCD(task_weight=0.0).soft_weight == 0.0
    assert method_by_name("lrc_bert", preset="paper", gamma=2.0).gamma == 2.0
    # Other values of the papers: tests/train/test_recipes.py.
    scaled = [method_by_name(name, preset="paper").scale_by_t2 for name in ("mc3kd", "lrc_bert")]
    assert scaled == [True, False]
    for kind in distill.METHODS.values():
        assert kind.paper.items() <= kind(**kind.paper).hyperparameters().items()
        assert not kind.paper.items() & kind().hyperparameters().items(), "the same as the default"
    path = "tests.distill.own_method:HiddenAndAttention"
    assert (distill.resolve("fcd"), distill.resolve(path)) == (FCD, HiddenAndAttention)
    method = method_by_name(path, attention=0.5)
    assert method.hyperparameters() == {"hidden": 1.0, "attention": 0.5}
    terms = Distiller(*eager(pair()), method)(**batch()).terms
    torch.testing.assert_close(terms["total"], terms["states"] + 0.5 * terms["maps"])


def test_wrong_options_and_names_are_errors():
    by_batch, path = LRCBERT(perturb=True, perturb_norm="batch"), "tests.distill.own_method:"
    assert distill.Several(by_batch, FCD()).perturb_norm == "batch"
    one, two = (model(t.GPT2LMHeadModel, "gpt2", hidden_size=size) for size in (16, 8))
    both, student = distill.ByRow({"a": one, "b": two}), student_from_teacher(one, [1, 4])
    soft, data = Distiller(both, student, distill.SoftTargets()), batch()
    data["labels"] = data["input_ids"]
    assert soft(**{name: x[:0] for name, x in data.items()}, teacher_id=[]).loss == 0
    classes = classifier("bert"), classifier("bert", 2)
    for words, made, given, options in (
        ("did you mean 'fcd'", method_by_name, ["fdc"], {}),
        ("did you mean 'paper'", method_by_name, ["fcd"], {"preset": "papers"}),
        ("did you mean 'alpha'", method_by_name, ["fcd"], {"alhpa": 1.0}),
        ("alpha must be at most 1", distill.SoftTargets, [], {"alpha": 1.5}),
        ("first_stage must be at most 1", LRCBERT, [], {"first_stage": 2.0}),
        ("gamma must be at most 1", LRKD, [], {"gamma": 1.1}),
        ("perturb_norm differ", distill.Several, [by_batch, LRCBERT(perturb=True)], {}),
        ("methods: none given", distill.Several, [], {}),
        (r"methods must be .*method_by_name\('lrkd'\)", distill.Several, [FCD(), "lrkd"], {}),
        ("No module named 'nowhere'", distill.resolve, ["nowhere.at_all:Class"], {}),
        ("must be a subclass of fastkd", distill.resolve, [f"{path}not_a_method"], {}),
        (r"'nothing' is not a term; define the method nothing\(step\)", Distiller,
         [*classes, Unfinished()], {}),
        ("arguments alpha are not attributes", Unfinished().hyperparameters, [], {}),
        ("'b' is a str", distill.ByRow, [{"a": one, "b": "name"}], {}),
        ("pass a dictionary", distill.ByRow, [[one, two]], {}),
        ("1 is no string; name each teacher", distill.ByRow, [{1: one, 0: two}], {}),
        ("several teachers are cached one by one", soft.cache_teacher, [[data], "unused"], {}),
        (r"FCD compares layers, and 'b' .* has other sizes", Distiller, [both, student, FCD()], {}),
        ("MC3KD chooses layers of one teacher; pass layers=", Distiller,
         [both, student, distill.MC3KD()], {}),
    ):  # fmt: skip
        raises(words, made, *given, error=(ValueError, TypeError), **options)
    assert "alpha" in repr(Unfinished())


@pytest.mark.parametrize("kind", [*distill.METHODS.values(), *BASELINES.values()])
def test_hyperparameters_rebuild_the_method(kind):
    method = kind()
    assert kind(**method.hyperparameters()).hyperparameters() == method.hyperparameters()
    assert kind.__name__ in repr(method)
    for name, value in method.hyperparameters().items():
        if type(value) in (float, int, str) and name != "layers":  # the models say which there are
            for wrong in ("typo", -5.0, float("nan"), []):
                refused = TypeError, ValueError
                raises(f"{name} must be", kind, error=refused, **{name: wrong})


def test_a_sample_without_a_real_token_has_no_relations():
    x, mask = torch.randn(2, 1, 3, 4), torch.tensor([[1, 1, 0], [0, 0, 0]]) > 0
    losses = relation_divergence([(x, x), (x.exp(), x)], mask)
    assert losses[0] > 0 and losses[1] == 0


def test_a_schedule_that_is_never_reached():
    method = LRCBERT(first_stage=0.8)
    assert "soft, task" in method.schedule_warning(4) and "75%" in method.schedule_warning(4)
    assert not method.schedule_warning(6) and not LRCBERT().schedule_warning(4)
    assert not FCD().schedule_warning(1)


def test_a_method_serves_models_of_one_size():
    method, teacher = LRKD(), classifier("bert")
    first = Distiller(teacher, student_from_teacher(teacher, [2]), method)
    weights = {k: v.clone() for k, v in first.method.state_dict().items()}
    Distiller(teacher, student_from_teacher(teacher, [2]), method)
    assert all(torch.equal(v, weights[k]) for k, v in method.state_dict().items())
    deeper = student_from_teacher(teacher, [2, 4])
    raises("built for models of other sizes", Distiller, teacher, deeper, method)


def test_methods_of_a_users_own_on_fcd():
    """A term of the base class; logits only if it reads them, whichever module defines it."""

    class Constant(FCD):
        def samples(self, step):
            return step.student.hidden[1].new_full((), 7.0)

        def soft(self, step):
            return super().soft(step)

    method, calls = Constant(), []
    method.relations.register_forward_hook(lambda *_: calls.append(1))
    out = Distiller(*pair(), method).eval()(**batch())
    terms = [out.terms[name] for name in ("task", "soft", "tokens", "samples")]
    assert terms[-1] == 7 and terms[-2] > 0 and len(calls) == 1  # of both terms
    torch.testing.assert_close(out.loss.detach(), torch.stack(terms).sum())
    teacher = model(t.GPT2LMHeadModel, "gpt2")
    student = student_from_teacher(teacher, [1])
    for method, reads in (
        (type("Mine", (FCD,), {})(), False), (Constant(), True),
        (Constant(soft_weight=0.0), False),
    ):  # fmt: skip
        assert Distiller(teacher, student, method).uses_lm_head is not reads


def test_the_last_layer_of_algorithm_1(monkeypatch):
    teacher = classifier("bert")
    found = torch.tensor([0.5, 0.9, 0.8, 0.1])
    monkeypatch.setattr("fastkd.distill.methods.adjacent_layer_cca", lambda *_: found)
    assert distill.select_layers(teacher, [], 2) == [1, 4]
    assert distill.select_layers(teacher, [], 2, last_layer=False) == [1, 3]
    with pytest.raises(ValueError):
        distill.select_layers(teacher, [], 4, last_layer=False)


def test_shares_of_labels_and_terms_left_out():
    teachers, data = [classifier("bert") for _ in range(2)], batch(rows=6)
    student = student_from_teacher(teachers[0], [1, 4])
    set_dropout(student)
    distiller = Distiller(teachers, student, distill.Several(FCD(task_weight=0.5), LRKD(beta=2.0)))
    out = distiller(**data)
    distiller.method.label_share = 0.5  # as of a process that has fewer labels than others
    halved = distiller(**data).terms
    for name in ("0.task", "1.task"):
        torch.testing.assert_close(halved[name], out.terms[name] / 2)
    distiller.method.left_out = frozenset({"task"})  # as of text that the student wrote
    assert distiller(**data).terms.keys() == out.terms.keys() - {"0.task", "1.task"}
    assert not any(p.requires_grad for p in distiller.teacher.parameters())
    assert not any(name.startswith("teacher") for name in distiller.state_dict())


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart"])
def test_queries_of_self_attention_are_captured(family):
    """A block with cross-attention has two of each name."""
    more = {"num_attention_heads": 4} if family == "bart" else {"add_cross_attention": True}
    config = config_of(family, 2, is_decoder=True, **more)
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    backbone, states = Backbone(model), {"encoder_hidden_states": torch.randn(1, 4, 16)}
    with torch.no_grad(), capture_qkv(backbone, [2]) as kept:
        maps = backbone.run(
            {"input_ids": torch.arange(6)[None], "output_attentions": True, **states}
        )
    queries, keys, _ = kept[2]
    scores = (queries @ keys.mT / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e30)
    torch.testing.assert_close(maps.attentions[1], scores.softmax(-1))


def test_models_that_do_not_show_what_a_method_asks_for_are_errors():
    sizes = {"vocab_size": 60, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64}
    interleaved = t.GPTBigCodeModel(t.GPTBigCodeConfig(**sizes, multi_query=False))
    raises("doesn't show its queries", capture_qkv(Backbone(interleaved), [1]).__enter__)
    squeezed = Backbone(model_of("squeezebert", "none"))  # (B, D, N), which would pass for others
    inputs = {"input_ids": batch()["input_ids"]}
    raises("SqueezeBertModel doesn't show", model_outputs, squeezed, inputs, LayerRequest(qkv=(1,)))
