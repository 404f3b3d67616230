"""`Head.of` for models of transformers: the head's logits equal the model's."""

import copy
import tempfile

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

from fastkd import Head
from fastkd.distill import Distiller, SoftTargets, TeacherCache
from fastkd.lm.heads import output_layer
from fastkd.lm.soft_targets import linear_soft_target_loss, soft_target_loss
from tests.distill.processes import run_ranks
from tests.support.compare import raises, relative_error

SMALL = dict(
    vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
)
GQA = SMALL | dict(num_key_value_heads=2, head_dim=8)

# Other models are among the random steps of a Distiller.
MODELS = {
    "llama": GQA,
    "llama, tied": GQA | {"tie_word_embeddings": True},
    "nanochat": GQA | {"final_logit_softcapping": 0.5},
    "recurrent_gemma": SMALL | {"logits_soft_cap": 0.3, "lru_width": 16},
    "granite": GQA | {"logits_scaling": 3.0},
    "hyperclovax": GQA | {"logits_scaling": 3.0},
    "cohere": GQA | {"logit_scale": 0.25},
    "phi": SMALL,  # with a bias
    "distilbert": dict(vocab_size=60, dim=16, n_layers=1, n_heads=2, hidden_dim=24),
    "electra": SMALL | {"embedding_size": 8},
}


