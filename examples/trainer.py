"""Distillation inside transformers.Trainer: teacher, student and method in, trained student out."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from fastkd.distill import FCD, DistillationTrainer, layer_map, student_from_teacher

torch.manual_seed(0)
config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=64,
)
teacher = BertForSequenceClassification(config)  # in earnest: from_pretrained(...)
student = student_from_teacher(teacher, layer_map("uniform", 4, 2))

rows = torch.randint(0, 100, (64, 12))
data = [{"input_ids": ids, "attention_mask": ids >= 0, "labels": int(ids[0]) % 2} for ids in rows]

with tempfile.TemporaryDirectory() as folder:
    trainer = DistillationTrainer(
        teacher,
        student,
        FCD(alpha=1.0, beta=1.0),
        args=TrainingArguments(
            folder,
            num_train_epochs=3,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            logging_steps=4,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model(folder)
    print(BertForSequenceClassification.from_pretrained(folder).config.num_hidden_layers, "layers")
