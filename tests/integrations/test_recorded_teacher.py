"""`fastkd.integrations.vllm.recorded_teacher`: files of hidden states in place of blocks."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import save_file

from fastkd.distill import FCD, Distiller, SoftTargets
from fastkd.integrations.vllm import recorded_teacher
from tests.support.compare import raises

SIZES = {"vocab_size": 60, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
LAYERS = [4, 1]
BATCH = {"input_ids": torch.arange(36).view(3, 12) + 2, "attention_mask": torch.ones(3, 12).long()}
BATCH["attention_mask"][1, 9:] = 0
BATCH["attention_mask"][2, :3] = 0


def model(family, hidden, depth, seed):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")
    made = config(hidden_size=hidden, num_hidden_layers=depth, num_key_value_heads=2, **SIZES)
    return getattr(transformers, f"{family}ForCausalLM")(made).eval()


def write(teacher, folder):
    """Files as the connector writes them: the outputs of blocks, one file per row."""
    found, teacher = {}, copy.deepcopy(teacher)
    for layer in LAYERS:
        block = teacher.model.layers[layer - 1]
        block.register_forward_hook(lambda _, args, out, layer=layer: found.update({layer: out[0]}))
    for i, (row, real) in enumerate(zip(*BATCH.values(), strict=True)):
        tokens = row[real.bool()]
        with torch.no_grad():
            teacher(tokens[None])
        states = torch.stack([found[layer] for layer in LAYERS], 1)
        save_file({"token_ids": tokens, "hidden_states": states}, folder / f"hs_{i}.safetensors")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_same_step_as_the_teacher(family, tmp_path):
    """Of layers that are in the files."""
    teacher, student = model(family, 32, 4, 0), model(family, 16, 2, 1)
    write(teacher, tmp_path)
    recorded = recorded_teacher(copy.deepcopy(teacher), tmp_path, LAYERS)
    assert recorded.num_parameters() < 0.3 * teacher.num_parameters()
    labelled = {**BATCH, "labels": BATCH["input_ids"]}
    for method, batch in ((SoftTargets(alpha=1.0), BATCH), (FCD(layers=[1, 4]), labelled)):
        whole, served = (Distiller(x, student, method)(**batch).loss for x in (teacher, recorded))
        torch.testing.assert_close(served, whole)
        folder = tmp_path / type(method).__name__
        cache = Distiller(recorded, student, method).cache_teacher([batch], folder)
        torch.testing.assert_close(Distiller(cache, student, method)(**batch).loss, whole)
    words = r"layer 2 of the teacher is compared, but .* layers \[4, 1\]"
    raises(words, Distiller(recorded, student, FCD(layers=[2, 4])), **labelled)


def test_other_tokens_files_and_families_are_refused(tmp_path):
    teacher = model("Llama", 32, 4, 0)
    made = recorded_teacher, teacher, tmp_path
    raises("holds no file of hidden states", *made, LAYERS, error=FileNotFoundError)
    write(teacher, tmp_path)
    raises(r"must have shape \(12, 1, 32\).*got \(12, 2, 32\)", *made, [4])
    raises(r"layers must be different numbers from 1 to 4, got \[0, 4\]", *made, [0, 4])
    bloom = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=4, n_head=2)
    bloom, words = transformers.BloomForCausalLM(bloom), "BloomBlock of Bloom.* doesn't return a Te"
    raises(words, recorded_teacher, bloom, tmp_path, LAYERS, error=TypeError)
    recorded = recorded_teacher(teacher, tmp_path, LAYERS)
    raises("sample 0 of the batch are in no file", recorded, BATCH["input_ids"] + 1, error=KeyError)
    save_file({"token_ids": torch.arange(3)}, tmp_path / "a.safetensors")
    other = model("Llama", 32, 4, 0)
    raises("must hold token_ids and hidden_states", recorded_teacher, other, tmp_path, LAYERS)
