"""A served teacher's hidden states, distilled into a small Llama.

The server answers as vLLM does with its `ExampleHiddenStatesConnector` (docs/any_loop.md has the
command): it writes a request's hidden states into a file, and returns the path.
"""

import http.server
import json
import multiprocessing
import tempfile
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fastkd.distill import Distiller, SoftTargets
from fastkd.integrations import vllm

SIZES = dict(vocab_size=200, num_attention_heads=2, intermediate_size=64)
LAYERS = [2, 4]


def teacher_model() -> LlamaForCausalLM:
    """In earnest LlamaForCausalLM.from_pretrained(...), on both sides."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(hidden_size=48, num_hidden_layers=4, **SIZES)).eval()


def serve(folder: str, ready) -> None:
    teacher, found = teacher_model(), {}
    for layer in LAYERS:  # before the final norm
        teacher.model.layers[layer - 1].register_forward_hook(
            lambda block, args, output, layer=layer: found.update({layer: output[0]})
        )

    class Server(http.server.BaseHTTPRequestHandler):
        @torch.no_grad()
        def do_POST(self) -> None:
            tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            teacher(torch.tensor([tokens]))
            path = f"{folder}/{hash(tuple(tokens))}.safetensors"
            states = torch.stack([found[layer] for layer in LAYERS], 1)
            save_file({"token_ids": torch.tensor(tokens), "hidden_states": states}, path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"hidden_states_path": path}).encode())

        def log_message(self, *args) -> None:
            """No line for each request."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    ready.put(server.server_port)
    server.serve_forever()


def main() -> None:
    folder, tokens = tempfile.mkdtemp(), torch.randint(0, 200, (16, 12))
    start = multiprocessing.get_context("spawn")
    ready = start.Queue()
    process = start.Process(target=serve, args=(folder, ready), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{ready.get()}/v1/completions"
    for row in tokens.tolist():
        urllib.request.urlopen(url, json.dumps({"prompt": row, "max_tokens": 1}).encode()).read()
    process.terminate()

    teacher = vllm.recorded_teacher(teacher_model(), folder, LAYERS)  # frees the blocks
    student = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, **SIZES))
    distiller = Distiller(teacher, student, SoftTargets(alpha=1.0, temperature=1.0))
    cache = distiller.cache_teacher([{"input_ids": tokens}], Path(folder) / "cache")
    distiller = Distiller(cache, student, SoftTargets(alpha=1.0, temperature=1.0))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for step in range(41):
        loss = distiller(input_ids=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
