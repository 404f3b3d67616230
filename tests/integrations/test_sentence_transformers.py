"""The losses in sentence-transformers' protocol: values, its Trainer, its files."""

import copy
import functools
import warnings

import pytest
import torch

pytest.importorskip("sentence_transformers")
import sentence_transformers as models
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MSELoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from fastkd import CCALoss, cos_nce_loss, relation_loss
from fastkd.distill import FCD, LRCBERT, LRKD, Distiller, student_from_teacher
from fastkd.integrations import sentence_transformers as losses
from fastkd.integrations.sentence_transformers import LayerDistillLoss, RelationDistillLoss
from tests.distill.processes import run_ranks
from tests.support.compare import raises
from tests.support.tiny import WORDS, make_teacher

TEXTS = [
    " ".join(WORDS[(n * i + n // 3) % len(WORDS)] for i in range(2, 6 + n % 3)) for n in range(16)
]
OTHERS = [text.replace("film", "good").replace("the", "a") for text in TEXTS]
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny encoder with its tokenizer."""
    return make_teacher(tmp_path_factory.mktemp("encoder") / "teacher", head=False)


@functools.cache
def loaded(folder):
    """The teacher, and a student of its layers 2 and 4, without dropout."""
    encoder = Transformer(str(folder))
    pooling = Pooling(encoder.get_embedding_dimension(), "mean")
    teacher = SentenceTransformer(modules=[encoder, pooling], device="cpu").eval()
    model = copy.deepcopy(teacher)
    model[0].model = student_from_teacher(model[0].model, [2, 4])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            torch.manual_seed(number)
            parameter.add_(0.05 * torch.randn_like(parameter))
    return teacher, model.train()


def both_of(folder):
    """Copies of the student and the teacher."""
    teacher, model = copy.deepcopy(loaded(folder))
    return model, teacher


def features_of(model, *columns):
    return [dict(model.preprocess(list(texts))) for texts in columns]


def embedded(model, *columns):
    return [model(features)["sentence_embedding"] for features in features_of(model, *columns)]


def teacher_answers(teacher, *columns):
    return [teacher.encode(list(texts), convert_to_tensor=True).clone() for texts in columns]


def gradients(value, model):
    model.zero_grad()
    value.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_step(found, expected, model):
    torch.testing.assert_close(found.detach(), expected.detach(), **CLOSE)
    torch.testing.assert_close(gradients(found, model), gradients(expected, model), **CLOSE)


LOSSES = {
    "relations": (RelationDistillLoss, {}, lambda s, t: relation_loss(s, t, over="samples")),
    "cca": (losses.CCADistillLoss, {"ridge": 0.1}, lambda s, t: CCALoss(0.1)(s[None], t[None])),
    "cos_nce": (losses.CosNCEDistillLoss, {}, cos_nce_loss),
}


@pytest.mark.filterwarnings("ignore:CCALoss")
@pytest.mark.parametrize(("columns", "parts"), [(1, None), (2, 5)])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_equal_the_functions(folder, name, columns, parts):
    """With one column, and with two columns as one batch and a gradient cache."""
    cls, options, function = LOSSES[name]
    model, teacher = both_of(folder)
    texts = (TEXTS, OTHERS)[:columns]
    labels = teacher_answers(teacher, *texts)
    loss = cls(model, mini_batch_size=parts, **options)
    given = labels[0] if columns == 1 else torch.stack(labels, 1)
    value = loss(features_of(model, *texts), given)
    expected = function(torch.cat(embedded(model, *texts)), torch.cat(labels))
    assert_same_step(value, expected, model)


def test_loss_is_averaged_over_columns(folder):
    model, teacher = both_of(folder)
    (labels,) = teacher_answers(teacher, TEXTS)
    value = losses.CosNCEDistillLoss(model)(features_of(model, TEXTS, OTHERS), labels)
    each = [cos_nce_loss(x, labels) for x in embedded(model, TEXTS, OTHERS)]
    torch.testing.assert_close(value, sum(each) / 2, **CLOSE)


@pytest.mark.filterwarnings("ignore:CCALoss")
def test_prefixes_and_truncated_embeddings_are_compared(folder):
    model, teacher = both_of(folder)
    (labels,) = teacher_answers(teacher, TEXTS)
    (student,) = embedded(model, TEXTS)
    for name, (cls, options, function) in LOSSES.items():
        loss = cls(model, dims=[16, 4], **options)
        shorter = student[:, :4]
        if name == "cos_nce":
            (projection,) = loss.projections.values()
            assert torch.equal(projection.weight, torch.eye(16, 4))
            shorter = projection(shorter)
        expected = (function(student, labels) + function(shorter, labels)) / 2
        found = loss(features_of(model, TEXTS), labels)
        torch.testing.assert_close(found, expected, **CLOSE)
        model.truncate_dim = 8  # compared after truncation
        found = cls(model, **options)(features_of(model, TEXTS), labels[:, :8])
        expected, model.truncate_dim = function(student[:, :8], labels[:, :8]), None
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:CCALoss")
def test_options_set_later_are_those_of_a_new_loss(folder):
    (model, _), student, teacher = both_of(folder), torch.randn(8, 4), torch.randn(8, 4)
    for cls, name, value in (
        (RelationDistillLoss, "distance", "mse"), (RelationDistillLoss, "normalize", "none"),
        (losses.CCADistillLoss, "ridge", 0.1), (losses.CCADistillLoss, "top_k", 2),
    ):  # fmt: skip
        late, new = cls(model), cls(model, **{name: value})
        setattr(late, name, value)
        assert torch.equal(*(x.loss_of_embeddings([student], teacher) for x in (late, new)))


def test_half_precision_rounds_neither_the_teacher_nor_a_projection(folder):
    model, _ = both_of(folder)
    student, teacher = torch.randn(8, 16).bfloat16(), torch.randn(8, 16)
    found = RelationDistillLoss(model).loss_of_embeddings([student], teacher)
    assert torch.equal(found, relation_loss(student.float(), teacher, over="samples"))
    assert not torch.equal(found, relation_loss(student, teacher.bfloat16(), over="samples"))
    loss, longer = losses.CosNCEDistillLoss(model, teacher_dim=32), torch.randn(8, 32)
    torch.nn.init.normal_(loss.projections["16"].weight)
    expected = loss.loss_of_embeddings([student.float()], longer)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss.loss_of_embeddings([student.float()], longer), expected)


def test_large_embeddings_without_a_loss_have_no_effect(folder):
    """Their sum is beyond float16."""
    model, teacher = both_of(folder)
    with torch.no_grad():
        model.half()[0].auto_model.encoder.layer[-1].output.LayerNorm.bias += 300.0
    layers = LayerDistillLoss(model, teacher, FCD(task_weight=0.0))
    value = layers(features_of(model, TEXTS))
    value.backward()
    assert value.isfinite()


@pytest.mark.parametrize("method", [FCD(task_weight=0.0), LRKD(alpha=None)], ids=["fcd", "lrkd"])
def test_layer_terms_equal_a_distillers(folder, method):
    model, teacher = both_of(folder)
    loss = LayerDistillLoss(model, teacher, copy.deepcopy(method))
    distiller = Distiller(copy.deepcopy(teacher[0].auto_model), model[0].auto_model, method)
    distiller.method.load_state_dict(loss.method.state_dict())
    value = loss(features_of(model, TEXTS, OTHERS), None)
    known = ("input_ids", "attention_mask", "token_type_ids")
    batches = [{n: x[n] for n in known if n in x} for x in features_of(model, TEXTS, OTHERS)]
    expected = sum(distiller(**batch).loss for batch in batches) / 2
    assert_same_step(value, expected, model)


@pytest.mark.parametrize("make", [
    RelationDistillLoss, lambda model: MatryoshkaLoss(model, MSELoss(model), [16, 8]),
])  # fmt: skip
def test_layers_and_embeddings_come_from_one_pass(folder, make):
    model, teacher = both_of(folder)
    labels = torch.stack(teacher_answers(teacher, TEXTS, OTHERS), 1)
    alone = make(model)(features_of(model, TEXTS, OTHERS), labels)
    layers = LayerDistillLoss(model, teacher, FCD(task_weight=0.0))
    expected = alone + layers(features_of(model, TEXTS, OTHERS))
    passes = []
    model[0].register_forward_hook(lambda *_: passes.append(1))
    both = LayerDistillLoss(model, teacher, FCD(task_weight=0.0), loss=make(model))
    found = both(features_of(model, TEXTS, OTHERS), labels)
    assert len(passes) == 2 and set(found) == {"embeddings", "layers"}
    assert_same_step(sum(found.values()), expected, model)


MAKERS = {
    "relations": lambda model, teacher: RelationDistillLoss(model, dims=[16, 8]),
    "projection": lambda model, teacher: losses.CosNCEDistillLoss(model, dims=[16, 8]),
    "cached": lambda model, teacher: RelationDistillLoss(model, mini_batch_size=3),
    "layers": lambda model, teacher: LayerDistillLoss(
        model, teacher, LRKD(alpha=None), loss=RelationDistillLoss(model)
    ),
}


def train(rank, folder, out, batch):
    """Three steps with SentenceTransformerTrainer: each student's weights, and its loss's own."""
    warnings.simplefilter("ignore")
    found = {}
    for name, make in MAKERS.items():
        model, teacher = both_of(folder)
        torch.manual_seed(rank)  # random numbers of a loss are equal in all processes nevertheless
        loss = make(model, teacher)
        for parameter in loss._own_parameters() if name == "layers" and rank else []:
            parameter.data += 1.0  # follows the first process
        rows = {"text": TEXTS[:12], "label": teacher_answers(teacher, TEXTS[:12])[0].tolist()}
        args = models.SentenceTransformerTrainingArguments(
            str(out), per_device_train_batch_size=batch, max_steps=3, learning_rate=1e-2,
            report_to="none", save_strategy="no", use_cpu=True, lr_scheduler_type="constant",
            disable_tqdm=True, optim="sgd", max_grad_norm=0.0,
        )  # fmt: skip
        InOrder(model, args, Dataset.from_dict(rows), loss=loss).train()
        own = loss._own_parameters()
        found[name] = [p.detach().clone() for p in (*model.parameters(), *own)]
    return found


class InOrder(SentenceTransformerTrainer):
    """Batches in the order of the rows, so that all processes' batches make up one process's."""

    def get_batch_sampler(self, dataset, batch_size, drop_last, **options):
        batches = [range(i, min(i + batch_size, len(dataset))) for i in range(0, 12, batch_size)]
        return [list(batch) for batch in batches]


@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_the_same_student_as_one(folder, tmp_path):
    """All losses run in one pair of processes, since starting processes is slow."""
    together = run_ranks(train, 2, tmp_path / "ranks", folder, tmp_path / "out", 3)
    alone = train(0, folder, tmp_path / "one", 6)
    before = [p.detach() for p in both_of(folder)[0].parameters()]
    for name in MAKERS:
        assert not all(map(torch.equal, alone[name], before))
        for first, second, wanted in zip(*(x[name] for x in (*together, alone)), strict=True):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_saved_model_gives_the_same_embeddings_without_fastkd(folder, tmp_path):
    model, teacher = both_of(folder)
    labels = torch.stack(teacher_answers(teacher, TEXTS, OTHERS), 1).tolist()
    rows = Dataset.from_dict({"a": TEXTS, "b": OTHERS, "label": labels})
    loss = LayerDistillLoss(model, teacher, FCD(task_weight=0.0), loss=RelationDistillLoss(model))
    args = models.SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model, args, rows, loss=loss)
    trainer.train()
    assert {"layers", "embeddings"} <= set().union(*trainer.state.log_history)
    model.save_pretrained(str(tmp_path / "student"))
    assert "Feature Correlation Distillation" in (tmp_path / "student/README.md").read_text()
    files = [*(tmp_path / "student").rglob("*.json"), *(tmp_path / "student").rglob("*.py")]
    assert files and not any("fastkd" in path.read_text() for path in files)
    saved = SentenceTransformer(str(tmp_path / "student"), device="cpu")
    found, expected = (torch.tensor(x.encode(TEXTS)) for x in (saved, model.eval()))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_invalid_calls_raise_one_sentence(folder):
    model, teacher = both_of(folder)
    features, fcd = features_of(model, TEXTS), FCD(task_weight=0.0)
    loss, wide = RelationDistillLoss(model), losses.CosNCEDistillLoss(model, teacher_dim=24)
    cached = RelationDistillLoss(model, mini_batch_size=4)
    layers, copies = (LayerDistillLoss(model, teacher, fcd) for _ in range(2))
    _, other = both_of(folder)
    other.tokenizer.add_tokens(["new"])
    copies.model = torch.nn.DataParallel(model)
    narrow = {"teacher_dim": 24, "mini_batch_size": 4}
    for words, call, given, options in (
        ("labels are missing; add a column", loss, [features, None], {}),
        (r"labels must be .*\(16, Dt\).*got shape \(15, 4\)", loss,
         [features, torch.randn(15, 4)], {}),
        ("dims must be at most 16", RelationDistillLoss, [model], {"dims": [32]}),
        ("dims must be different", RelationDistillLoss, [model], {"dims": []}),
        ("distance", RelationDistillLoss, [model], {"distance": "cosine"}),
        ("can't be combined with a projection", losses.CosNCEDistillLoss, [model], narrow),
        (r"length 24 \(teacher_dim\), got 16", wide, [features, torch.randn(16, 16)], {}),
        ("LRCBERT needs perturbed embeddings", LayerDistillLoss,
         [model, teacher, LRCBERT(perturb=True)], {}),
        ("gradient cache", LayerDistillLoss, [model, teacher, fcd], {"loss": cached}),
        ("loss: LayerDistillLoss runs the student on other inputs",
         LayerDistillLoss(model, teacher, fcd, loss=layers), [features], {}),
        ("DataParallel runs copies", copies, [features], {}),
        ("model must be a SentenceTransformer", LayerDistillLoss,
         [torch.nn.Sequential(torch.nn.Identity()), teacher, fcd], {}),
        ("different vocabularies", LayerDistillLoss, [model, other, fcd], {}),
    ):  # fmt: skip
        raises(words, call, *given, error=(ValueError, TypeError), **options)


def test_models_without_one_dense_vector_are_refused_by_name(folder):
    _, teacher = both_of(folder)
    for kind, has in (
        (models.MultiVectorEncoder, "one for each token"),
        (models.SparseEncoder, "a weight for each token of its vocabulary"),
        (models.CrossEncoder, r"a score for a pair of texts; use Distiller\(teacher.model, stu"),
    ):
        encoder = kind(str(folder))
        wrong = f"compares one vector a text, and {kind.__name__} has {has}"
        raises(f"model: CCADistillLoss {wrong}", losses.CCADistillLoss, encoder, error=TypeError)
        for name, both in (("model", (encoder, teacher)), ("teacher", (teacher, encoder))):
            words = f"{name}: LayerDistillLoss {wrong}"
            raises(words, LayerDistillLoss, *both, FCD(task_weight=0.0), error=TypeError)
