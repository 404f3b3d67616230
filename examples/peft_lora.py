"""FCD into LoRA adapters: only they and the head learn, and are merged into the student after."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from fastkd.distill import FCD, Distiller, student_from_teacher

torch.manual_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=64,
)  # fmt: skip
teacher = BertForSequenceClassification(config)  # in earnest: from_pretrained(...)
# Layers first, adapters then: a model with adapters can't be cut.
student = get_peft_model(
    student_from_teacher(teacher, [2, 4]),
    LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value", "dense"]),
)
distiller = Distiller(teacher, student, FCD(soft_weight=0.0))
trained = [p for p in distiller.parameters() if p.requires_grad]
print(f"{sum(p.numel() for p in trained):,} of {student.num_parameters():,} parameters learn")

optimizer = torch.optim.AdamW(trained, lr=1e-2)
batch = {"input_ids": torch.randint(0, 100, (16, 12)), "labels": torch.arange(16) % 2}
for step in range(31):
    out = distiller(**batch)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {out.loss.item():.3f}")

merged = student.merge_and_unload()
print(type(merged).__name__, merged.config.num_hidden_layers, "layers")
