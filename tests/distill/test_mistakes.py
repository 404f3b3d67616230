"""Models that don't fit a method or each other, and wrong batches: the sentence of each."""

import copy
import functools

import torch
import transformers as t
from torch import nn
from torch.nn import functional as F

from fastkd import distill
from fastkd.distill import FCD, LRKD, AttentionMSE, Distiller, IntraClassKNN, SoftTargets
from fastkd.distill.attention_relations import MiniLM, MiniLMv2
from fastkd.distill.baselines import GOLD, Embeddings
from tests.distill.models import batch, classifier, eager, exact, model, pair
from tests.distill.own_method import HiddenAndAttention
from tests.distill.support import data_of, model_of
from tests.distill.test_blocks import Patches, side
from tests.distill.test_distiller import decoders, documents, packed
from tests.distill.test_tokenizers import matched, read_in_characters, two_models
from tests.support.compare import raises


def wrong_models():
    """The words, teacher, student and method."""
    one, two, three = (classifier("bert", layers) for layers in (4, 2, 3))
    for method, hint in (
        ("fcd", r"got 'fcd'; .* fastkd.distill.method_by_name\('fcd'\)"),
        (FCD, r"got the class FCD; pass an instance, FCD\(\)"),
        (4, "got int"),
    ):
        yield rf"method must be a fastkd.distill method, {hint}", one, two, method
    yield "student must be a transformers model, got Linear", one, nn.Linear(2, 2), FCD()
    for both in ((one, one), (two, copy.copy(two))):
        yield "student: shares parameters with the teacher", *both, FCD()
    kinds = ("multi_label_classification", "regression")
    both = (classifier("bert", problem_type=kind) for kind in kinds)
    yield "problem_type is regression and the teacher's multi_lab", *both, SoftTargets()
    yield "student has 4 labels", one, classifier("bert", 2, num_labels=4), SoftTargets()
    turned = classifier("bert", 2, id2label={0: "LABEL_2", 1: "LABEL_1", 2: "LABEL_0"})
    yield r"classes are LABEL_2, LABEL_1, LABEL_0 .* one order", one, turned, SoftTargets()
    sizes = (model(t.GPT2LMHeadModel, "gpt2", 2, vocab_size=size) for size in (1100, 50))
    yield r"50 labels or vocabulary entries.* teacher 1100", *sizes, SoftTargets()
    yield "teacher has no head", one.bert, two, LRKD()
    bases = pair("bert", head=t.BertModel)
    yield r"SoftTargets has terms .*\(task, soft\).* no head", *bases, SoftTargets()
    yield "pass alpha=None", *bases, LRKD()
    reads, writes = (model(t.BertForMaskedLM, "bert"), model_of("t5", "written words"))
    yield r"student \(T5\w+\) is an encoder-decoder, the teacher", reads, writes, LRKD()
    yield r"teacher \(T5\w+\) is an encoder-decoder, the student", writes, reads, FCD()
    yield "have 8 dimensions", one, classifier("bert", 2, hidden_size=8), Embeddings(mse=1.0)
    yield "student has 3 layers but the teacher only 2", two, three, FCD()
    yield "layer=5: the teacher has 4 layers", one, two, MiniLM(layer=5)
    yield 'sdpa attention .*"eager"', one, *eager([classifier("bert", 2)]), HiddenAndAttention()
    yield "several teachers need one method each", [one, three], two, FCD()
    yield "got . teachers for 3", [one, three], two, distill.Several(FCD(), LRKD(), SoftTargets())
    teacher, student = side(4, 24), side(2)
    yield "compares attention maps", teacher, student, AttentionMSE()
    yield "has no head", teacher, distill.Blocks(Patches(2), "blocks", hidden_size=16), FCD()
    yield r"describe any other with fastkd.distill.Blocks", teacher, Patches(1), FCD()


def test_wrong_models_are_errors():
    for words, teacher, student, method in wrong_models():
        raises(words, Distiller, teacher, student, method, error=(ValueError, TypeError))
    few = Distiller(classifier("bert"), classifier("bert", 2, num_labels=4), FCD(soft_weight=0.0))
    assert few(**batch()).loss.isfinite()  # no logits are compared


class ReadsUndeclared(FCD):
    """Its soft term reads logits."""

    logit_terms = ("task",)


usual = functools.cache(pair)


def of(method, *models, **options):
    return Distiller(*(models or usual()), method, **options)


ALONE = {"alpha2": 0.0, "alpha3": 0.0}  # without logits


