"""Quantisation-aware distillation: a student with int4 weights learns from its bf16 teacher."""

import copy

import torch
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig
from transformers import LlamaConfig, LlamaForCausalLM

from fastkd.distill import Distiller, SoftTargets

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
INT4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))


def linear_of_blocks(module: torch.nn.Module, name: str) -> bool:
    """All linear layers but the head, which keeps its weights as in most int4 checkpoints."""
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name


quantize_(student, QATConfig(INT4, step="prepare"), linear_of_blocks)  # rounds in forward passes
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

quantize_(student, QATConfig(INT4, step="convert"), linear_of_blocks)  # int4 weights from here on
print(type(student.model.layers[0].mlp.up_proj.weight).__name__)
