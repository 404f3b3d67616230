"""Options, layers, hyper-parameters and names of the methods; their terms: test_by_hand.py."""

import inspect
import warnings
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from fastkd import distill
from fastkd.distill import (
    FCD,
    LRCBERT,
    LRKD,
    MC3KD,
    METHODS,
    Distiller,
    Several,
    method_by_name,
    methods,
    select_layers,
    student_from_teacher,
)
from fastkd.distill.attention_relations import relation_divergence
from fastkd.distill.baselines import BASELINES
from tests.distill import draws
from tests.distill.models import batch, classifier, model
from tests.distill.support import data_of, model_of
from tests.support.compare import raises

DESIGN = (Path(__file__).parents[2] / "docs/design.md").read_text()


def pair(family, num_labels=3, student_layers=2):
    torch.manual_seed(0)
    teacher = classifier(family, num_labels=num_labels).double()
    torch.manual_seed(1)
    return teacher, classifier(family, layers=student_layers, num_labels=num_labels).double()


def test_lrc_bert_warns_of_many_classes():
    teacher, student = (classifier("bert", layers, num_labels=150) for layers in (4, 2))
    with pytest.warns(UserWarning, match="the right one of 150 classes 0.02 of the target"):
        Distiller(teacher, student, distill.LRCBERT())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Distiller(teacher, student, distill.LRCBERT(temperature=0.2))
        Distiller(teacher, student, distill.LRCBERT(gamma=0.0))
        Distiller(*pair("bert"), distill.LRCBERT())


def test_mc3kd_chooses_its_layers_from_data():
    teacher, student = pair("bert")
    method = MC3KD()
    distiller = Distiller(teacher, student, method)
    words = r"call distiller.prepare\(batches\)"
    raises(words, distiller, error=RuntimeError, **batch())
    batches = [batch(rows=16) for _ in range(3)]
    distiller.prepare(iter(batches))
    assert method.teacher_layers == select_layers(teacher, batches, 2)
    assert "cca" in distiller(**batch()).terms

    again = Distiller(*pair("bert"), MC3KD())
    again.load_state_dict(distiller.state_dict())
    assert again.method.teacher_layers == method.teacher_layers


def test_layers_are_chosen_from_what_a_decoder_reads_in_training():
    """A token without a label isn't compared, but tokens behind it attend to it."""
    teacher, data, seen = model_of("t5", "written words"), data_of("t5", "written words"), []
    data["labels"][:, 1] = -100
    teacher.decoder.final_layer_norm.register_forward_hook(lambda *given: seen.append(given[2]))
    distiller = Distiller(teacher, student_from_teacher(teacher, [1, 3]), MC3KD())
    distiller.prepare([data])
    distiller(**data)
    torch.testing.assert_close(*seen)


def test_every_method_has_a_name_and_is_public():
    """Except methods on attention maps, which need eager attention."""
    found = {
        kind
        for kind in vars(methods).values()
        if inspect.isclass(kind)
        and issubclass(kind, methods.Method)
        and kind.__module__ == methods.__name__
        and not kind.__name__.startswith("_")
    }
    for kind in found - set(METHODS.values()):  # what most tests go through
        maps = "step.attentions(" in inspect.getsource(kind)
        assert maps, f"METHODS has no name for {kind.__name__}"
        assert kind in vars(draws).values(), f"no random step has {kind.__name__}"
    for kind in found:
        assert kind.__name__ in distill.__all__, f"fastkd.distill lacks {kind.__name__}"
        assert f"`{kind.__name__}`" in DESIGN, f"docs/design.md has no {kind.__name__}"
    assert set(distill.__all__) <= set(dir(distill))


def test_hyperparameters_override_a_preset():
    assert FCD(task_weight=0.5).soft_weight == 0.5 and FCD(task_weight=0.0).soft_weight == 0.0
    assert method_by_name("lrc_bert").first_stage < 0.8
    assert method_by_name("lrc_bert", preset="paper", gamma=2.0).gamma == 2.0
    # Other values of the papers: tests/train/test_recipes.py.
    scaled = [method_by_name(name, preset="paper").scale_by_t2 for name in ("mc3kd", "lrc_bert")]
    assert scaled == [True, False]
    for kind in METHODS.values():
        assert kind.paper.items() <= kind(**kind.paper).hyperparameters().items()
        assert not kind.paper.items() & kind().hyperparameters().items(), "the same as the default"
    raises("did you mean 'paper'", method_by_name, "fcd", preset="papers")


