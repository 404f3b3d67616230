"""A teacher that runs in a live server: vLLM's completions or SGLang's generate, by HTTP."""

import asyncio
import collections
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.extras import require
from fastkd.distill.distiller import Distiller
from fastkd.integrations import sglang, vllm
from fastkd.integrations._rows import Answer, RowSource, SourceError, SourceModel
from fastkd.lm.heads import Head
from fastkd.lm.targets import TopK
from fastkd.models.batch import Batch

__all__ = ["ServedTeacher", "ServerError"]

SAME = 1e-4  # difference of one log-probability in two lists of an answer
LONGEST_PAUSE = 60.0  # seconds between two tries
RETRIED = {408, 425, 429, *range(500, 600)}  # statuses of requests that may succeed later


class ServerError(SourceError):
    """The server refuses a request, doesn't answer, or answers what can't be learned from."""


class ServedTeacher(RowSource):
    """A causal language model in a live server, used in a teacher's place.

    ``Distiller(ServedTeacher("http://host:8000/v1", "name", top_k=64), student, method)`` learns
    from the server's predictions. Methods that compare hidden states of layers need the model
    itself, or `fastkd.integrations.vllm.recorded_teacher`. Rows are requested in parallel, and an
    answer is matched to its row by the row's tokens. `ahead` requests the next batches while the
    student learns.

    Protocols: a URL that ends in ``/v1`` is vLLM's (``POST /v1/completions`` with token ids,
    ``prompt_logprobs`` and ``return_token_ids``; vllm-project/vllm,
    ``entrypoints/openai/completion/protocol.py``). Any other URL is SGLang's (``POST /generate``
    with ``input_ids``, ``return_logprob``, ``top_logprobs_num`` and ``return_hidden_states``;
    sgl-project/sglang, ``srt/managers/io_struct.py``).

    A failed connection, a time-out, an answer that breaks off and the statuses 408, 425, 429 and
    5xx are retried, with pauses that double from half a second to a minute; ``Retry-After`` is
    obeyed. Other statuses are not retried.

    Args:
        url: address of the server, such as ``http://localhost:8000/v1``.
        model: the model's name in the server.
        top_k: learn from the K most probable tokens of each position; all others are one outcome.
            The server's own limit (vLLM: ``--max-logprobs``, 20 by default) must allow it.
        hidden_states: read the LM head's inputs instead, from SGLang started with
            ``--enable-return-hidden-states``. Needs ``head``, and gives whole distributions.
        head: the teacher's LM head, a (V, D) weight or a `fastkd.Head`.
        temperature: temperature of the server's log-probabilities. Servers ignore other
            temperatures than 1 for a prompt, unless they are set up to scale them; that is tested.
        prefetch: number of batches that `ahead` requests in advance.
        timeout: seconds until a request without a whole answer is tried again.
        retries: tries after the first. The default bridges six minutes without a server.
        concurrency: largest number of requests in flight.

    Raises:
        ValueError: neither or both of ``top_k`` and ``hidden_states``, ``hidden_states`` without a
            head or with vLLM's protocol.
        ServerError: at the first batch or later: the server refuses a request or stays away; its
            tokens are not the student's; it truncated a prompt; its log-probabilities are logits,
            NaN, fewer than K, or at another temperature.
    """

    what = "the served teacher"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        top_k: int | None = None,
        hidden_states: bool = False,
        head: Head | Tensor | None = None,
        temperature: float = 1.0,
        prefetch: int = 2,
        timeout: float = 120.0,
        retries: int = 13,
        concurrency: int = 16,
    ) -> None:
        super().__init__()
        require("httpx", "served")
        if (top_k is None) != hidden_states:
            raise ValueError(
                f"top_k={top_k}, hidden_states={hidden_states}: pass one of the two, a number of "
                "tokens or True"
            )
        self.url, self.name = url.rstrip("/"), model
        self.speaks_vllm = self.url.endswith("/v1")
        if hidden_states and (head is None or self.speaks_vllm):
            raise ValueError(
                "hidden_states: they come from SGLang's /generate (a url without /v1) and need "
                "head, the teacher's LM head; or pass top_k"
            )
        if top_k is not None:
            check.positive_int("top_k", top_k)
        check.positive_int("concurrency", concurrency)
        self.top_k, self.hidden_states, self.temperature = top_k, hidden_states, temperature
        self.prefetch, self.timeout, self.retries = prefetch, timeout, retries
        self.concurrency = concurrency
        self.head = head if head is None or isinstance(head, Head) else Head(head)
        size = None if self.head is None else len(self.head.weight)
        self.model = SourceModel(model, self.what, size)
        self._pending: dict[tuple[int, ...], Future[Answer]] = {}
        self._requests: _Requests | None = None
        self._checked = False
        #: Rows that were read, seconds that the student waited for them, and when reading began.
        self.rows, self.waited, self._began = 0, 0.0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        # Requests in flight belong to this process.
        return {**self.__dict__, "_pending": {}, "_requests": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ServedTeacher":
        return self  # the server is one

    def ahead(
        self, batches: Iterable[dict[str, Any]], distiller: Distiller, left_out: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """The batches, each yielded when those of the next ``prefetch`` are requested.

        Args:
            batches: arguments of ``distiller``, as a data loader returns them.
            distiller: the Distiller of this teacher.
            left_out: names in a batch that are no arguments of ``distiller``.
        """
        waiting: collections.deque[dict[str, Any]] = collections.deque()
        for batch in batches:
            given = {name: x for name, x in batch.items() if name not in left_out}
            for own in distiller.teachers.batches_of(self, distiller.read(given)):
                self.request(own)
            waiting.append(batch)
            if len(waiting) > self.prefetch:
                yield waiting.popleft()
        yield from waiting

    def request(self, batch: Batch) -> None:
        """Send the requests of a batch's rows that are not in flight."""
        for row in self.rows_of(batch.teacher or batch):
            self._send(row)

    def answers(self, rows: list[tuple[int, ...]]) -> list[Answer]:
        """The server's answers to rows; waits for them."""
        self._began = self._began or time.perf_counter()
        futures = [self._send(row) for row in rows]
        start = time.perf_counter()
        try:
            answers = [future.result() for future in futures]
        finally:
            for row in rows:
                self._pending.pop(row, None)
        self.waited += time.perf_counter() - start
        self.rows += len(rows)
        if not self._checked and rows:
            self._check_first(rows, answers)
        return answers

    def configuration(self) -> dict[str, Any]:
        """The model's name, the number of tokens of a position, and their temperature."""
        return {"served": self.name, "top_k": self.top_k, "temperature": self.temperature}

    def throughput(self) -> str:
        """Rows a second since the first batch, and the share of time that the student waited."""
        seconds = time.perf_counter() - self._began if self._began else 0.0
        rate, share = (self.rows / seconds, self.waited / seconds) if seconds else (0.0, 0.0)
        return f"teacher {rate:.1f} rows/s, waited {share:.0%}"

    def _send(self, row: tuple[int, ...]) -> "Future[Answer]":
        if row not in self._pending:
            if self._requests is None:
                self._requests = _Requests(self)
            self._pending[row] = self._requests.send(row)
        return self._pending[row]

    def _check_first(self, rows: list[tuple[int, ...]], answers: list[Answer]) -> None:
        """Check what the first answers show: the student's vocabulary, and the temperature."""
        self._checked = True
        size = self.model.output_size
        ids = [x.ids for x in answers if isinstance(x, TopK) and x.ids.numel()]
        largest = max((int(x.max()) for x in ids), default=0)
        if size is not None and largest >= size:
            raise ServerError(
                f"{self.url}: token id {largest} of {self.name} is beyond the student's {size} "
                "tokens; serve a teacher with the student's tokenizer"
            )
        if self.temperature != 1 and self.top_k is not None:
            longest = max(range(len(rows)), key=lambda i: len(rows[i]))
            assert self._requests is not None
            other = self._requests.send(rows[longest], temperature=1.0).result()
            mine = answers[longest]
            assert isinstance(mine, TopK) and isinstance(other, TopK)
            if torch.allclose(mine.log_probs, other.log_probs, atol=1e-4):
                raise ServerError(
                    f"{self.url}: its log-probabilities of a prompt ignore the temperature "
                    f"{self.temperature}; use temperature 1, or hidden_states=True with a head"
                )


class _Requests:
    """Requests of one process, sent from a thread with an event loop of its own."""

    def __init__(self, teacher: ServedTeacher) -> None:
        self.teacher, self.httpx = teacher, require("httpx", "served")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="served teacher").start()
        limits = self.httpx.Limits(max_connections=teacher.concurrency)
        self.client = self.httpx.AsyncClient(timeout=None, limits=limits)
        self.free = asyncio.Semaphore(teacher.concurrency)

    def send(self, row: tuple[int, ...], temperature: float | None = None) -> "Future[Answer]":
        return asyncio.run_coroutine_threadsafe(self._answer(row, temperature), self.loop)

    async def _answer(self, row: tuple[int, ...], temperature: float | None) -> Answer:
        if len(row) == 1 and self.teacher.top_k is not None:  # nothing is predicted
            empty = torch.zeros(0, self.teacher.top_k)
            return TopK(empty.long(), empty)
        async with self.free:
            t = self.teacher.temperature if temperature is None else temperature
            return self._read(row, await self._post(row, t))

    def _body(self, row: tuple[int, ...], temperature: float) -> tuple[str, dict[str, Any]]:
        """Address and JSON of a request."""
        teacher, tokens = self.teacher, list(row)
        if teacher.speaks_vllm:
            return f"{teacher.url}/completions", {
                "model": teacher.name, "prompt": tokens, "max_tokens": 1,
                "temperature": temperature, "prompt_logprobs": teacher.top_k,
                "return_token_ids": True,
            }  # fmt: skip
        sampling = {"max_new_tokens": 1, "temperature": temperature}
        body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling}
        if teacher.hidden_states:
            body["return_hidden_states"] = True
        body |= {"return_logprob": True, "logprob_start_len": 0}
        body["top_logprobs_num"] = teacher.top_k or 0
        return f"{teacher.url}/generate", body

    async def _post(self, row: tuple[int, ...], temperature: float) -> Any:
        """The server's JSON; tries again as the class documents."""
        address, body = self._body(row, temperature)
        problem = ""
        for i in range(self.teacher.retries + 1):
            pause = min(LONGEST_PAUSE, 0.5 * 2**i)
            try:
                # httpx's own time-outs begin again with every byte.
                sent = self.client.post(address, json=body)
                response = await asyncio.wait_for(sent, self.teacher.timeout)
                if response.is_success:
                    return response.json()
                problem = f"status {response.status_code}: {_first_line(response.text)}"
                if response.status_code not in RETRIED:
                    raise ServerError(f"{address} refuses a row of {len(row)} tokens, {problem}")
                pause = max(pause, _seconds(response.headers.get("retry-after")))
            except asyncio.TimeoutError:
                problem = f"none within {self.teacher.timeout} seconds"
            except (self.httpx.TransportError, ValueError) as error:  # ValueError: half a body
                problem = f"{type(error).__name__} {error}".strip()
            if i < self.teacher.retries:
                await asyncio.sleep(pause)
        raise ServerError(
            f"{address} gave no answer in {self.teacher.retries + 1} tries ({problem}); start the "
            "server again and resume"
        )

    def _read(self, row: tuple[int, ...], found: Any) -> Answer:
        """The checked answer of a row."""
        teacher = self.teacher
        try:
            answers = found["choices"] if teacher.speaks_vllm else found
            answers = answers if isinstance(answers, list) else [answers]
            if len(answers) != 1:
                raise ValueError(f"it has {len(answers)} answers to one prompt")
            if teacher.speaks_vllm:
                entries = answers[0]["prompt_logprobs"]
                _check_tokens(teacher, row, answers[0].get("prompt_token_ids"), len(entries))
                top = vllm.top_k(entries, teacher.top_k or 1)
                # vLLM adds the prompt's own token where it isn't among the most probable.
                pairs = zip(row[1:], entries[1:], strict=True)
                held = [str(token) in entry for token, entry in pairs]
            else:
                about = answers[0]["meta_info"]
                own = about["input_token_logprobs"]
                _check_tokens(teacher, row, [entry[1] for entry in own], len(own))
                if teacher.hidden_states:
                    return _states(about["hidden_states"], row, teacher)
                entries = about["input_top_logprobs"]
                top = sglang.top_k(entries, teacher.top_k or 1)
                held = [_agrees(*pair) for pair in zip(own[1:], entries[1:], strict=True)]
            if not all(held):
                position = held.index(False) + 1
                raise ValueError(
                    f"entry {position} is not for the prompt's token {row[position]}; have the "
                    "server return an entry for each token, in the prompt's order"
                )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ServerError(f"{teacher.url}: its answer can't be used: {what}") from error
        return top


