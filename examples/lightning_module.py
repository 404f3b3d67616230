"""LRC-BERT in Lightning: the Distiller inside a LightningModule, its stages follow the trainer."""

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from fastkd.distill import LRCBERT, Distiller, student_from_teacher


class Distillation(L.LightningModule):
    def __init__(self, distiller: Distiller, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.distiller, self.learning_rate = distiller, learning_rate

    def training_step(self, batch, index):
        self.distiller.set_progress(self.global_step / self.trainer.estimated_stepping_batches)
        out = self.distiller(**batch)
        self.log_dict(out.terms, prog_bar=True)
        return out.loss

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


L.seed_everything(0)
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=64,
)  # fmt: skip
teacher = BertForSequenceClassification(config)  # in earnest: from_pretrained(...)
student = student_from_teacher(teacher, [2, 4])
rows = [{"input_ids": torch.randint(0, 100, (12,)), "labels": i % 2} for i in range(64)]

# Over several devices: Distiller(..., gather=True), strategy="ddp_find_unused_parameters_true".
module = Distillation(Distiller(teacher, student, LRCBERT(first_stage=0.5)))
trainer = L.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, DataLoader(rows, batch_size=16, shuffle=True))
for name, value in trainer.callback_metrics.items():
    print(f"{name}: {value:.3f}")
