"""Whole training steps, by each method, against the same step without its terms.

An encoder's reference step runs the teacher and trains on the labels; forward, backward and the
optimizer's update count. A decoder's reference step runs both bodies and no vocabulary head: its
peak memory is what the models need without a loss.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core.extras import how_to_get

from .case import REFERENCE, Bound, Case, GraphBound, Provider, no_graphs

LOSS = "step"
GRAPH = ", CUDA graph"


class StepBound(Bound):
    """One step: the distiller's loss, its backward pass and, with an optimizer, the update."""

    def __init__(
        self, distiller: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype, update: bool
    ) -> None:
        device = batch["input_ids"].device
        trained = [p for p in distiller.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, foreach=True)
        self.update = update

        def forward() -> Tensor:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                return distiller(**batch).loss

        super().__init__(forward, [])

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = self.forward()
        loss.backward()
        if self.update:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), ()


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


def method_step(
    name: str, stage: float, captured: bool = False, **options: Any
) -> Callable[[dict], Bound]:
    """Bind a step of a method with its paper's settings, at ``stage`` (0 to 1) of the training.

    ``captured``: forward, backward and update are one CUDA graph.
    """

    def bind(inputs: dict[str, Any]) -> Bound:
        from fastkd.distill import Distiller, layer_map, methods, student_from_teacher

        teacher = inputs["teacher"]
        layers = layer_map("uniform", teacher.config.num_hidden_layers, inputs["student_layers"])
        kind = getattr(methods, name)
        chosen = {**options, "layers": layers} if name == "MC3KD" else options
        method = kind(**{**kind.paper, **chosen})
        distiller = Distiller(teacher, student_from_teacher(teacher, layers), method)
        distiller.set_progress(stage)
        bound = StepBound(distiller.train(), inputs["batch"], inputs["dtype"], update=True)
        for parameters in bound.optimizer.param_groups:
            parameters["capturable"] = captured
        return GraphBound(bound) if captured else bound

    return bind


def make_decoders(*, B, N, Dt, Ds, V, device, dtype) -> dict[str, Any]:
    """Teacher and student with Qwen2's architecture, 4 and 2 layers, and a batch of tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def decoder(hidden: int, layers: int) -> nn.Module:
        config = Qwen2Config(
            vocab_size=V, hidden_size=hidden, intermediate_size=2 * hidden,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, tie_word_embeddings=False,
        )  # fmt: skip
        return Qwen2ForCausalLM(config).to(device)

    torch.manual_seed(0)
    ids = torch.randint(V, (B, N), device=device)
    batch = {"input_ids": ids, "labels": ids}
    return {"teacher": decoder(Dt, 4), "student": decoder(Ds, 2), "batch": batch, "dtype": dtype}


def bodies(inputs: dict[str, Any]) -> Bound:
    """Both models without their heads; the student's head has a gradient as after a step."""

    class Bodies(Bound):
        def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
            teacher, student, ids = inputs["teacher"], inputs["student"], inputs["batch"]
            dtype, device = inputs["dtype"], ids["input_ids"].device.type
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                with torch.no_grad():
                    teacher.model(ids["input_ids"])
                loss = student.model(ids["input_ids"]).last_hidden_state.sum()
            loss.backward()
            student.lm_head.weight.grad = torch.ones_like(student.lm_head.weight)
            student.zero_grad(set_to_none=True)
            return loss.detach(), ()

    return Bodies(lambda: inputs["batch"]["input_ids"].sum(), [])


def decoder_step(keep_logits: bool) -> Callable[[dict], Bound]:
    def bind(inputs: dict[str, Any]) -> Bound:
        from fastkd.distill import Distiller, SoftTargets

        models = inputs["teacher"].eval(), inputs["student"]
        distiller = Distiller(*models, SoftTargets(), keep_logits=keep_logits)
        return StepBound(distiller, inputs["batch"], inputs["dtype"], update=False)

    return bind


def why_not(device: torch.device, name: str) -> str | None:
    if name.endswith(GRAPH) and device.type != "cuda":
        return no_graphs(device)
    if importlib.util.find_spec("transformers") is None:
        return f"transformers is not installed; {how_to_get('train')}"
    return None


def case(
    title: str,
    set: str,
    dtype: torch.dtype,
    make: Callable[..., dict[str, Any]],
    operations: int,
    providers: dict[str, Callable[[dict], Bound]],
    sizes: dict[str, int],
) -> Case:
    """Case of whole steps, whose floor is the products of the models' blocks."""
    return Case(
        loss=LOSS,
        title=title,
        set=set,
        sizes=sizes,
        dtype=dtype,
        make=make,
        providers=tuple(
            Provider(name, bind, functools.partial(why_not, name=name), own_objective=True)
            for name, bind in providers.items()
        ),
        bytes_moved=0,
        operations=operations,
    )


def training_step(set: str, dtype: torch.dtype, **sizes: int) -> Case:
    """Case of BERT steps with sizes B, N, D, teacher_layers, student_layers."""
    products = 2 * sizes["B"] * sizes["N"] * 12 * sizes["D"] ** 2
    providers = {
        # Only the task term has a weight: no layer is compared.
        REFERENCE: method_step("FCD", 0.0, alpha=0.0, beta=0.0),
        "SoftTargets": method_step("SoftTargets", 0.0),
        "FCD": method_step("FCD", 0.0),
        "IntraClassKNN": method_step("IntraClassKNN", 0.0),
        "LRCBERT, first stage": method_step("LRCBERT", 0.5),
        "LRCBERT, second stage": method_step("LRCBERT", 0.9),
        "LRCBERT, not perturbed": method_step("LRCBERT", 0.9, perturb=False),
        "MC3KD": method_step("MC3KD", 0.0),
        "LRKD": method_step("LRKD", 0.0),
    }
    for name in ("SoftTargets", "FCD", "MC3KD") if set == "step" else ():
        providers[f"{name}{GRAPH}"] = method_step(name, 0.0, captured=True)
    operations = products * (sizes["teacher_layers"] + 3 * sizes["student_layers"])
    return case("training step", set, dtype, make, operations, providers, sizes)


def decoders(set: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Case:
    """Case of decoder steps, sizes B, N, Dt, Ds, V; a block has 12 D² products, a head V·D."""
    Dt, Ds, V = (sizes[name] for name in ("Dt", "Ds", "V"))
    a_token = 4 * 10 * Dt**2 + 3 * 2 * 10 * Ds**2 + V * (Dt + 3 * Ds)
    providers = {
        REFERENCE: bodies,
        "Distiller": decoder_step(keep_logits=False),
        "Distiller(keep_logits=True)": decoder_step(keep_logits=True),
    }
    operations = 2 * sizes["B"] * sizes["N"] * a_token
    return case("decoders", set, dtype, make_decoders, operations, providers, sizes)


def cases() -> Iterator[Case]:
    yield training_step("cpu", torch.float32, B=8, N=64, D=256, teacher_layers=4, student_layers=2)
    yield decoders("cpu", B=2, N=256, Dt=512, Ds=256, V=151936)
    yield training_step(
        "step", torch.bfloat16, B=32, N=128, D=768, teacher_layers=12, student_layers=6
    )
    yield decoders("step", torch.bfloat16, B=4, N=2048, Dt=2048, Ds=1024, V=128256)


def test_step(measure, case, provider):
    measure(case, provider)
