"""TRL prepares the data, packed into rows, and fastkd distils a small decoder on them."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from fastkd.distill import DistillationTrainer, SoftTargets

torch.manual_seed(0)
words = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{i}" for i in range(96))]
plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
)
sizes = dict(
    vocab_size=len(words), num_attention_heads=2, num_key_value_heads=1, intermediate_size=64
)
# In earnest both come by from_pretrained(...).
teacher = LlamaForCausalLM(LlamaConfig(hidden_size=48, num_hidden_layers=4, **sizes))
student = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, **sizes))
with torch.no_grad():
    teacher.lm_head.weight.mul_(20)
texts = [" ".join(f"word{(i + j) % 96}" for j in range(5 + i % 7)) for i in range(64)]

options = SFTConfig(
    output_dir=tempfile.mkdtemp(), max_length=32, packing=True, max_steps=60, learning_rate=1e-2,
    per_device_train_batch_size=4, logging_steps=1, report_to="none", save_strategy="no",
    use_cpu=True, disable_tqdm=True, bf16=False,
)  # fmt: skip
data = Dataset.from_dict({"text": texts})
prepared = SFTTrainer(student, args=options, train_dataset=data, processing_class=tokenizer)
trainer = DistillationTrainer(
    teacher,
    student,
    SoftTargets(alpha=1.0, divergence="js", temperature=1.0),  # GKD's loss with beta=0.5
    args=options,
    train_dataset=prepared.train_dataset,
    data_collator=prepared.data_collator,
)
trainer.train()
logged = [entry for entry in trainer.state.log_history if "soft" in entry]
for step in (0, 29, 59):
    print(f"step {step}: soft targets {logged[step]['soft']:.4f}")
