"""LRKD for sentence embeddings: a SentenceTransformer with half the layers, without labels."""

import tempfile

import torch
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel, BertTokenizer

from fastkd.distill import LRKD, Distiller, student_from_teacher


def pipeline(model, tokenizer) -> SentenceTransformer:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return SentenceTransformer(folder, device="cpu")  # which takes the tokens' mean


torch.manual_seed(0)
words = ["the", "a", "small", "cat", "dog", "house", "garden", "sees", "finds", "in", "red"]
vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(vocab)})
config = BertConfig(
    vocab_size=len(vocab), hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=64, initializer_range=0.5,
)  # fmt: skip
teacher = pipeline(BertModel(config), tokenizer)  # in earnest: SentenceTransformer("all-...")
encoder = teacher[0].auto_model
student = student_from_teacher(encoder, [2, 4])
sentences = [" ".join(words[(n * i) % 11] for i in range(1, 4 + n % 5)) for n in range(1, 33)]


def agreement() -> float:
    """Mean cosine between the embeddings of both."""
    models = pipeline(student, tokenizer), teacher
    ours, theirs = (model.encode(sentences, convert_to_tensor=True) for model in models)
    return torch.cosine_similarity(ours, theirs).mean().item()


print(f"before: {agreement():.3f}")
# Both sides are pooled as the pipeline does it, by the mean over the real tokens.
distiller = Distiller(encoder, student, LRKD(alpha=None))
optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=3e-3)
for _ in range(40):
    distiller(**teacher.tokenizer(sentences, padding=True, return_tensors="pt")).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"after: {agreement():.3f}")
