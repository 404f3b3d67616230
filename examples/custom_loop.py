"""FCD's loss in a plain training loop: two models' hidden states, an attention mask, a scalar."""

import torch
from transformers import BertConfig, BertModel

from fastkd import FCDLoss

torch.manual_seed(0)
sizes = dict(vocab_size=100, num_attention_heads=4, intermediate_size=64)
teacher = BertModel(BertConfig(hidden_size=48, num_hidden_layers=4, **sizes)).eval()
student = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, **sizes))
input_ids = torch.randint(0, 100, (8, 12))
attention_mask = (torch.arange(12) < torch.randint(4, 13, (8, 1))).long()

criterion = FCDLoss(alpha=1.0, beta=1.0)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
batch = {"input_ids": input_ids, "attention_mask": attention_mask}
for step in range(31):
    with torch.no_grad():
        goal = teacher(**batch, output_hidden_states=True).hidden_states
    made = student(**batch, output_hidden_states=True).hidden_states
    loss = criterion([made[1], made[2]], [goal[2], goal[4]], attention_mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