def _check_tokens(
    teacher: ServedTeacher, row: tuple[int, ...], tokens: Sequence[int] | None, count: int
) -> None:
    """Raise unless the server read the row's tokens and no others."""
    if count != len(row):
        raise ServerError(
            f"{teacher.url} returned {count} positions for a row of {len(row)} tokens; let the "
            "server read longer prompts, without truncation or added tokens"
        )
    if tokens is not None and tuple(tokens) != row:
        first = next(i for i, pair in enumerate(zip(tokens, row, strict=False)) if len({*pair}) > 1)
        raise ServerError(
            f"{teacher.url} read token {tokens[first]} at position {first} in place of "
            f"{row[first]}; send it the prompt unchanged, without added tokens"
        )


def _agrees(own: Sequence[Any], entry: Sequence[Any]) -> bool:
    """Whether SGLang's (log-probability, id) of the prompt's own token fits its most probable."""
    value, token = own[:2]
    likely = {i: log_prob for log_prob, i, *_ in entry}
    least = min(likely.values())
    return value is not None and (
        abs(value - likely[token]) < SAME if token in likely else value < least + SAME
    )


def _states(found: Any, row: tuple[int, ...], teacher: ServedTeacher) -> Tensor:
    """The prompt's states (T, D), the first entry of SGLang's list."""
    states = torch.tensor(found[0], dtype=torch.float32)
    assert teacher.head is not None
    expected = (len(row), teacher.head.weight.shape[1])
    if tuple(states.shape) != expected:
        raise ValueError(f"hidden states have shape {tuple(states.shape)}, not {expected}")
    if not states.isfinite().all():
        raise ValueError("hidden states have NaN or infinite values")
    return states


def _seconds(header: str | None) -> float:
    try:
        value = float(header or 0)
    except ValueError:  # a date
        return 0.0
    return value if math.isfinite(value) else 0.0


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
