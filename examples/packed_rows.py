"""A language model's words in a plain loop: packed rows, both models' heads, labels beside them."""

import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from fastkd import CrossEntropy, Head, linear_soft_target_loss

torch.manual_seed(0)
WORDS = 200
sizes = dict(vocab_size=WORDS, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
teacher = LlamaForCausalLM(LlamaConfig(hidden_size=48, num_hidden_layers=4, **sizes)).eval()
student = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, **sizes))
with torch.no_grad():  # in earnest the teacher has learned: its words differ in likelihood
    teacher.lm_head.weight.mul_(20)

# Documents of several lengths in one row; positions that start again keep them apart.
starts = [(5 * i, 8 + 3 * i) for i in range(8)]
texts = [torch.arange(start, start + count).tolist() for start, count in starts]
batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": text} for text in texts])
inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
# A state predicts the word behind it; a document's first word, −100, is predicted by nothing.
labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)

optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
with torch.no_grad():
    taught = teacher.model(**inputs).last_hidden_state
for step in range(31):
    states = student.model(**inputs).last_hidden_state  # the heads never run
    loss, terms = linear_soft_target_loss(
        states,
        Head.of(student),
        taught,
        Head.of(teacher).detach(),
        temperature=2.0,
        soft_weight=0.5,
        task=CrossEntropy(labels, 0.5),
        return_terms=True,
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: accuracy {terms['accuracy'].item():.2f}, loss {loss.item():.3f}")
