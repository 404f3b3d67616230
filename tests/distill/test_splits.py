"""The same batch in one piece, in micro-batches, and over processes: one gradient in float64."""

import pytest
import torch
import transformers as t
from torch.nn.parallel import DistributedDataParallel

from fastkd.distill import METHODS, Distiller, IntraClassKNN, student_from_teacher
from tests.distill.models import classifier, gradients_of, model, ready, set_dropout, step
from tests.distill.processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")

ROWS = 9
PARTS = [(0, 2), (2, 7), (7, 9)]  # uneven, and of unequal lengths


def distiller_of(name, kind="classifier", dropout=0.0, **gather):
    torch.manual_seed(0)
    lm = kind == "language model"
    teacher = model(t.LlamaForCausalLM, "llama") if lm else classifier("bert")
    teacher = teacher.double()
    student = student_from_teacher(teacher, [1, 4])
    set_dropout(student, dropout)
    torch.manual_seed(1)
    return ready(
        teacher, student, name, **({"alpha1": 0.1, "k": 2} if name == "knn" else {}), **gather
    )


def data_of(kind="classifier"):
    torch.manual_seed(2)
    lengths = torch.tensor([4, 6, 10, 9, 5, 12, 8, 3, 7])
    ids = torch.randint(5, 60, (ROWS, 12))
    mask = (torch.arange(12) < lengths[:, None]).long()
    labels = torch.arange(ROWS) % 3 if kind == "classifier" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def part(data, start, stop):
    """Rows of the batch, cut to their own length."""
    rows = {name: value[start:stop] for name, value in data.items()}
    length = int(rows["attention_mask"].sum(1).max()) if stop > start else 1
    return {name: x if x.dim() == 1 else x[:, :length] for name, x in rows.items()}


def whole_batch(name, kind):
    return step(distiller_of(name, kind), data_of(kind))


def assert_equal(expected, terms, gradients):
    out, by_name = expected
    for term, value in out.terms.items():
        torch.testing.assert_close(terms[term], value, atol=1e-10, rtol=1e-10)
    assert by_name.keys() == gradients.keys()
    for name, gradient in by_name.items():
        scale = max(1.0, float(gradient.abs().max()))
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 1e-10 * scale, f"{name} off by {difference:.1e} of {scale:.1e}"


# Every method, and each kind of term on tokens: on logits alone, over samples, chosen layers.
CASES = [("classifier", name) for name in METHODS]
CASES += [("language model", name) for name in ("soft_targets", "fcd", "mc3kd")]


@pytest.mark.parametrize("kind, name", CASES)
def test_accumulated_micro_batches_are_the_whole_batch(kind, name):
    distiller = distiller_of(name, kind)
    parts = [part(data_of(kind), *ends) for ends in PARTS]
    terms, loss = {}, 0
    for out in distiller.accumulate(parts):
        out.loss.backward()
        loss = loss + out.loss.detach()
        terms = {key: terms.get(key, 0) + value for key, value in out.terms.items()}
    expected = whole_batch(name, kind)
    torch.testing.assert_close(loss, expected[0].loss.detach(), atol=1e-10, rtol=1e-10)
    assert_equal(expected, terms, gradients_of(distiller))


def test_the_second_pass_repeats_the_firsts_dropout():
    distiller = distiller_of("fcd", dropout=0.3)
    data = data_of()
    torch.manual_seed(3)
    expected = step(distiller, data)
    distiller.zero_grad()
    torch.manual_seed(3)
    (out,) = distiller.accumulate([data])
    out.loss.backward()
    assert_equal(expected, out.terms, gradients_of(distiller))
    after = torch.rand(1)
    torch.manual_seed(3)
    distiller(**data)
    assert torch.equal(torch.rand(1), after)


