"""A server with a tiny decoder that speaks vLLM's and SGLang's protocols, with planted faults.

Each of the next requests fails as a fault says: a status, or one of "drip", "cut", "truncate",
"token", "logits", "shift", "other" (another prompt, without its ids), "choices".
"""

import asyncio
import functools
import json
import threading
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

FAULTS: list[Any] = []
SEEN: list[int] = []  # tokens of each request


class Served:
    """The model, its predictions as JSON."""

    def __init__(self, folder: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def run(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (T, V) and the head's inputs (T, D)."""
        ids = torch.tensor([tokens])
        states = self.model.base_model(input_ids=ids).last_hidden_state
        return self.model.lm_head(states)[0], states[0]

    def own(self, tokens: list[int]) -> list[tuple[float, int]]:
        """(log-probability, id) of the prompt's own tokens at positions 1 to T − 1."""
        values = self.run(tokens)[0].log_softmax(-1)
        return [(values[n, i].item(), i) for n, i in enumerate(tokens[1:])]

    def entries(self, tokens: list[int], k: int, fault: Any) -> list[list[tuple[float, int]]]:
        """(log-probability, id) of the k most probable tokens at positions 1 to T − 1."""
        logits, _ = self.run(tokens)
        values = logits if fault == "logits" else logits.log_softmax(-1)
        top = values[:-1].topk(min(k, values.shape[-1]), -1)
        rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]


async def answer(request: web.Request, made: Any) -> web.StreamResponse:
    """``made(body, fault)`` as JSON, unless a fault is planted."""
    body = await request.json()
    tokens = body.get("prompt") or body["input_ids"]
    SEEN.append(len(tokens))
    fault = FAULTS.pop(0) if FAULTS else None
    if isinstance(fault, int):
        return web.Response(status=fault, text=f"planted {fault}", headers={"Retry-After": "0"})
    if fault == "token":
        tokens[1] = (tokens[1] + 1) % 8
    if fault == "truncate":
        del tokens[-1]
    if fault == "other":
        tokens[1:] = tokens[:0:-1]
    text = json.dumps(made(body, tokens, fault))
    if fault not in ("cut", "drip"):
        return web.Response(text=text, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Length": str(len(text))})
    await response.prepare(request)
    for letter in text if fault == "drip" else ():
        await response.write(letter.encode())
        await asyncio.sleep(0.05)
    await response.write(text[: len(text) // 2].encode())
    assert request.transport is not None
    request.transport.close()
    return response


def application(served: Served) -> web.Application:
    """Both protocols."""

    def moved(entries: list, fault: Any) -> list:
        """The entries of a prompt, the first one None, at other positions."""
        if fault == "shift":
            entries = [*entries[-1:], *entries[:-1]]
        return [None, *entries]

    def completion(body: dict, tokens: list[int], fault: Any) -> dict:
        rows = served.entries(tokens, body["prompt_logprobs"], fault)
        entries = [
            {str(i): {"logprob": v} for v, i in (own, *row)}
            for own, row in zip(served.own(tokens), rows, strict=True)
        ]
        choice = {"prompt_logprobs": moved(entries, fault)}
        if fault != "other":
            choice["prompt_token_ids"] = tokens
        return {"choices": [choice] * (1 + (fault == "choices"))}

    def generate(body: dict, tokens: list[int], fault: Any) -> Any:
        own = [[v, i, None] for v, i in ((None, tokens[0]), *served.own(tokens))]
        about: dict[str, Any] = {"input_token_logprobs": own}
        if body.get("top_logprobs_num"):
            rows = served.entries(tokens, body["top_logprobs_num"], fault)
            entries = [[[v, i, None] for v, i in row] for row in rows]
            about["input_top_logprobs"] = moved(entries, fault)
        if body.get("return_hidden_states"):
            about["hidden_states"] = [served.run(tokens)[1].tolist()]
        return [{"meta_info": about}] * 2 if fault == "choices" else {"meta_info": about}

    app = web.Application()
    app.router.add_post("/v1/completions", functools.partial(answer, made=completion))
    app.router.add_post("/generate", functools.partial(answer, made=generate))
    return app


class Server:
    """The server of the model in ``folder``, in a thread."""

    def __init__(self, folder: Any, port: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.runner = web.AppRunner(application(Served(str(folder))), shutdown_timeout=0.1)
        self._wait(self.runner.setup())
        self._wait(web.TCPSite(self.runner, "127.0.0.1", port).start())
        self.port = self.runner.addresses[0][1]
        self.address = f"http://127.0.0.1:{self.port}"

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def plant(self, *faults: Any) -> list[int]:
        """Faults of the next requests; returns the lengths of the rows that were requested."""
        FAULTS[:] = faults
        seen, SEEN[:] = list(SEEN), []
        return seen

    def stop(self) -> None:
        self._wait(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
