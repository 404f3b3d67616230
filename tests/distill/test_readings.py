"""Readings of the papers, and MiniLM's relations, against the equations in float64."""

import pytest
import torch
from torch.nn import functional as F

from fastkd import OrthogonalProjection
from fastkd.analysis import rccc
from fastkd.distill import FCD, LRCBERT, LRKD, Distiller, Several, select_layers
from fastkd.distill.attention_relations import MiniLM, MiniLMv2
from tests.distill.models import batch, classifier, set_dropout
from tests.distill.test_methods import TEACHER_LAYERS, pair
from tests.losses.relation import relation
from tests.support.compare import raises
from tests.support.interpreter import MARKS

EXACT = {"rtol": 1e-10, "atol": 1e-10}
BACKENDS = pytest.mark.parametrize("runs_on", ["torch", pytest.param("cpp", marks=MARKS["cpp"])])


def states(model, inputs):
    names = ("input_ids", "attention_mask")
    out = model(**{n: inputs[n] for n in names}, output_hidden_states=True)
    return out.logits, out.hidden_states


def gradients(student, loss):
    student.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


def assert_equal(distiller, inputs, oracle, backend=None):
    for part in distiller.method.modules():
        has = hasattr(part, "backend") and not isinstance(part, OrthogonalProjection)
        if backend is not None and has:
            part.backend = backend
    distiller.eval()
    loss = distiller(**inputs).loss
    own = gradients(distiller.student, loss)
    expected = oracle()
    theirs = gradients(distiller.student, expected)
    torch.testing.assert_close(loss, expected, **EXACT)
    assert own.keys() == theirs.keys() and own
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, theirs[name], **EXACT)


@BACKENDS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_layers_of_fcd(reduction, runs_on):
    teacher, student = pair("bert")
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    options = {"alpha": 0.4, "beta": 0.2, "task_weight": 0.0, "soft_weight": 0.0}
    distiller = Distiller(teacher, student, FCD(layers_reduction=reduction, **options))

    def oracle():
        with torch.no_grad():
            h_t = states(teacher, inputs)[1]
        h_s = states(student, inputs)[1]
        total = 0
        for i, j in zip((1, 2), TEACHER_LAYERS, strict=True):
            for weight, over in ((0.4, "tokens"), (0.2, "samples")):
                total += weight * relation(h_s[i], h_t[j], mask, over, "l2", "pearson", 1.0, 1e-8)
        return total / (2 if reduction == "mean" else 1)

    assert_equal(distiller, inputs, oracle, runs_on)


def test_two_samples_have_a_correlation_of_one():
    teacher, student = pair("bert")
    method = FCD(alpha=0.0, beta=1.0, task_weight=0.0, soft_weight=0.0)
    out = Distiller(teacher, student, method).eval()(**batch(rows=2, padding=0))
    assert abs(out.terms["samples"]) < 1e-5  # Figure 4's eps


def cos_nce(z_s, z_t):
    """Eqs. 1-2: the negatives of a row are the other rows of the teacher."""
    losses = []
    for i, s in enumerate(z_s):
        g = [1 - F.cosine_similarity(s, t, dim=0) for t in z_t]
        negatives = [g[j] for j in range(len(z_t)) if j != i]
        total = sum(2 - (n - g[i]) for n in negatives)
        losses.append(total / (2 * len(negatives)) + g[i])
    return torch.stack(losses).mean()


@BACKENDS
@pytest.mark.parametrize("pool", ["sequence", "mean"])
def test_equation_3_of_lrc_bert(pool, runs_on):
    teacher, student = pair("bert")
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    method = LRCBERT(alpha=1.0, beta=0.0, gamma=0.0, pool=pool)
    distiller = Distiller(teacher, student, method)
    distiller.method.double()

    def oracle():
        with torch.no_grad():
            h_t = states(teacher, inputs)[1]
        h_s = states(student, inputs)[1]
        total = 0
        for i, j in zip((1, 2), TEACHER_LAYERS, strict=True):
            real = mask[..., None]
            z_s, z_t = h_s[i] @ method.loss.W.weight.T * real, h_t[j] * real
            if pool == "sequence":
                z_s, z_t = z_s.flatten(1), z_t.flatten(1)
            else:
                z_s, z_t = (z.sum(1) / mask.sum(1, keepdim=True) for z in (z_s, z_t))
            total += cos_nce(z_s, z_t)
        return total

    assert_equal(distiller, inputs, oracle, runs_on)


