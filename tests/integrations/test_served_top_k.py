"""Log-probabilities of vLLM and SGLang, written by their documented formats, read as a `TopK`."""

import json
import math
from dataclasses import asdict, dataclass

import pytest
import torch

from fastkd import TopK, soft_target_loss
from fastkd.integrations import sglang, vllm
from tests.support.compare import raises


@dataclass
class Logprob:
    """As vLLM's."""

    logprob: float


V, K = 11, 3
TOKENS = [4, 0, 9, 2, 7]
torch.manual_seed(0)
LOGITS = torch.randn(len(TOKENS), V)  # row i predicts token i + 1
LOG_PROBS = LOGITS.log_softmax(-1)


def of_vllm():
    """The prompt's own token first, as vLLM has it."""
    rows = zip(LOG_PROBS, TOKENS[1:], strict=False)
    found = [(row, [token, *row.topk(K).indices.tolist()]) for row, token in rows]
    return [None, *({i: Logprob(row[i].item()) for i in ids} for row, ids in found)]


def of_sglang():
    tops = LOG_PROBS[:-1].topk(K)
    rows = zip(tops.values.tolist(), tops.indices.tolist(), strict=True)
    return [None, *([(p, i, None) for p, i in zip(*row, strict=True)] for row in rows)]


@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("read", "made"), [(vllm.top_k, of_vllm), (sglang.top_k, of_sglang)])
def test_entry_i_is_the_students_row_before(read, made, as_json, k):
    entries = json.loads(json.dumps(made(), default=asdict)) if as_json else made()
    top, expected = read(entries, k), LOG_PROBS[:-1].topk(k)
    assert isinstance(top, TopK) and top.tail == "bucket"
    assert torch.equal(top.ids, expected.indices)
    assert torch.equal(top.log_probs, expected.values)
    assert soft_target_loss(LOGITS[:-1], top).abs() < 1e-6  # the teacher itself


@pytest.mark.parametrize("value", [-math.inf, -9999.0])  # the server's JSON has no infinity
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_minus_infinity_has_no_effect(value, divergence):
    top = vllm.top_k([{}, {5: Logprob(value), 2: Logprob(math.log(0.5))}], 2)
    assert top.ids.tolist() == [[2, 5]] and top.log_probs[0, 1] == -math.inf
    alone = TopK(top.ids[:, :1], top.log_probs[:, :1])
    losses = [soft_target_loss(LOGITS[:1], t, divergence=divergence) for t in (top, alone)]
    torch.testing.assert_close(*losses)


def one(**values):
    return [None, {i: {"logprob": value} for i, value in zip((1, 2), values.values(), strict=True)}]


VLLM = [
    ([None], "prompt_logprobs must have at least two positions, got 1"),
    (one(a=-1.0, b=-2.0)[1:] * 2, "prompt_logprobs must begin with None"),
    ([None, None], r"prompt_logprobs\[1\] has 0 tokens but k is 2; request at least k"),
    (one(a=0.5, b=-1.0), r"prompt_logprobs\[1\] .* at most 0, got 0.5"),
    (one(a=math.nan, b=-1.0), r"prompt_logprobs\[1\] .* at most 0, got nan"),
    (one(a=-0.5, b=-0.25), r"prompt_logprobs\[1\] .* add up to 1\.372; .* not logits"),
    (one(a=-math.inf, b=-math.inf), r"prompt_logprobs\[1\] .* finite log-probability"),
    (one(a=None, b=-1.0), r"prompt_logprobs\[1\] must map token ids to Logprob"),
    ([None, {"the": Logprob(-1.0)}], r"prompt_logprobs\[1\] must have token ids as keys"),
    ([None, {-1: Logprob(-1.0), 2: Logprob(-1.0)}], r"token ids from 0, got -1"),
    ([None, {"1": Logprob(-1.0), 1: Logprob(-1.0)}], r"must not have a token twice"),
    (None, "must be a list with an entry for each position, got NoneType"),
    ([None, [1, 2]], r"prompt_logprobs\[1\] must be a dict or None, got list"),
]
SGLANG = [
    ([None, [(-1.0, 3, None)]], r"input_top_logprobs\[1\] has 1 tokens but k is 2"),
    ([None, [("a", 3), (-1.0, 2)]], r"input_top_logprobs\[1\] must have \(log-probability"),
    ([None, [(-1.0,), (-1.0, 2)]], r"input_top_logprobs\[1\] must have \(log-probability"),
    ("abc", "must be a list with an entry for each position, got str"),
]


def test_wrong_entries_raise_one_sentence():
    for reader, table in ((vllm.top_k, VLLM), (sglang.top_k, SGLANG)):
        for entries, message in table:
            raises(message, reader, entries, 2, error=(TypeError, ValueError))
    raises("k must be", vllm.top_k, of_vllm(), 0)