def wrong_rows():
    """The words, a distiller and a batch, of one prediction a row."""
    data, soft, fcd = batch(), of(SoftTargets()), of(FCD())
    inputs, labels = {n: x for n, x in data.items() if n != "labels"}, data["labels"]
    yield "takes no input 'lables'; did you mean 'labels'", fcd, {**inputs, "lables": labels}
    for label in (3, -1):
        wrong = labels.index_fill(0, torch.tensor([2]), label)
        words = f"labels: {label} is none of the 3 classes of the stud"
        yield words, soft, {**data, "labels": wrong}
    yield "task term needs labels in the batch", fcd, inputs
    yield r"labels have shape \(5,\)", fcd, {**inputs, "labels": labels[:5]}
    for name, x, words in (
        ("attention_mask", torch.ones(6, 9), r"must have the shape of input_ids, \(6, 10\)"),
        ("attention_mask", torch.ones(6, 1, 10, 10), "must have the shape of input_ids"),
        ("input_ids", [[1, 2]], "must be a Tensor, got list"),
        ("input_ids", torch.ones(6, 10), "must be integers"),
        ("input_ids", torch.ones(10).long(), r"must be \(B, N\)"),
        ("position_ids", torch.ones(6, 9).long(), "must have the shape"),
        ("token_type_ids", torch.ones(9).long(), "must have the shape"),
    ):
        yield f"{name} {words}", fcd, {**data, name: x}
    yield "all weights of FCD are zero", of(FCD(alpha=0.0, beta=0.0, task_weight=0.0)), data
    yield "gives one prediction a row", fcd, {**data, "loss_weights": torch.ones(6, 10)}
    yield r"segments must have the tokens' shape \(6, 10\)", fcd, {**data, "segments": labels}
    several = [classifier("bert", problem_type="multi_label_classification") for _ in range(2)]
    one = {**inputs, "labels": labels.float()}
    yield r"labels have shape \(6,\) but", of(SoftTargets(), *several), one
    numbers = of(SoftTargets(), *pair(num_labels=1))
    yield r"labels have shape \(1,\) but the stud", numbers, {**inputs, "labels": torch.zeros(1)}
    choices = of(IntraClassKNN(), *pair("bert", head=t.BertForMultipleChoice))
    questions = {"input_ids": torch.ones(3, 4, 7).long(), "labels": labels[:3]}
    yield "got 3 labels for 12 samples", choices, questions
    yield "takes start_positions and", of(FCD(), *pair(head=t.BertForQuestionAnswering)), data
    head = pair(head=t.BertForPreTraining)
    yield r"task term needs logits.*prediction_logits", of(FCD(), *head), inputs
    yield "soft term needs logits, but the student", of(SoftTargets(alpha=1.0), *head), inputs
    found = of(SoftTargets(alpha=1.0), *pair("electra", head=t.ElectraForPreTraining))
    yield r"soft term needs logits of 2 labels.* \(6, 10\)", found, data
    yield "must be passed, one per", of(IntraClassKNN(**ALONE), *pair(head=t.BertModel)), inputs
    cut = of(AttentionMSE(), *eager(pair()))
    cut.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    yield "use_reentrant=True cuts the gradient", cut, data
    heads = eager([classifier("bert"), classifier("bert", 2, num_attention_heads=4)])
    yield "compare their means with heads='mean'", of(AttentionMSE(), *heads), data
    heads = classifier("bert"), classifier("bert", 2, num_attention_heads=1)
    yield "use MiniLMv2", of(MiniLM(), *heads), data
    yield "relation_heads=5 doesn't divide", of(MiniLMv2(relation_heads=5), *pair()), data
    yield "AlbertFor.* doesn't show", of(MiniLM(), *pair("albert")), data
    teachers = distill.ByRow({"a": classifier("bert"), "b": classifier("bert")})
    by_row = of(SoftTargets(), teachers, classifier("bert", 2))
    for given, said in (
        ({}, "teacher_id: missing; pass each row's teacher: a, b"),
        ({"teacher_id": ["a", "c"] * 3}, "'c' is none of the teachers; pass a, b, or numbers"),
        ({"teacher_id": labels.new_tensor([0, 2, 1, 0, 1, 0])}, "2 is none of the teachers"),
        ({"teacher_id": ["a", "b"]}, "names 2 rows, but labels has shape"),
    ):
        yield said, by_row, {**data, **given}


