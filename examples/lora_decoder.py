"""A decoder with LoRA, on its vocabulary head too, learns words from a larger decoder."""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fastkd.distill import Distiller, SoftTargets

torch.manual_seed(0)
sizes = dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
large, small = dict(hidden_size=48, num_hidden_layers=4), dict(hidden_size=32, num_hidden_layers=2)
# In earnest both come by from_pretrained(...). Heads are padded to other sizes in a family:
# the words that both know are compared.
teacher = LlamaForCausalLM(LlamaConfig(vocab_size=256, **large, **sizes))
base = LlamaForCausalLM(LlamaConfig(vocab_size=200, **small, **sizes))
with torch.no_grad():
    teacher.lm_head.weight.mul_(20)
student = get_peft_model(
    base,
    LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "lm_head"]),
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # says which words are compared
    distiller = Distiller(teacher, student, SoftTargets(alpha=1.0))
trained = [p for p in distiller.parameters() if p.requires_grad]
print(f"{sum(p.numel() for p in trained):,} of {student.num_parameters():,} parameters learn")

optimizer = torch.optim.AdamW(trained, lr=1e-2)
input_ids = torch.randint(0, 200, (8, 16))
for step in range(41):
    out = distiller(input_ids=input_ids, labels=input_ids)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {out.loss.item():.3f}")

merged = student.merge_and_unload()
print(type(merged).__name__, merged.config.num_hidden_layers, "layers")
