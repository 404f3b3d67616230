"""One training step of a shorter student, by each method, against cross-entropy alone.

The reference step runs the teacher too and trains on the labels; what a method costs beyond it is
the method's overhead. Forward, backward and the optimizer's update count.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core.extras import how_to_get

from .harness import REFERENCE, Bound, Case, Provider

LOSS = "step"


class StepBound(Bound):
    """``forward`` is the distiller's; ``backward`` includes the optimizer's update."""

    def __init__(self, distiller: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype) -> None:
        device = batch["input_ids"].device
        trained = [p for p in distiller.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, foreach=True)

        def forward() -> Tensor:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                return distiller(**batch).loss

        super().__init__(forward, [])
        self.optimizer = optimizer

    def backward(self, loss: Tensor) -> tuple[Tensor, ...]:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return ()


def make(*, B, N, D, teacher_layers, student_layers, device, dtype) -> dict[str, Any]:
    """A BERT classifier as teacher, and a batch a quarter of which is padding."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=D,
        num_hidden_layers=teacher_layers,
        num_attention_heads=max(1, D // 64),
        intermediate_size=4 * D,
    )
    lengths = torch.linspace(N // 2, N, B).long()
    mask = (torch.arange(N) < lengths[:, None]).long()
    batch = {
        "input_ids": torch.randint(1, config.vocab_size, (B, N)),
        "attention_mask": mask,
        "labels": torch.arange(B) % 2,
    }
    return {
        "teacher": BertForSequenceClassification(config).to(device),
        "batch": {name: value.to(device) for name, value in batch.items()},
        "student_layers": student_layers,
        "dtype": dtype,
    }


def method_step(method: Callable[..., Any], stage: float = 0.0) -> Callable[[dict], Bound]:
    """Bind a step of ``method`` at ``stage`` (0 to 1) of the training."""

    def bind(inputs: dict[str, Any]) -> Bound:
        from fastkd.distill import Distiller, layer_map, student_from_teacher

        teacher = inputs["teacher"]
        layers = layer_map("uniform", teacher.config.num_hidden_layers, inputs["student_layers"])
        distiller = Distiller(teacher, student_from_teacher(teacher, layers), method(layers))
        distiller.set_progress(stage)
        return StepBound(distiller.train(), inputs["batch"], inputs["dtype"])

    return bind


def why_not(device: torch.device) -> str | None:
    """Models come from transformers."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        return f"transformers is not installed; {how_to_get('train')}"
    return None


def providers() -> tuple[Provider, ...]:
    """Cross-entropy alone, then every method with its paper's settings."""

    def lazily(name: str, **options: Any) -> Callable[..., Any]:
        def build(layers: list[int]) -> Any:
            from fastkd.distill import methods

            chosen = {**options, "layers": layers} if name == "MC3KD" else options
            kind = getattr(methods, name)
            return kind(**{**kind.paper, **chosen})

        return build

    # Only its task term has a weight: no layer is compared.
    plain = lazily("FCD", alpha=0.0, beta=0.0)
    named = [
        (REFERENCE, method_step(plain)),
        ("SoftTargets", method_step(lazily("SoftTargets"))),
        ("FCD", method_step(lazily("FCD"))),
        ("IntraClassKNN", method_step(lazily("IntraClassKNN"))),
        ("LRCBERT, first stage", method_step(lazily("LRCBERT"), 0.5)),
        ("LRCBERT, second stage", method_step(lazily("LRCBERT"), 0.9)),
        ("LRCBERT, not perturbed", method_step(lazily("LRCBERT", perturb=False), 0.9)),
        ("MC3KD", method_step(lazily("MC3KD"))),
        ("LRKD", method_step(lazily("LRKD"))),
    ]
    return tuple(Provider(name, bind, why_not, own_objective=True) for name, bind in named)


def case(set: str, dtype: torch.dtype, **sizes: int) -> Case:
    """Sizes B, N, D, teacher_layers, student_layers; the products of the blocks are the floor."""
    tokens = sizes["B"] * sizes["N"]
    block = 12 * sizes["D"] ** 2
    return Case(
        loss=LOSS,
        title="training step",
        set=set,
        sizes=sizes,
        dtype=dtype,
        make=make,
        providers=providers(),
        bytes_moved=0,
        operations=2 * tokens * block * (sizes["teacher_layers"] + 3 * sizes["student_layers"]),
        headline=True,
    )


def cases() -> Iterator[Case]:
    yield case("cpu", torch.float32, B=8, N=64, D=256, teacher_layers=4, student_layers=2)
    yield case("step", torch.bfloat16, B=32, N=128, D=768, teacher_layers=12, student_layers=6)
