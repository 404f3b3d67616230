"""The calls of fastkd/lm/soft_targets.py; see `tools.calls`."""

import itertools
import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastkd
from fastkd import Divergence
from fastkd.lm import log_probs as token_log_probs
from fastkd.lm.divergences import NAMES
from fastkd.lm.soft_targets import DIVERGENCES, REDUCTIONS
from fastkd.lm.targets import OF_WHOLE_MASS
from tools.calls import (
    ALL_TYPES,
    BOTH,
    ON_A_GPU,
    Call,
    Calls,
    Made,
    given,
    learns,
    mask_of,
    numbers,
)


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Made]:
    return {
        "student_logits": learns(*shape, dtype=dtype),
        "teacher_logits": given(*shape, dtype=dtype),
    }


def heads(*leading: int, V: int, student=learns, dtype: torch.dtype) -> dict[str, Made]:
    return {
        "student_hidden": student(*leading, 48, dtype=dtype),
        "student_head": student(V, 48, dtype=dtype),
        "teacher_hidden": given(*leading, 64, dtype=dtype),
        "teacher_head": given(V, 64, dtype=dtype),
    }


def whole_head(rows: int, V: int, dtype: torch.dtype, top_k: str, **options: Any) -> Tensor:
    """A call of `linear_soft_target_loss` with all that a head has, or a teacher's top k."""
    inputs = {name: x.tensor() for name, x in heads(rows, V=V, dtype=dtype).items()}
    bias = learns(V, dtype=dtype).tensor()
    inputs["student_head"] = fastkd.Head(inputs["student_head"], bias, 0.5, 30.0)
    if top_k:
        inputs |= {"teacher_hidden": most_probable(given(rows, 4).tensor(), top_k)}
        inputs["teacher_head"] = None
    task = fastkd.CrossEntropy(numbers(rows).tensor(), label_smoothing=0.1, z_loss=0.1)
    loss, terms = fastkd.linear_soft_target_loss(**inputs, task=task, return_terms=True, **options)
    return loss + terms["soft"]


def calls_of_heads() -> Calls:
    share = Divergence("js", beta=0.2)
    for divergence, dtype, reduction, top_k in itertools.product(
        ("forward_kl", share), ALL_TYPES, REDUCTIONS, ("", "bucket", "renormalise")
    ):
        options = {"rows": 6, "V": 1025, "dtype": dtype, "top_k": top_k, "vocabulary": 1000}
        options |= {"divergence": divergence, "reduction": reduction, "chunk_bytes": 1 << 15}
        yield Call(whole_head, {}, options)
    others = [Divergence(name) for name in NAMES if name not in DIVERGENCES]
    for divergence, dtype, V in itertools.product([*others, share], ALL_TYPES, (50, 1025, 30522)):
        inputs = logits(6, V, dtype=dtype)
        yield Call(fastkd.soft_target_loss, inputs, {"divergence": divergence})


def most_probable(logits: Tensor, tail: str) -> fastkd.TopK:
    """A teacher's top k, with logits (..., k), and a tail of probability 0.1."""
    ids = numbers(*logits.shape).tensor()
    return fastkd.TopK(ids, logits.log_softmax(-1) + math.log(0.9), tail)


def of_top_k(student_logits: Tensor, of_teacher: Tensor, tail: str, **options: Any) -> Tensor:
    """A call of `soft_target_loss` with a teacher's top k."""
    return fastkd.soft_target_loss(student_logits, most_probable(of_teacher, tail), **options)


def calls_of_top_k() -> Calls:
    for dtype, tail, masked, V in itertools.product(
        ALL_TYPES, ("bucket", "renormalise"), BOTH, (1025, 1040, 152_064)
    ):
        inputs = {"student_logits": learns(2, 3, V, dtype=dtype), "of_teacher": given(2, 3, 64)}
        yield Call(of_top_k, inputs | mask_of(2, 3, masked=masked), {"tail": tail})
    forms = [*DIVERGENCES, *(Divergence(name) for name in NAMES if name not in DIVERGENCES)]
    for divergence, temperature, k, masked in itertools.product(
        forms, (1.0, 20.0), (64, 1030), BOTH
    ):
        inputs = {"student_logits": learns(2, 3, 1040), "of_teacher": given(2, 3, k)}
        options = {"tail": "bucket", "divergence": divergence, "temperature": temperature}
        yield Call(of_top_k, inputs | mask_of(2, 3, masked=masked), options)


def of_draft(
    drafts: Tensor | None = None,
    soft_mask: Tensor | None = None,
    mass: str = "renormalised",
    **inputs: Any,
) -> Tensor:
    """A call of `linear_soft_target_loss` with a `fastkd.Draft`."""
    draft = fastkd.Draft(drafts, mass, soft_mask=soft_mask)
    return fastkd.linear_soft_target_loss(draft=draft, **inputs)


def calls_of_drafts() -> Calls:
    """Weights of positions, and a student's part of the vocabulary."""
    forms = [*DIVERGENCES, *(Divergence(name) for name in NAMES if name not in DIVERGENCES)]
    for divergence, dtype, masked in itertools.product(forms, ALL_TYPES, BOTH):
        extras = mask_of(2, 3, masked=masked) | {"weights": given(2, 3, dtype=torch.bfloat16)}
        yield Call(
            fastkd.soft_target_loss,
            logits(2, 3, 1025, dtype=dtype) | extras,
            {"divergence": divergence},
        )
    whole = ("forward_kl", "reverse_kl", *map(Divergence, OF_WHOLE_MASS[2:]))
    for divergence, dtype, mass in itertools.product(whole, ALL_TYPES, ("renormalised", "whole")):
        inputs = heads(6, V=1025, dtype=dtype) | {"student_head": learns(50, 48, dtype=dtype)}
        inputs |= {"drafts": numbers(50), "weights": given(6)}
        yield Call(of_draft, inputs, {"divergence": divergence, "mass": mass})


