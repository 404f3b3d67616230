"""Peak memory of one step of two language models on the CPU: `python -m bench.words heads`.

"heads" is a Distiller as it is, "logits" one with ``keep_logits=True``, and "none" the two models
and the gradients of the student's weights without a loss.
"""

import resource
import sys

import torch
import transformers as t

from fastkd.distill import Distiller, SoftTargets

V, TOKENS = 151936, (2, 512)


def model(hidden: int, layers: int) -> t.PreTrainedModel:
    """A decoder of Qwen2's form."""
    config = t.Qwen2Config(
        vocab_size=V, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return t.Qwen2ForCausalLM(config)


def main(mode: str) -> None:
    """One step, and the process's peak."""
    torch.manual_seed(0)
    teacher, student = model(512, 4).eval(), model(256, 2)
    ids = torch.randint(5, V, TOKENS)
    if mode == "none":
        with torch.no_grad():
            teacher.model(ids)
        student.model(ids).last_hidden_state.sum().backward()
        student.lm_head.weight.grad = torch.ones_like(student.lm_head.weight)
    else:
        distiller = Distiller(teacher, student, SoftTargets(), keep_logits=mode == "logits")
        distiller(input_ids=ids, labels=ids).loss.backward()
    print(mode, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MiB")


if __name__ == "__main__":
    main(sys.argv[1])
