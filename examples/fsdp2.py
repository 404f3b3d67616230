"""FCD under FSDP2: `torchrun --nproc-per-node 2 examples/fsdp2.py`, on GPUs or the CPU.

Student, blocks and method are sharded each by itself, and the frozen teacher too: no process holds
a whole model. With gather=True the samples of all processes are compared.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForSequenceClassification

from fastkd.distill import FCD, Distiller, student_from_teacher

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))
torch.manual_seed(0)  # the same models everywhere, before they are sharded
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=64,
)  # fmt: skip
teacher = BertForSequenceClassification(config).to(device)  # in earnest: from_pretrained(...)
student = student_from_teacher(teacher, [2, 4])
distiller = Distiller(teacher, student, FCD(soft_weight=0.0), gather=True)
for model in (teacher, student):
    for block in model.bert.encoder.layer:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
if list(distiller.method.parameters()):
    fully_shard(distiller.method, mesh=mesh)

optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=1e-3)
torch.manual_seed(dist.get_rank())  # each process has samples of its own
batch = {"input_ids": torch.randint(0, 100, (8, 12)), "labels": torch.arange(8) % 2}
batch = {name: x.to(device) for name, x in batch.items()}
for step in range(31):
    out = distiller(**batch)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {out.loss.item():.3f}")  # that of all samples
dist.destroy_process_group()
