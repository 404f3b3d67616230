"""A server's top-k log-probabilities from a JSON file, distilled into a small GPT-2.

A line has a text's tokens and the ``prompt_logprobs`` that a vLLM server returns for them: entry i
has the teacher's most probable tokens at token i, so it belongs to the student's output at i − 1.
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fastkd import CrossEntropy, Head, TopK, linear_soft_target_loss
from fastkd.integrations import vllm

torch.manual_seed(0)
K, LENGTH, WORDS = 5, 16, 200
# In earnest the file is the server's. Here every word is followed by one of the next five.
path = Path(tempfile.mkdtemp()) / "teacher.jsonl"
with path.open("w") as file:
    for _ in range(32):
        tokens = torch.randint(WORDS, (LENGTH,)).tolist()
        likely = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05]).log().tolist()
        top = [
            {str((t + i) % WORDS): {"logprob": likely[i], "rank": i + 1} for i in range(K)}
            for t in tokens[:-1]
        ]
        file.write(json.dumps({"tokens": tokens, "prompt_logprobs": [None, *top]}) + "\n")

rows = [json.loads(line) for line in path.read_text().splitlines()]
tokens = torch.tensor([row["tokens"] for row in rows])
tops = [vllm.top_k(row["prompt_logprobs"], K) for row in rows]
teacher = TopK(torch.stack([t.ids for t in tops]), torch.stack([t.log_probs for t in tops]))
labels = tokens[:, 1:]  # the next words

config = GPT2Config(
    vocab_size=WORDS, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
student = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
for step in range(31):
    states = student.transformer(tokens[:, :-1]).last_hidden_state  # the head never runs
    loss, terms = linear_soft_target_loss(
        states, Head.of(student), teacher, task=CrossEntropy(labels, 0.1), return_terms=True
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: soft targets {terms['soft'].item():.3f}")
