"""Log-probabilities of finished chat completions, as a `TopK`. No client is imported."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastkd._core import check
from fastkd.integrations._served import NONE
from fastkd.lm.targets import SLACK, TopK
from fastkd.lm.vocabulary_match import token_bytes

__all__ = ["Read", "top_k"]


class Read(NamedTuple):
    """What was read of an answer.

    Attributes:
        top_k: (n, K); row j predicts token j of the answer. A token that the teacher doesn't have
            has log-probabilities −inf: its soft target is zero.
        read: tokens of the answer that the teacher has too.
        probable: probable tokens at these places.
        unknown: those of them that are no token of the student, and are left to the tail.
    """

    top_k: TopK
    read: int
    probable: int
    unknown: int


def top_k(content: Sequence[Mapping[str, Any]], ids: Sequence[int], tokenizer: Any, k: int) -> Read:
    """The k most probable tokens at each token of an answer, from a finished chat completion.

    Such completions have texts and bytes of tokens, no ids. A place is read where the teacher's
    token is the student's too, and a probable token where its text is one token of the student.

    Args:
        content: ``choice["logprobs"]["content"]`` of an OpenAI-like server (``logprobs=true,
            top_logprobs=k`` in the request): "token", "bytes", "logprob" and "top_logprobs".
        ids: (n,) the answer in the student's tokens, perhaps with more text around it.
        tokenizer: the student's.
        k: tokens kept at a position.

    Raises:
        ValueError, TypeError: content of another form or of another text, NaN, or a log-probability
            above 0.
    """
    check.positive_int("k", k)
    table = token_bytes(tokenizer)
    known = {text: i for i, text in sorted(table.items(), reverse=True)}
    texts = [table.get(i, b"\0") for i in ids]
    entries = [(_bytes(entry, n), entry) for n, entry in enumerate(content)]
    answer = b"".join(text for text, _ in entries)
    whole = b"".join(texts)
    start = whole.find(answer)
    if start < 0 or not answer:
        raise ValueError(f"content is not a part of the answer's text: {answer[:40]!r}")
    ends = itertools.accumulate(map(len, texts), initial=0)
    places = dict(zip(ends, range(len(texts)), strict=False))  # tokens by their first bytes
    found = torch.zeros(len(ids), k, dtype=torch.int64)
    values = torch.full((len(ids), k), -torch.inf)
    read = probable = unknown = 0
    at = start
    for n, (text, entry) in enumerate(entries):
        j = places.get(at, -1)
        at += len(text)
        if j < 0 or texts[j] != text:
            continue
        read += 1
        pairs = {_bytes(x, n): _value(x, n) for x in [entry, *(entry.get("top_logprobs") or ())]}
        likely = [(known[x], value) for x, value in pairs.items() if x in known]
        probable, unknown = probable + len(pairs), unknown + len(pairs) - len(likely)
        likely = sorted(likely, key=lambda pair: -pair[1])[:k]
        found[j, : len(likely)] = torch.tensor([i for i, _ in likely])
        values[j, : len(likely)] = torch.tensor([value for _, value in likely])
    return Read(TopK(found, values), read, probable, unknown)


def _bytes(entry: Any, n: int) -> bytes:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("token"), str):
        raise TypeError(f'content[{n}] must have "token" and "logprob", got {entry!r:.60}')
    given = entry.get("bytes")
    return entry["token"].encode() if given is None else bytes(given)


def _value(entry: Any, n: int) -> float:
    value = entry.get("logprob")
    if not isinstance(value, int | float) or math.isnan(value) or value > SLACK:
        raise ValueError(f"content[{n}] must have log-probabilities of at most 0, got {value!r}")
    return value if value > NONE else -math.inf