def model_of(name):
    config = transformers.AutoConfig.for_model(name.split(",")[0], **MODELS[name])
    for token in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        if (getattr(config, token, None) or 0) >= 60:
            setattr(config, token, 0)
    kind = "MaskedLM" if "bert" in name or name == "electra" else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    with torch.no_grad():  # a bias of zeros would test nothing
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def checked(model):
    """The head, which reproduces the model's logits, its states, and the logits."""
    seen = []
    hook = output_layer(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.config.use_cache = False
    logits, head = model(torch.randint(60, (2, 7))).logits, Head.of(model)
    hook.remove()
    assert relative_error(head.logits(seen[0]), logits) < 1e-5
    return head, seen[0], logits


@pytest.mark.parametrize("name", MODELS)
def test_head_reproduces_the_models_logits(name):
    model = model_of(name)
    head, *_ = checked(model)
    assert head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def lora(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, **({"target_modules": ["lm_head"]} | options))
    model = peft.get_peft_model(model_of("llama"), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    return model


def test_lora_on_the_head_stays_a_separate_product():
    model = lora()
    model.add_adapter("inactive", model.peft_config["default"])
    head, states, logits = checked(model)
    assert len(head.low_rank) == 1
    teacher = torch.randn(2, 7, 5), torch.randn(60, 5)
    loss = linear_soft_target_loss(states, head, *teacher)
    wanted = soft_target_loss(logits, teacher[0] @ teacher[1].T)
    learning = [p for p in model.parameters() if p.requires_grad]
    assert len(learning) == 2
    torch.testing.assert_close(loss, wanted)
    found = torch.autograd.grad(loss, learning, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, learning))
    with torch.no_grad():  # a teacher's adapters do not learn
        itself = linear_soft_target_loss(states, head, states, head.detach())
    assert itself.abs() < 1e-6
    raises("teacher_head requires grad", linear_soft_target_loss, *[states.detach(), head] * 2)
    model = lora(lora_dropout=0.5).train()
    assert Head.of(model).subset(torch.arange(3)).detach().low_rank[0].dropout is not None
    assert Head.of(model.eval()).low_rank[0].dropout is None


def test_adapters_without_a_separate_product():
    """Switched off, merged, and a head in PEFT's `modules_to_save`."""
    off, merged = lora(), lora()
    merged.merge_adapter()
    unused, second = (lora(target_modules=["q_proj"], modules_to_save=["lm_head"]) for _ in "ab")
    second.add_adapter("second", second.peft_config["default"])
    second.set_adapter("second")
    for model in (off, unused, merged, second):
        with off.disable_adapter(), unused.disable_adapter():
            head, *_ = checked(model)
        assert not head.low_rank
    assert head.weight.requires_grad


class FakeQuantised(nn.Linear):
    """A layer of quantisation-aware training, as torchao's and ModelOpt's."""

    def forward(self, x):
        return nn.functional.linear(x, (self.weight * 64).round() / 64)


def with_packed_head():
    """A model with a quantised head."""
    model = model_of("llama")
    weight = model.lm_head.weight.detach()
    model.lm_head = nn.Identity()
    model.lm_head.weight = nn.Parameter((weight * 100).to(torch.int8), requires_grad=False)
    return model, weight


def partitioned(layer):
    """As DeepSpeed's ZeRO-3 leaves a weight: empty, but while its layer runs."""
    weight = layer.weight
    weight.ds_shape, whole = weight.shape, weight.data
    weight.data = whole.new_empty(0)
    layer.register_forward_pre_hook(lambda *_: setattr(weight, "data", whole))
    layer.register_forward_hook(lambda *_: setattr(weight, "data", whole.new_empty(0)))


def test_models_without_a_plain_head_are_refused():
    fake = model_of("llama")
    fake.lm_head = FakeQuantised(16, 60)
    mobile = transformers.MobileBertConfig(**(SMALL | dict(embedding_size=8)))
    for words, model in (
        (r"Identity has a weight of torch.int8.*skip_modules", with_packed_head()[0]),
        ("FakeQuantised multiplies by more", fake),
        ("not plain LoRA; merge it", lora(use_dora=True)),
        ("must be a transformers language model, got Linear", nn.Linear(2, 3)),
        ("BertModel has no LM head", transformers.BertModel(transformers.BertConfig(**SMALL))),
        ("MobileBertForMaskedLM multiplies by more", transformers.MobileBertForMaskedLM(mobile)),
    ):
        raises(words, Head.of, model, error=(TypeError, ValueError))


def test_quantised_and_compiled_models_have_a_head():
    model = model_of("llama")
    assert Head.of(torch.compile(model, backend="eager")).weight is model.lm_head.weight
    model, weight = with_packed_head()
    model.lm_head.dequantize = lambda: model.lm_head.weight.float() / 100
    assert (Head.of(model).weight - weight).abs().max() <= 0.01


def test_partitioned_heads_are_refused(tmp_path):
    teacher, student = model_of("llama"), model_of("llama")
    batch = {"input_ids": torch.randint(60, (2, 5))}
    whole = Distiller(copy.deepcopy(teacher), student, SoftTargets(alpha=1.0))(**batch).loss
    partitioned(teacher.lm_head)
    raises("head is partitioned by DeepSpeed's ZeRO-3", Head.of, teacher)
    distiller = Distiller(teacher, student, SoftTargets(alpha=1.0))
    torch.testing.assert_close(distiller(**batch).loss, whole)
    raises("ZeRO-3 has partitioned its weights", distiller.cache_teacher, [batch], tmp_path)


def sharded_heads(rank):
    from torch.distributed.device_mesh import init_device_mesh

    a_vocabulary_parallel_head(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    a_sharded_language_model(rank, init_device_mesh("cpu", (2,)))


def a_vocabulary_parallel_head(mesh):
    """Gathered as any other; all processes have the same states."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, states, found = model_of("phi"), torch.randn(3, 16), []  # with a bias
    whole = copy.deepcopy(model)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    assert model.lm_head.weight.to_local().shape == (30, 16)
    teacher = torch.randn(3, 4), torch.randn(60, 4)
    for each in (whole, model):
        hidden = states.clone().requires_grad_()
        value = linear_soft_target_loss(hidden, Head.of(each), *teacher)
        value.backward()
        grads = hidden.grad, each.lm_head.weight.grad, each.lm_head.bias.grad
        found.append((value, *(getattr(x, "full_tensor", x.clone)() for x in grads)))
    torch.testing.assert_close(*found)


def a_sharded_language_model(rank, mesh):
    """No process computes full logits, and gradients are those of the whole head, averaged."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = [model_of("llama, tied") for _ in range(2)]
    parts = copy.deepcopy(whole)
    for model in parts:
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    rows = torch.randint(60, (2, 1, 5))
    batches = [{"input_ids": ids, "labels": ids} for ids in rows]
    wanted = [Distiller(*whole, SoftTargets())(**batch) for batch in batches]
    out = Distiller(*parts, SoftTargets())(**batches[rank])
    assert out.logits is None
    words = "weight must be whole in this process, got a DTensor"
    raises(words, Head, parts[1].lm_head.weight, error=TypeError)
    # A cache reads the whole teacher again.
    path = tempfile.mkdtemp()
    Distiller(parts[0], whole[1], SoftTargets()).cache_teacher([batches[rank]], path)
    cached = Distiller(TeacherCache(path, teacher=whole[0]), whole[1], SoftTargets())
    for found in (out, cached(**batches[rank])):
        torch.testing.assert_close(found.terms, wanted[rank].terms)
    out.loss.backward()
    (sum(x.loss for x in wanted) / 2).backward()
    for x, y in zip(parts[1].parameters(), whole[1].parameters(), strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)


def test_sharded_heads_are_gathered(tmp_path):
    run_ranks(sharded_heads, 2, tmp_path)


def test_head_with_scale_and_softcap():
    muse = pytest.importorskip("transformers.models.muse_glimmer")
    small = GQA | {"output_multiplier": 0.3, "final_logit_softcapping": 0.5, "pad_token_id": 0}
    sees = {name: x for name, x in SMALL.items() if name != "vocab_size"}
    config = muse.MuseGlimmerConfig(text_config=small, vision_config=sees)
    head, *_ = checked(muse.MuseGlimmerForConditionalGeneration(config).eval())
    assert (head.scale, head.softcap) == (0.3, 0.5)
