"""Tiny random models of every family that the tests cover, and batches for them."""

import itertools

import torch
import transformers as t
from torch import Tensor

from fastkd.distill import Distiller, DistillerOutput, Method, method_by_name, student_from_teacher
from fastkd.distill.baselines import BASELINES
from fastkd.distill.verify import gradients_of

VOCAB, PAD = 60, 0
SMALL = {"vocab_size": VOCAB, "pad_token_id": PAD}
BERT = {
    **SMALL, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip

CONFIGS = {
    "bert": lambda n: t.BertConfig(**BERT, num_hidden_layers=n),
    "roberta": lambda n: t.RobertaConfig(**BERT, num_hidden_layers=n),
    "distilbert": lambda n: t.DistilBertConfig(
        **SMALL, dim=16, n_heads=2, hidden_dim=32, n_layers=n, max_position_embeddings=64
    ),
    "electra": lambda n: t.ElectraConfig(**BERT, embedding_size=8, num_hidden_layers=n),
    "albert": lambda n: t.AlbertConfig(**BERT, embedding_size=8, num_hidden_layers=n),
    "deberta_v2": lambda n: t.DebertaV2Config(
        **BERT, num_hidden_layers=n, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8, conv_kernel_size=3, pooler_hidden_size=16,
    ),
    "xlnet": lambda n: t.XLNetConfig(
        **SMALL, d_model=16, n_head=2, d_inner=32, n_layer=n, summary_activation="tanh"
    ),
    "gpt2": lambda n: t.GPT2Config(**SMALL, n_embd=16, n_head=2, n_layer=n, n_positions=64),
    "llama": lambda n: t.LlamaConfig(
        **SMALL, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, num_hidden_layers=n, max_position_embeddings=64,
    ),
}  # fmt: skip
FAMILIES = list(CONFIGS)
PADS_LEFT = {"xlnet"}


def model(head: type, family: str, layers: int = 4, **options) -> t.PreTrainedModel:
    """A model of this class, or auto class, with random weights, in eval mode."""
    config = CONFIGS[family](layers)
    config.initializer_range = 0.2  # features and logits of a size that losses can tell apart
    for name, value in options.items():
        setattr(config, name, value)
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


def exact(name: str, kind: str = "classifier", dropout: float = 0.0, **gather) -> Distiller:
    """In float64, of a classifier or a language model, the same on every call."""
    torch.manual_seed(0)
    lm = kind == "language model"
    teacher = model(t.LlamaForCausalLM, "llama") if lm else classifier("bert")
    teacher = teacher.double()
    student = student_from_teacher(teacher, [1, 4])
    set_dropout(student, dropout)
    torch.manual_seed(1)
    options = {"alpha1": 0.1, "k": 2} if name == "knn" else {}
    return ready(teacher, student, name, **options, **gather)


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


def batch_for(family: str, **options) -> dict[str, Tensor]:
    return batch(left=family in PADS_LEFT, **options)
