"""A SentenceTransformer with half the layers, in its own Trainer, without labels."""

import tempfile

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from transformers import BertConfig, BertModel, BertTokenizer

from fastkd.distill import LRKD, student_from_teacher
from fastkd.integrations.sentence_transformers import LayerDistillLoss, RelationDistillLoss

torch.manual_seed(0)
words = ["the", "a", "small", "cat", "dog", "house", "garden", "sees", "finds", "in", "red"]
vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
config = BertConfig(
    vocab_size=len(vocab), hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=64, initializer_range=0.5,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab={word: i for i, word in enumerate(vocab)}).save_pretrained(folder)
    # In earnest: SentenceTransformer("all-...")
    teacher, student = (SentenceTransformer(folder, device="cpu") for _ in range(2))
student[0].model = student_from_teacher(student[0].model, [2, 4])

texts = [" ".join(words[(n * i) % 11] for i in range(1, 4 + n % 5)) for n in range(1, 33)]
data = Dataset.from_dict({"text": texts, "label": teacher.encode(texts).tolist()})


def agreement() -> float:
    """Correlation of the similarities between all texts."""
    both = [model.similarity(x, x).flatten() for model in (student, teacher)
            for x in [model.encode(texts)]]  # fmt: skip
    return torch.corrcoef(torch.stack(both))[0, 1].item()


print(f"before: {agreement():.3f}")
with tempfile.TemporaryDirectory() as folder:
    arguments = SentenceTransformerTrainingArguments(
        folder, max_steps=40, per_device_train_batch_size=32, learning_rate=3e-3, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    # Embeddings and hidden states, in one pass; either goes alone.
    loss = LayerDistillLoss(student, teacher, LRKD(alpha=None), loss=RelationDistillLoss(student))
    SentenceTransformerTrainer(student, arguments, data, loss=loss).train()
print(f"after: {agreement():.3f}")
