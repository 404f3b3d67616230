"""No call on a GPU waits for it, or mixes devices: seen without a GPU; see `dry_cuda`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py looks at the real thing")
def test_calls_neither_wait_nor_mix_devices():
    """In a process of its own: under TRITON_INTERPRET kernels are other objects."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.dry_cuda"],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report.pop("planted")) == 7, "a planted mistake was not found"
    assert not any(report.values()), json.dumps(report, indent=1)
