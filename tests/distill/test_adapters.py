"""A student with LoRA adapters, and its own base as the teacher."""

import copy

import pytest
import torch
import transformers as t

from fastkd.distill import FCD, LRKD, MC3KD, Distiller, Several, SoftTargets
from tests.distill.models import batch, classifier, gradients_of, model, step
from tests.distill.support import data_of
from tests.support.compare import raises

peft = pytest.importorskip("peft")
KINDS = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
LORA = {"r": 4, "target_modules": ["query", "value"], "lora_dropout": 0.5}


def adapted(base, task="SEQ_CLS", **options):
    student = peft.get_peft_model(base, peft.LoraConfig(task_type=task, **{**LORA, **options}))
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return student


def test_token_types_that_pefts_wrapper_drops_are_refused():
    """Without a task type PEFT passes them on: test_by_hand.py."""
    base, data = model(t.BertForQuestionAnswering, "bert"), data_of("bert", "answers")
    distiller = Distiller(base, adapted(base, "QUESTION_ANS"), SoftTargets())
    types, words = torch.ones_like(data["input_ids"]), "answering drops token_type_ids; make"
    raises(words, distiller, **data, token_type_ids=types)


# Options of PEFT's kinds that add tokens to the rows, or keys and values to the blocks.
ADD_TOKENS = {
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1] * 3, "cpt_tokens_type_mask": [1, 2, 3]},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2},
}
IN_BLOCKS = ("PREFIX_TUNING", "CARTRIDGE", "ADAPTION_PROMPT")


def test_every_kind_that_adds_tokens_is_in_the_table():
    prompts = {x for x, config in KINDS.items() if issubclass(config, peft.PromptLearningConfig)}
    assert {kind.value for kind in prompts} | {"ADAPTION_PROMPT"} == {*ADD_TOKENS}


@pytest.mark.parametrize("kind", ADD_TOKENS)
def test_virtual_tokens_are_right_or_refused(kind):
    config = KINDS[peft.PeftType(kind)](task_type="CAUSAL_LM", **ADD_TOKENS[kind])
    teacher, base = (model(t.LlamaForCausalLM, "llama", layers=2) for _ in range(2))
    student = peft.get_peft_model(base, config)
    data = {name: x for name, x in batch(rows=4).items() if name != "labels"}
    labels = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    if kind not in IN_BLOCKS:
        words = f"PEFT's {kind} puts 3 virtual tokens"
        for sides in ((teacher, student), (student, base)):
            raises(words, Distiller, *sides, SoftTargets())
        return
    distiller = Distiller(teacher, student, FCD(soft_weight=1.0), keep_logits=True).eval()
    out, _ = step(distiller, {**data, "labels": labels})
    real = data["attention_mask"].bool()
    with torch.no_grad():
        expected = student(**data).logits
    torch.testing.assert_close(out.logits[real], expected[real])
    assert any(bool(x.abs().sum() > 0) for x in gradients_of(student).values())


def test_parameters_and_state_belong_to_the_student():
    base = classifier("bert")
    student = adapted(base)
    next(p for n, p in student.named_parameters() if "lora_A" in n).requires_grad_(False)
    base.bert.encoder.layer[0].requires_grad_(False)  # adapters of a layer that stays as it is
    before = {n: p.requires_grad for n, p in student.named_parameters()}
    distiller = Distiller(base, student, FCD())
    distiller(**batch())
    assert all(module.training for module in (student, *base.modules()))
    with base.register_forward_pre_hook(lambda x, _: 1 / x.training):  # in eval mode
        raises("zero", distiller, error=ZeroDivisionError, **batch())
    assert {n: p.requires_grad for n, p in student.named_parameters()} == before
    assert all(name.startswith(("student.", "method.")) for name, _ in distiller.named_parameters())
    distiller.load_state_dict(distiller.state_dict())
    raises("teacher is the student's base", distiller.cache_teacher, [batch()], "unused")
    words = r"shares parameters.*pass the base of a PEFT student"
    raises(words, Distiller, student, student, FCD())


def test_no_logits_of_all_tokens_are_computed():
    base, rows = model(t.LlamaForCausalLM, "llama"), []
    base.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    student = adapted(base, None, target_modules=["q_proj"])
    Distiller(base, student, SoftTargets())(**data_of("llama", "next word"))
    assert rows == [1, 1]


def test_layers_are_chosen_from_the_base():
    base, copied = classifier("bert"), classifier("bert")
    student = adapted(base)
    both = Distiller([base, copied], student, Several(MC3KD(), LRKD(alpha=None)))
    both.prepare([batch()])
    assert both.method.prepared and both(**batch()).loss.isfinite()


def test_a_trainable_base_is_an_error():
    for options in ({}, {"bias": "all"}):
        base = classifier("bert")
        student = adapted(base, **options)
        base.bert.embeddings.word_embeddings.weight.requires_grad_(not options)
        raises("trains parameters of its base", Distiller, base, student, SoftTargets())
        Distiller(classifier("bert"), student, SoftTargets())


def test_a_student_with_nothing_to_train_is_an_error(tmp_path):
    base, data = classifier("bert"), batch()
    adapted(base).save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(classifier("bert"), tmp_path)  # is_trainable=False
    Distiller(base, classifier("bert"), SoftTargets())
    for student in (loaded, copy.deepcopy(base)):  # which the Distiller froze
        distiller = Distiller(classifier("bert"), student, SoftTargets())
        words = r"student: none of its parameters .*requires_grad_\(True\).*is_trainable=True"
        raises(words, distiller, **data)
        raises(words, next, distiller.accumulate([data]))
        assert distiller.eval()(**data).loss.isfinite()
