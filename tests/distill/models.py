"""Tiny random models of every family that the tests cover, and batches for them."""

import itertools

import torch
import transformers as t
from torch import Tensor

from fastkd.distill import Distiller, DistillerOutput, Method, method_by_name, student_from_teacher
from fastkd.distill.baselines import BASELINES
from fastkd.distill.verify import gradients_of
from fastkd.models.batch import rotate

VOCAB, PAD = 60, 0
SMALL = {"vocab_size": VOCAB, "pad_token_id": PAD}
BERT = {
    **SMALL, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
# Options of each family beside BERT's; None: it has no such size, or by another name.
NAMED = {"intermediate_size": None}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
GROUPED, HEADS = {"num_key_value_heads": 1}, {"head_dim": 8}
IMAGE = {
    "image_size": 16, "patch_size": 8,
    **dict.fromkeys(("vocab_size", "pad_token_id", "max_position_embeddings")),
}  # fmt: skip
TWO = {  # an encoder and a decoder
    **NAMED, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": None,
}  # fmt: skip
FAMILIES = {
    "bert": {}, "roberta": {}, "mpnet": {}, "gpt_neox": {}, "gpt2": NAMED,
    "distilbert": {**NAMED, "hidden_dim": 32},
    "electra": {"embedding_size": 8}, "albert": {"embedding_size": 8},
    "deberta_v2": {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8,
        "conv_kernel_size": 3,
    },
    "xlnet": {
        **dict.fromkeys(BERT.keys() - SMALL.keys()), "d_model": 16, "n_head": 2, "d_inner": 32,
        "summary_activation": "tanh",
    },
    "squeezebert": {
        "embedding_size": 16,
        **dict.fromkeys(
            (f"{x}_groups" for x in ("q", "k", "v", "post_attention", "intermediate", "output")), 1
        ),
    },
    "mobilebert": {
        "hidden_size": 32, "embedding_size": 16, "intra_bottleneck_size": 16,
        "num_feedforward_networks": 1,
    },
    "modernbert": {**ENDS, "cls_token_id": 1, "sep_token_id": 2},
    "longformer": {"attention_window": [4, 4, 6], "sep_token_id": 2},
    "opt": {**NAMED, "ffn_dim": 32},
    "opt, narrow embeddings": {
        **NAMED, "ffn_dim": 32, "word_embed_proj_dim": 8, "do_layer_norm_before": False,
    },
    "bloom": {**NAMED, "max_position_embeddings": None},
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), GROUPED),
    **dict.fromkeys(("qwen3", "gemma", "gemma2"), GROUPED | HEADS),
    "t5": {
        **NAMED, "d_kv": 8, "d_ff": 32, "num_decoder_layers": 3, "decoder_start_token_id": 0,
        "max_position_embeddings": None,
    },
    "bart": TWO,
    "prophetnet": {
        **NAMED, **ENDS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_hidden_layers": None,
        "num_encoder_layers": 3, "num_decoder_layers": 3, "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2, "decoder_start_token_id": 0, "ngram": 2,
        "max_position_embeddings": 16,
    },
    "whisper": {
        **TWO, **ENDS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16,
        "decoder_start_token_id": 3, "begin_suppress_tokens": [],
    },
    **dict.fromkeys(("vit", "deit", "dinov2"), IMAGE),
}  # fmt: skip
PADS_LEFT = {"xlnet"}


def config_of(family: str, layers: int = 3, **options) -> t.PreTrainedConfig:
    """A configuration of random weights that losses can tell apart."""
    given = {**BERT, "num_hidden_layers": layers, **FAMILIES.get(family, {}), **options}
    kind = family.partition(",")[0].replace("_v2", "-v2")
    config = t.AutoConfig.for_model(kind, **{n: x for n, x in given.items() if x is not None})
    for name in ("initializer_range", "init_std"):
        if hasattr(config, name) and name not in options:
            setattr(config, name, 0.2)
    return config