@pytest.mark.parametrize("norm", ["sample", "batch"])
def test_norm_of_equation_7(norm):
    teacher, student = pair("bert")
    inputs = batch()
    method = LRCBERT(alpha=0.0, beta=0.0, gamma=1.0, perturb=True, perturb_norm=norm)
    distiller = Distiller(teacher, student, method)
    set_dropout(student)
    soft = F.softmax(F.one_hot(inputs["labels"], 3).double() / 1.1, -1)
    mask = inputs["attention_mask"]

    def loss_at(shift):
        handle = student.bert.embeddings.register_forward_hook(lambda m, a, out: out + shift)
        logits = student(input_ids=inputs["input_ids"], attention_mask=mask).logits
        handle.remove()
        return -(soft * logits.log_softmax(-1)).sum(-1).mean()

    zero = torch.zeros(6, 10, student.config.hidden_size, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(loss_at(zero), zero)
    g = g * mask[..., None]
    size = g.flatten(1).norm(dim=1)[:, None, None] if norm == "sample" else g.norm()
    distiller.train()
    torch.testing.assert_close(distiller(**inputs).loss, loss_at(g / size), **EXACT)


def test_several_methods_share_one_norm():
    by_batch = LRCBERT(perturb=True, perturb_norm="batch")
    assert Several(by_batch, FCD()).perturb_norm == "batch"
    raises("perturb_norm differ", Several, by_batch, LRCBERT(perturb=True))


def layer_norm(x):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@BACKENDS
@pytest.mark.parametrize(
    ("reduction", "start"), [("mean", "identity"), ("batchmean", "random"), ("sum", "identity")]
)
def test_equations_7_and_9_of_lrkd(reduction, start, runs_on):
    teacher, student = pair("bert")
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    torch.manual_seed(3)
    method = LRKD(alpha=None, beta=1.0, gamma=0.3, reduction=reduction, start=start)
    distiller = Distiller(teacher, student, method)
    distiller.method.double()
    parts = method.loss.student_projection, method.loss.teacher_projection
    ps, pt = (part.weight.detach() for part in parts)
    identity = torch.eye(len(ps), dtype=torch.float64)
    torch.testing.assert_close(ps @ ps.T, identity)
    assert torch.equal(ps, identity) == (start == "identity")

    def oracle():
        with torch.no_grad():
            last = states(teacher, inputs)[1][-1]
        h_s, h_t = (
            (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            for x in (states(student, inputs)[1][-1], last)
        )
        spl = 0.5 * (layer_norm(h_s @ ps) - layer_norm(h_t)).square().sum()
        tpl = 0.5 * (layer_norm(h_t @ pt) - layer_norm(h_s)).square().sum()
        count = {"mean": h_s.numel(), "batchmean": len(h_s), "sum": 1}[reduction]
        return (0.3 * spl + 0.7 * tpl) / count

    assert_equal(distiller, inputs, oracle, runs_on)


def test_the_last_layer_of_algorithm_1(monkeypatch):
    teacher = classifier("bert")
    found = torch.tensor([0.5, 0.9, 0.8, 0.1])
    monkeypatch.setattr("fastkd.distill.layers.adjacent_layer_cca", lambda *_: found)
    assert select_layers(teacher, [], 2) == [1, 4]
    assert select_layers(teacher, [], 2, last_layer=False) == [1, 3]
    with pytest.raises(ValueError):
        select_layers(teacher, [], 4, last_layer=False)


def test_index_of_the_rccc():
    matrix = torch.tensor([[1.0, 0.5, 0.25], [0.5, 1.0, 0.75], [0.25, 0.75, 1.0]])
    assert (rccc(matrix), rccc(matrix, first=1)) == (0.25, 0.75)


def heads_of(model, layer, inputs, heads):
    """Queries, keys and values (B, H, N, d) of a BERT layer, from its own weights."""
    hidden = states(model, inputs)[1][layer - 1]
    own = model.bert.encoder.layer[layer - 1].attention.self
    return [
        projection(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        for projection in (own.query, own.key, own.value)
    ]


def relation_kl(student, teacher, mask):
    """(1 / (A |x|)) Σ_a Σ_t KL(R^T_{a,t} ‖ R^S_{a,t}) of each text without its padding."""
    losses = []
    for i, real in enumerate(mask):
        total = 0
        heads = student[0].shape[1]
        for a in range(heads):
            logs = []
            for x, y in (student, teacher):
                rows, columns = x[i, a][real], y[i, a][real]
                logs.append((rows @ columns.T / rows.shape[-1] ** 0.5).log_softmax(-1))
            total += (logs[1].exp() * (logs[1] - logs[0])).sum()
        losses.append(total / (heads * real.sum()))
    return torch.stack(losses).mean()


def test_minilm_is_its_equations():
    teacher, student = pair("bert")
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    method = MiniLM(attention=0.5, values=2.0, task_weight=0.3)
    heads = student.config.num_attention_heads

    def oracle():
        with torch.no_grad():
            q_t, k_t, v_t = heads_of(teacher, 4, inputs, heads)
        q, k, v = heads_of(student, 2, inputs, heads)
        task = F.cross_entropy(states(student, inputs)[0], inputs["labels"])
        at = relation_kl((q, k), (q_t, k_t), mask)
        return 0.5 * at + 2.0 * relation_kl((v, v), (v_t, v_t), mask) + 0.3 * task

    assert_equal(Distiller(teacher, student, method), inputs, oracle)


@pytest.mark.parametrize(("relation_heads", "layer"), [(4, None), (None, 3)])
def test_minilmv2_is_its_equations(relation_heads, layer):
    teacher, student = pair("bert")
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    method = MiniLMv2(
        queries=0.5, keys=2.0, relation_heads=relation_heads, layer=layer, task_weight=0.0
    )
    heads = relation_heads or max(h for h in range(1, 49) if student.config.hidden_size % h == 0)

    def oracle():
        with torch.no_grad():
            theirs = heads_of(teacher, layer or 4, inputs, heads)
        ours = heads_of(student, 2, inputs, heads)
        weights = zip((0.5, 2.0, 1.0), ours, theirs, strict=True)
        return sum(w * relation_kl((s, s), (t, t), mask) for w, s, t in weights)

    assert_equal(Distiller(teacher, student, method), inputs, oracle)


def test_minilm_of_other_heads_and_families():
    torch.manual_seed(0)
    teacher, narrow = classifier("bert"), classifier("bert", layers=2)
    other = classifier("bert", layers=2, num_attention_heads=1)
    raises("use MiniLMv2", Distiller(teacher, other, MiniLM()), **batch())
    assert Distiller(teacher, other, MiniLMv2())(**batch()).loss.isfinite()
    uneven = Distiller(teacher, narrow, MiniLMv2(relation_heads=5))
    raises("relation_heads=5 doesn't divide", uneven, **batch())
    words = "layer=5: the teacher has 4 layers"
    raises(words, Distiller, teacher, narrow, MiniLM(layer=5))
    for family in ("gpt2", "llama"):
        both = classifier(family), classifier(family, layers=2)
        assert Distiller(*both, MiniLM())(**batch()).loss.isfinite()


def test_minilm_of_a_decoder_compares_its_attention():
    """softmax(QKᵀ/√d) over earlier tokens is GPT-2's own map."""
    teacher, student = (model.eval() for model in pair("gpt2"))
    inputs = batch(padding=0)
    for model in (teacher, student):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        a_t, a_s = (
            model(input_ids=inputs["input_ids"], output_attentions=True).attentions[-1]
            for model in (teacher, student)
        )
    expected = torch.where(a_t > 0, a_t * (a_t / a_s).log(), 0).sum(-1).mean()
    method = MiniLM(values=0.0, task_weight=0.0)
    out = Distiller(teacher, student, method).eval()(**inputs)
    torch.testing.assert_close(out.loss.detach(), expected, **EXACT)


def test_a_schedule_that_is_never_reached():
    method = LRCBERT(first_stage=0.8)
    assert "soft, task" in method.schedule_warning(4) and "75%" in method.schedule_warning(4)
    assert not method.schedule_warning(6) and not LRCBERT().schedule_warning(4)
    assert not FCD().schedule_warning(1)