def test_accumulation_is_the_whole_batch_for_a_frozen_student_and_under_autocast():
    data = data_of()
    frozen, mixed = distiller_of("lrkd"), distiller_of("fcd").float()
    frozen.student.requires_grad_(False)
    for distiller, precision in ((frozen, torch.float64), (mixed, torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            _, expected = step(distiller, data)
            distiller.zero_grad()
            for out in distiller.accumulate([part(data, *ends) for ends in PARTS]):
                out.loss.backward()
        found = gradients_of(distiller)
        assert found.keys() == expected.keys()
        accuracy = 1e-10 if distiller is frozen else 0.1
        for name, gradient in expected.items():
            size = max(1e-2, float(gradient.abs().max()))
            assert (found[name] - gradient).abs().max() < accuracy * size, name


def test_what_a_method_learns_is_not_summed_in_half_precision():
    """One part or nine: the gradient of its parameters is rounded once."""
    torch.manual_seed(0)
    models = classifier("bert"), classifier("bert", 2, hidden_size=32, intermediate_size=64)
    set_dropout(models[1])
    distiller = ready(*(each.bfloat16() for each in models), "lrc_bert", perturb=False)
    data = {name: x[:, :3] if x.dim() > 1 else x for name, x in data_of().items()}
    found = []
    for rows in (ROWS, 1):
        distiller.zero_grad()
        parts = [(i, i + rows) for i in range(0, ROWS, rows)]
        for out in distiller.accumulate([part(data, *ends) for ends in parts]):
            out.loss.backward()
        found.append(distiller.method.loss.W.weight.grad.float())
    assert (found[1] - found[0]).norm() <= 2 * 2**-9 * found[0].norm()


def test_accumulation_tells_of_a_schedule_that_nobody_drives():
    made = distiller_of("lrc_bert")
    distiller = Distiller(made.teacher, made.student, made.method)
    with pytest.warns(UserWarning, match="call distiller.set_progress"):
        next(distiller.accumulate([data_of()]))


def test_nothing_to_accumulate_is_an_error():
    with pytest.raises(ValueError, match="batches is empty"):
        next(distiller_of("fcd").accumulate([]))


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_rows_has_no_loss(name, tmp_path):
    distiller = distiller_of(name)
    nothing = part(data_of(), 3, 3)
    out, gradients = step(distiller, nothing)
    assert out.loss == 0 and out.logits.shape == (0, 3)
    assert gradients and not any(g.any() for g in gradients.values())
    cache = distiller.cache_teacher([data_of(), nothing], tmp_path)
    assert Distiller(cache, distiller.student, distiller.method)(**nothing).loss == 0


# Processes


def gathered(rank, ends, micro):
    results = {}
    for kind, name in CASES:
        distiller = distiller_of(name, kind, gather=True)
        model = DistributedDataParallel(distiller, find_unused_parameters=True)
        data = data_of(kind)
        if micro:
            terms = {}
            for out in distiller.accumulate([part(data, *e) for e in ends[rank]], model):
                out.loss.backward()
                terms = {key: terms.get(key, 0) + value for key, value in out.terms.items()}
        else:
            out = model(**part(data, *ends[rank]))
            out.loss.backward()
            terms = out.terms
            assert torch.equal(out.loss.detach(), terms["total"])
        results[kind, name] = terms, gradients_of(distiller)
    return results


@pytest.mark.parametrize("ends", [[(0, 6), (6, 9)]])
def test_processes_that_gather_are_one_process(ends, tmp_path):
    ranks = run_ranks(gathered, len(ends), tmp_path, ends, False)
    for case in CASES:
        expected = whole_batch(case[1], case[0])
        for rank in ranks:
            assert_equal(expected, *rank[case])


def test_processes_that_gather_and_accumulate_are_one_process(tmp_path):
    ends = [[(0, 2), (2, 4), (4, 6)], [(6, 9)]]
    ranks = run_ranks(gathered, 2, tmp_path, ends, True)
    for case in CASES:
        out, gradients = whole_batch(case[1], case[0])
        # Terms on logits are this process's shares there, and their average the whole.
        names = {term for rank in ranks for term in rank[case][0]} - {"total"}
        terms = {name: sum(rank[case][0][name] for rank in ranks) / 2 for name in names}
        terms["total"] = out.terms["total"]
        for rank in ranks:
            assert_equal((out, gradients), terms, rank[case][1])


def knn_loss(rank, ends):
    torch.manual_seed(0)
    teacher = classifier("bert")
    method = IntraClassKNN(alpha1=1.0, alpha2=0.0, alpha3=0.0)
    distiller = Distiller(teacher, student_from_teacher(teacher, [1]), method).eval()
    return distiller(**part(data_of(), *ends[rank])).loss.item()


def test_knn_does_not_shrink_with_the_number_of_processes(tmp_path):
    """Without gather each sums over its samples; the loop's average is the sum over all."""
    ends = [(0, 5), (5, 9)]
    alone = [knn_loss(rank, ends) for rank in (0, 1)]
    spread = run_ranks(knn_loss, 2, tmp_path, ends)
    assert sum(spread) / 2 == pytest.approx(sum(alone), rel=1e-6)