@pytest.mark.parametrize("kind", [*METHODS.values(), *BASELINES.values()])
def test_hyperparameters_rebuild_the_method(kind):
    method = kind()
    assert kind(**method.hyperparameters()).hyperparameters() == method.hyperparameters()
    assert kind.__name__ in repr(method)
    for name, value in method.hyperparameters().items():
        if type(value) in (float, int, str) and name != "layers":  # the models say which there are
            for wrong in ("typo", -5.0, float("nan"), []):
                refused = TypeError, ValueError
                raises(f"{name} must be", kind, error=refused, **{name: wrong})


@pytest.mark.parametrize("name, options, message", [
    ("fdc", {}, "did you mean 'fcd'"),
    ("fcd", {"alhpa": 1.0}, "did you mean 'alpha'"),
    ("fcd", {"distance": "person"}, "did you mean 'pearson'"),
    ("soft_targets", {"alpha": 1.5}, "alpha must be at most 1"),
    ("soft_targets", {"temperature": 0.0}, "temperature must be greater than 0"),
    ("knn", {"k": 0}, "k must be at least 1"),
    ("lrc_bert", {"first_stage": 2.0}, "first_stage must be at most 1"),
    ("mc3kd", {"pool": "token"}, "did you mean 'tokens'"),
    ("lrkd", {"gamma": 1.1}, "gamma must be at most 1"),
    ("lrkd", {"projection_layers": 0}, "projection_layers must be at least 1"),
])  # fmt: skip
def test_wrong_options_are_errors(name, options, message):
    made = name if isinstance(name, type) else lambda **given: method_by_name(name, **given)
    raises(message, made, **options)


def test_a_sample_without_a_real_token_has_no_relations():
    x, mask = torch.randn(2, 1, 3, 4), torch.tensor([[1, 1, 0], [0, 0, 0]]) > 0
    losses = relation_divergence([(x, x), (x.exp(), x)], mask)
    assert losses[0] > 0 and losses[1] == 0


def test_both_terms_of_fcd_are_computed_in_one_pass():
    method, calls = FCD(alpha=0.4, beta=0.2), []
    method.relations.register_forward_hook(lambda *_: calls.append(1))
    Distiller(*pair("bert"), method)(**batch())
    assert len(calls) == 1


def test_several_methods_share_one_norm():
    by_batch = LRCBERT(perturb=True, perturb_norm="batch")
    assert Several(by_batch, FCD()).perturb_norm == "batch"
    raises("perturb_norm differ", Several, by_batch, LRCBERT(perturb=True))


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


def test_a_method_of_its_name_computes_a_term_of_the_base_class():
    class Constant(FCD):
        def samples(self, step):
            return step.student.hidden[1].new_full((), 7.0)

    out = Distiller(*pair("bert"), Constant()).eval()(**batch())
    terms = [out.terms[name] for name in ("task", "soft", "tokens", "samples")]
    assert terms[-1] == 7 and terms[-2] > 0
    torch.testing.assert_close(out.loss.detach(), torch.stack(terms).sum())


def test_the_package_of_a_method_does_not_matter():
    """A subclass that reads no logits itself needs none, whichever module defines it."""
    teacher = model(GPT2LMHeadModel, "gpt2")
    student = student_from_teacher(teacher, [1])

    class Own(FCD):
        def soft(self, step):
            return super().soft(step)

    assert Distiller(teacher, student, type("Mine", (FCD,), {})()).uses_lm_head
    assert not Distiller(teacher, student, Own()).uses_lm_head
    assert Distiller(teacher, student, Own(soft_weight=0.0)).uses_lm_head


def test_the_last_layer_of_algorithm_1(monkeypatch):
    teacher = classifier("bert")
    found = torch.tensor([0.5, 0.9, 0.8, 0.1])
    monkeypatch.setattr("fastkd.distill.methods.adjacent_layer_cca", lambda *_: found)
    assert select_layers(teacher, [], 2) == [1, 4]
    assert select_layers(teacher, [], 2, last_layer=False) == [1, 3]
    with pytest.raises(ValueError):
        select_layers(teacher, [], 4, last_layer=False)