def calls_of_two_vocabularies() -> Calls:
    """A teacher of 70 tokens, 40 of which match some of the student's 50."""
    ids = torch.arange(40)
    match = fastkd.VocabularyMatch(ids, ids + 20, student_size=50, teacher_size=70)
    for unmatched, dtype in itertools.product(("renormalise", "bucket", "sorted"), ALL_TYPES):
        options = {"vocabulary": match, "unmatched": unmatched}
        inputs = logits(6, 50, dtype=dtype) | {"teacher_logits": given(6, 70, dtype=dtype)}
        yield Call(fastkd.soft_target_loss, inputs, options)
        inputs = heads(6, V=50, dtype=dtype) | {"teacher_head": given(70, 64, dtype=dtype)}
        yield Call(of_draft, inputs | {"soft_mask": numbers(6)}, options)


def of_labels(hidden: Tensor, head: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """A call of `linear_soft_target_loss` without soft targets."""
    task = fastkd.CrossEntropy(labels, label_smoothing=0.1, z_loss=0.1)
    given = hidden.detach(), head.detach()
    return fastkd.linear_soft_target_loss(
        hidden, head, *given, soft_weight=0.0, task=task, **options
    )


def of_tokens(
    hidden: Tensor, head: Tensor, ids: Tensor, backend: str = "auto", **options: Any
) -> Tensor:
    """A call of `log_probs`, which has no such option, by a backend."""
    backend_of = token_log_probs.backend_of
    chosen = mock.patch.object(
        token_log_probs, "backend_of", lambda _, *call: backend_of(backend, *call)
    )
    with chosen:
        return fastkd.log_probs(hidden, head, ids, **options)


def calls_of_labels() -> Calls:
    """Cross-entropy alone, and log-probabilities, which its kernel computes too."""
    for dtype, V, reduction in itertools.product(
        ALL_TYPES, (50, 64, 1040, 1041, 16_400, 16_401), REDUCTIONS
    ):
        inputs = {"hidden": learns(6, 48, dtype=dtype), "head": learns(V, 48, dtype=dtype)}
        options = {"reduction": reduction, "chunk_bytes": 1 << 24}
        yield Call(of_labels, inputs | {"labels": numbers(6)}, options)
        yield Call(of_tokens, inputs | {"ids": numbers(6, 4)}, {"temperature": 2.0})


def calls() -> Calls:
    kinds = (torch.int8, torch.int64, *ALL_TYPES)
    denominators = [7, 2.5, *(numbers(dtype=kind) for kind in kinds)]
    choices: list[tuple[str, Any]] = [(reduction, None) for reduction in REDUCTIONS]
    choices += [("batchmean", number) for number in denominators]
    for divergence, dtype, masked, V, (reduction, number) in itertools.product(
        DIVERGENCES, ALL_TYPES, BOTH, (1, 50, 1024, 1025, 1040, 16_400, 30522, 152_064), choices
    ):
        usual = number is None and reduction == REDUCTIONS[0]
        if not usual and V not in (1024, 1025):
            continue
        options = {"divergence": divergence, "reduction": reduction}
        extras = mask_of(2, 3, masked=masked) | {"denominator": number}
        yield Call(fastkd.soft_target_loss, logits(2, 3, V, dtype=dtype) | extras, options)
        if not isinstance(number, Made):
            inputs = heads(2, 3, V=V, dtype=dtype) | extras
            yield Call(fastkd.linear_soft_target_loss, inputs, options)
    for divergence, reduction, backend in itertools.product(DIVERGENCES, REDUCTIONS, ON_A_GPU):
        options = {"divergence": divergence, "reduction": reduction, "backend": backend}
        for of in (fastkd.SoftTargetLoss, fastkd.soft_target_loss):
            yield Call(of, logits(6, 50), options)
        inputs = heads(3, V=50, student=given, dtype=torch.float32)
        yield Call(fastkd.linear_soft_target_loss, inputs, options)
    yield from calls_of_heads()
    yield from calls_of_labels()
    yield from calls_of_top_k()
    yield from calls_of_drafts()
    yield from calls_of_two_vocabularies()
    extras = {"mask": numbers(6), "denominator": numbers(), "weights": given(6)}
    yield Call(fastkd.SoftTargetLoss, logits(6, 50) | extras, {})
    for divergence, dtype, masked, V in itertools.product(
        DIVERGENCES, ALL_TYPES, BOTH, (50, 1024, 1025, 1040)
    ):
        hot = {"divergence": divergence, "temperature": 20.0}
        inputs = logits(2, 3, V, dtype=dtype) | mask_of(2, 3, masked=masked)
        yield Call(fastkd.soft_target_loss, inputs, hot)
    for divergence in ("forward_kl", "adaptive_kl"):
        yield Call(fastkd.soft_target_loss, logits(2**15, 152_064), {"divergence": divergence})