def wrong_tokens():
    """The same of one prediction a token, and of packed rows."""
    data = batch()
    yield r"call distiller.prepare\(batches\)", of(distill.method_by_name("mc3kd")), data
    words = {**data, "labels": data["input_ids"]}
    masked = of(SoftTargets(), *pair(head=t.BertForMaskedLM))
    for change, said in (
        (torch.ones(6, 7), "loss_weights must have shape"),
        (torch.ones(6, 10).long(), "loss_weights must be bfloat16"),
        (torch.ones(6, 10, requires_grad=True), "loss_weights requires grad"),
    ):
        yield said, masked, {**words, "loss_weights": change}
    yield "one per sample", of(IntraClassKNN(), *pair("gpt2", head=t.GPT2LMHeadModel)), words
    rows = packed(documents(), labels=False)
    apart = of(IntraClassKNN(**ALONE), *decoders(t.LlamaModel))
    yield "got 4 labels for 5 samples", apart, {**rows, "labels": torch.zeros(4).long()}
    whole = of(SoftTargets(), *pair("llama"))  # with one prediction per row
    yield "rows are packed with several documents", whole, {**rows, "labels": torch.zeros(1).long()}
    writes, written = model_of("t5", "written words"), data_of("t5", "written words")
    writes = of(SoftTargets(), writes, distill.student_from_teacher(writes, (1, 3)))
    lacking = {name: x for name, x in written.items() if name != "labels"}
    yield r"student \(T5For\w+\) is an encoder-decoder; pass labels", writes, lacking
    yield "a decoder's row is one", writes, {**written, "segments": written["labels"]}
    llama = model_of("llama", "next word")
    undeclared = of(ReadsUndeclared(), llama, distill.student_from_teacher(llama, [1, 3]))
    yield "the teacher's logits, .* add it to", undeclared, data_of("llama", "next word")


def wrong_inputs():
    """The same of models that aren't from transformers, and of two tokenizers."""
    blocks = distill.Blocks(Patches(2), "blocks", hidden_size=16, output_size=3)
    perturbs = of(distill.method_by_name("lrc_bert", preset="paper"), side(4, 24), blocks)
    said = r"pass embeddings=..., or set the method's perturb=False"
    yield said, perturbs, {"image": torch.randn(6, 3, 12, 12), "labels": torch.arange(6) % 3}
    compiled = torch.compile(pair("distilbert", [4])[1], backend="eager")
    perturbs = of(distill.LRCBERT(perturb=True), classifier("distilbert"), compiled)
    yield "a compiled student doesn't allow; ", perturbs, batch()
    *two, own = read_in_characters()
    spans = of(FCD(), *two)
    one = {n: x for n, x in own.items() if n != "student_spans"}
    yield "student_spans, teacher_spans: one is missing", spans, one
    yield r"spans have shape \(3, ", spans, {**own, "student_spans": own["student_spans"][:3]}
    maps = of(AttentionMSE(heads="mean"), *eager(read_in_characters()[:2]))
    yield "compares attention", maps, own
    for name, which in (("input_ids", "student"), ("teacher_input_ids", "teacher")):
        beyond = own[name].clone()
        beyond[1, 2] = 60
        said = rf"{name}: the id 60 is not one of the 60 tokens of the {which} \(\w+\); pass"
        yield said, spans, {**own, name: beyond}
    texts = {name: own[name] for name in ("input_ids", "teacher_input_ids")}
    llamas = (model(t.LlamaForCausalLM, "llama") for _ in range(2))
    yield "predictions for each token", of(SoftTargets(), *llamas), texts
    ids, numbers = torch.arange(27).view(3, 9) + 5, torch.arange(9).expand(3, 9)
    own = {
        "input_ids": ids, "labels": ids, "teacher_input_ids": F.pad(ids, (2, 0), value=5),
        "student_spans": numbers, "teacher_spans": F.pad(numbers, (2, 0), value=-1),
    }  # fmt: skip
    several, others = numbers.clamp(max=0), own["teacher_input_ids"].flip(1)
    for change, said in (
        ({"labels": None}, "labels: SoftTargets compares the predictions"),
        ({"student_spans": several}, "span 0 of row 0 has several tokens"),
        ({"teacher_input_ids": others}, r"token \d of row 0 has the id .* pair equal tokens"),
        (dict.fromkeys(("student_spans", "teacher_spans")), "pair equal tokens by student_spans"),
    ):
        given = {name: x for name, x in {**own, **change}.items() if x is not None}
        yield said, exact("soft_targets", "language model"), given
    teacher, student, match = two_models()
    soft, rows = of(SoftTargets(), teacher, student, tokenizers=match), matched()
    rows = {name: rows[name] for name in ("input_ids", "labels")}
    yield "teacher_spans: the teacher has another vocabulary", soft, rows
    kept = of(GOLD(), teacher, student, tokenizers=match, keep_logits=True)
    yield "GOLD compares spans of two tokenizers", kept, matched()


def test_wrong_batches_are_errors():
    for words, distiller, data in (*wrong_rows(), *wrong_tokens(), *wrong_inputs()):
        raises(words, distiller, error=(ValueError, TypeError, RuntimeError), **data)
    distiller = Distiller(*pair(), FCD())
    raises("positional", distiller, batch()["input_ids"], error=TypeError)
    distiller.teacher.peft_config = {}
    raises("merge_and_unload", distill.student_from_teacher, distiller.teacher, [1])
