"""Quantisation-aware distillation: a student with int4 weights learns from its bf16 teacher."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM

from fastkd.distill import Distiller, SoftTargets


class Int4(nn.Module):
    """A weight (M, D), rounded to 16 levels a row; its gradient passes to what is trained.

    In earnest torchao's `quantize_(student, QATConfig(...))` does this, in groups of a row.
    """

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().amax(1) / 7
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -8, 7)


torch.manual_seed(0)
# In earnest the teacher comes by from_pretrained(..., dtype="bfloat16").
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2,
)  # fmt: skip
teacher = LlamaForCausalLM(config).bfloat16()
with torch.no_grad():
    teacher.lm_head.weight.mul_(20)
student = copy.deepcopy(teacher).float()
# All linear layers but the head, which keeps its weights as in most int4 checkpoints.
rounded = [x for x in student.model.modules() if isinstance(x, nn.Linear)]
for layer in rounded:
    parametrize.register_parametrization(layer, "weight", Int4())

distiller = Distiller(teacher, student, SoftTargets(alpha=1.0, temperature=1.0))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
input_ids = torch.randint(0, 256, (8, 16))
for step in range(41):
    out = distiller(input_ids=input_ids)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {out.loss.item():.4f}")

for layer in rounded:
    parametrize.remove_parametrizations(layer, "weight")  # the rounded weights stay
print(len(rounded[0].weight[0].unique()), "values in a row")
