"""MC3KD in an accelerate loop: large batches in exact micro-batches, over any number of processes.

`accelerate launch examples/accelerate_loop.py` or plain `python`.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from fastkd.distill import MC3KD, Distiller, student_from_teacher

STEPS, PARTS = 6, 2
torch.manual_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=64,
)  # fmt: skip
teacher = BertForSequenceClassification(config)
student = student_from_teacher(teacher, [2, 4])
rows = [
    {"input_ids": torch.randint(0, 100, (12,)), "labels": torch.tensor(i % 2)}
    for i in range(STEPS * PARTS * 16)
]

accelerator = Accelerator(cpu=True)
# gather: correlations over the samples of all processes, not of each one's own.
distiller = Distiller(teacher, student, MC3KD(layers="uniform", beta=0.01), gather=True)
optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=3e-3)
loader = DataLoader(rows, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(distiller, optimizer, loader)

parts, step = [], 0
for batch in loader:
    parts.append(batch)
    if len(parts) < PARTS:
        continue
    terms = {}
    for out in distiller.accumulate(parts, model):  # shares of one batch's loss
        accelerator.backward(out.loss)
        terms = {name: terms.get(name, 0) + value for name, value in out.terms.items()}
    optimizer.step()
    optimizer.zero_grad()
    parts, step = [], step + 1
    accelerator.print(f"step {step}: loss {terms['total'].item():.3f}")