def model(head: type, family: str, layers: int = 4, **options) -> t.PreTrainedModel:
    """A model of this class, or auto class, with random weights, in eval mode."""
    config = config_of(family, layers, **options)
    return getattr(head, "from_config", head)(config).eval()


def classifier(family: str, layers: int = 4, num_labels: int = 3, **options) -> t.PreTrainedModel:
    head = t.AutoModelForSequenceClassification
    return model(head, family, layers, num_labels=num_labels, **options)


def pair(
    family: str = "bert", layers=(2, 4), head: type | None = None, **options
) -> tuple[t.PreTrainedModel, ...]:
    """A teacher of four layers, a classifier by default, and the student that has some of them."""
    teacher = model(head, family, **options) if head else classifier(family, **options)
    return teacher, student_from_teacher(teacher, layers)


def eager(models):
    """The models with eager attention, which returns attention maps."""
    for model in models:
        model.set_attn_implementation("eager")
    return models


def set_dropout(model: torch.nn.Module, p: float = 0.0) -> None:
    """Also dropout that a module applies itself."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(module, name, p)


def with_noise(model: torch.nn.Module, size: float) -> torch.nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn_like(p)
    return model


def step(distiller: Distiller, data: dict) -> tuple[DistillerOutput, dict[str, Tensor]]:
    distiller.zero_grad()
    out = distiller(**data)
    out.loss.backward()
    return out, gradients_of(distiller)


def recipe(name: str, **options) -> Method:
    """A method with its paper's values and layers that need no choice from data."""
    if name in BASELINES:
        return BASELINES[name](**options)
    if name == "mc3kd":
        options.setdefault("layers", "uniform")
    return method_by_name(name, preset="paper", **options)


def ready(teacher, student, name: str, gather: bool = False, **options) -> Distiller:
    """A distiller with all terms of a recipe."""
    distiller = Distiller(teacher, student, recipe(name, **options), gather=gather)
    distiller.set_progress(1.0)
    return distiller


def exact(name: str, kind: str = "classifier", dropout: float = 0.0, **others) -> Distiller:
    """In float64, of a classifier or a language model, the same on every call."""
    torch.manual_seed(0)
    lm = kind == "language model"
    teacher = (model(t.LlamaForCausalLM, "llama") if lm else classifier("bert")).double()
    student = student_from_teacher(teacher, [1, 4])
    set_dropout(student, dropout)
    torch.manual_seed(1)
    options = {"alpha1": 0.1, "k": 2} if name == "knn" else {}
    return ready(teacher, student, name, **{**options, **others})


def cut(data: dict[str, Tensor], *ends: int) -> list[dict[str, Tensor]]:
    """Parts of the batch between these rows, each as long as its longest row."""
    parts = []
    for start, stop in itertools.pairwise(ends):
        rows = {name: value[start:stop] for name, value in data.items()}
        length = int(rows["attention_mask"].sum(1).max()) if stop > start else 1
        parts.append({name: x if x.dim() == 1 else x[:, :length] for name, x in rows.items()})
    return parts


def batch(
    rows: int = 6, length: int = 10, padding: int = 3, num_labels: int = 3, left: bool = False
) -> dict[str, Tensor]:
    """Token ids with padding on half of the rows, its mask, and labels."""
    ids = torch.randint(5, VOCAB, (rows, length))
    mask = torch.ones_like(ids)
    padded = slice(0, padding) if left else slice(length - padding, length)
    if padding:
        mask[::2, padded] = 0
    labels = torch.rand(rows) * 5 if num_labels == 1 else torch.randint(0, num_labels, (rows,))
    return {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask, "labels": labels}


def split(data: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The rows of a batch."""
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def padded_left(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its padding before the tokens."""
    mask = data["attention_mask"]
    lengths = mask.sum(1, keepdim=True)
    return {n: rotate(x, lengths, 1) if x.shape == mask.shape else x for n, x in data.items()}
