"""The memory that a Distiller of language models needs beside the models."""

import subprocess
import sys

STEPS = """
import torch
from fastkd.bench.words import model, step

torch.manual_seed(0)
models = model(256, 1).eval(), model(128, 1)
peaks = []
for mode in ("none", "heads"):
    peaks.append(step(mode, *models, tokens=256))
    models[1].zero_grad()
print(*peaks)
"""


def test_a_step_needs_little_more_than_the_models_without_a_loss():
    """A peak never sinks, so the second is what both steps need."""
    found = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    assert not found.returncode, found.stderr
    without, with_loss = map(int, found.stdout.split())
    assert with_loss < 1.15 * without, found.stdout
