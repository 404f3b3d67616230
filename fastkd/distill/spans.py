"""Spans of text that align the tokens of two tokenizers, by character offsets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.numerics import values_readable
from fastkd.models.spans import paired_positions

__all__ = ["TwoTokenizers", "align_spans"]


def align_spans(student_offsets: Tensor, teacher_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Span of each token: the shortest pieces of text that end with a token of both tokenizers.

    Args:
        student_offsets: (B, N, 2) start and end character of each token in its text, as fast
            tokenizers return them (``return_offsets_mapping``); equal for tokens without text.
        teacher_offsets: (B, M, 2), of the same texts.

    Returns:
        (B, N) and (B, M) span numbers from 0. They are −1 for tokens without text, tokens after
        the last shared end, and tokens before the first text that both inputs include.

    >>> ours = torch.tensor([[[0, 0], [0, 4], [4, 7], [8, 12]]])  # [CLS] play ##ing well
    >>> theirs = torch.tensor([[[0, 7], [7, 9], [9, 12]]])  # playing _w ell
    >>> align_spans(ours, theirs)
    (tensor([[-1,  0,  0,  1]]), tensor([[0, 1, 1]]))
    """
    sides = [student_offsets.cpu(), teacher_offsets.cpu()]
    for name, x in zip(("student_offsets", "teacher_offsets"), sides, strict=True):
        check.shape(name, x, (len(sides[0]), x.shape[1], 2), "(B, tokens, 2) of the same texts")
    spans = [torch.full(x.shape[:2], -1, device=x.device) for x in sides]
    for row in range(len(sides[0])):
        offsets = [x[row][x[row, :, 1] > x[row, :, 0]] for x in sides]  # (tokens with text, 2)
        if not all(map(len, offsets)):
            continue
        begin = max(x[:, 0].min() for x in offsets)
        ours, theirs = (x[x[:, 1] > begin, 1].unique() for x in offsets)
        shared = ours[torch.isin(ours, theirs)]  # ascending
        if len(shared) and any(_begins_inside_token(x, begin) for x in offsets):
            begin, shared = shared[0], shared[1:]
        for numbers, x in zip(spans, sides, strict=True):
            start, end = x[row].T.contiguous()
            found = torch.searchsorted(shared, end)
            real = (end > start) & (end > begin) & (found < len(shared))
            numbers[row] = torch.where(real, found, -1)
    return spans[0].to(student_offsets.device), spans[1].to(teacher_offsets.device)


def _begins_inside_token(tokens: Tensor, begin: Tensor) -> bool:
    """Whether a token ends before ``begin`` and another token crosses it."""
    start, end = tokens.T
    return bool((end <= begin).any() and ((start < begin) & (end > begin)).any())


class TwoTokenizers:
    """Texts in the tokens of the student and of the teacher, with their spans.

    ``tokenizers(texts, pairs=None)`` returns the arguments of a Distiller: the student's inputs,
    the teacher's with the prefix ``teacher_``, ``student_spans`` and ``teacher_spans``.

    Args:
        student, teacher: fast tokenizers of transformers, by keyword.
        options: options of both tokenizers, such as ``truncation=True, max_length=128``.

    Raises:
        ValueError: a tokenizer without offsets or without a padding token, or texts as lists of
            words, whose offsets start again in each word.
    """

    def __init__(self, *, student: Any, teacher: Any, **options: Any) -> None:
        if options.get("is_split_into_words"):
            raise ValueError(
                "is_split_into_words: offsets of words are not offsets in the text; join the words"
            )
        for name, tokenizer in (("student", student), ("teacher", teacher)):
            if not getattr(tokenizer, "is_fast", False):
                raise ValueError(f"{name}: its tokenizer returns no offsets; load the fast one")
            if tokenizer.pad_token is None:
                raise ValueError(
                    f"{name}: its tokenizer has no padding token; set "
                    "tokenizer.pad_token = tokenizer.eos_token"
                )
        self.student, self.teacher, self.options = student, teacher, options

    def __call__(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        student, *student_offsets = self._encode(self.student, texts, pairs)
        teacher, *teacher_offsets = self._encode(self.teacher, texts, pairs)
        # First and second texts are aligned separately, since the first may be truncated.
        first, second = map(align_spans, student_offsets, teacher_offsets)
        count = torch.cat(first, 1).amax(1, keepdim=True) + 1
        spans = [
            torch.where(x >= 0, x + count, before) for before, x in zip(first, second, strict=True)
        ]
        return {
            **student,
            **{f"teacher_{name}": x for name, x in teacher.items()},
            "student_spans": spans[0],
            "teacher_spans": spans[1],
        }

    def _encode(
        self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Inputs, and the token offsets (B, N, 2) in the first and in the second texts."""
        second = None if pairs is None else list(pairs)
        options = {"padding": True, "return_offsets_mapping": True, "return_tensors": "pt"}
        encoded = tokenizer(list(texts), second, **options, **self.options)
        offsets = encoded.pop("offset_mapping")
        ids = [
            [-1 if i is None else i for i in encoded.sequence_ids(row)] for row in range(len(texts))
        ]
        sequence = torch.tensor(ids)[..., None]  # −1 for special tokens, some of which have offsets
        return dict(encoded), offsets * (sequence == 0), offsets * (sequence == 1)


def check_paired_tokens(
    method: str, spans: tuple[Tensor, Tensor], ids: tuple[Any, Any], labels: Any
) -> None:
    """Raise unless each span pairs one student token with one teacher token of the same id.

    ``spans`` and ``ids`` are (student's, teacher's). Values are checked only if reading them does
    not wait for a device.
    """
    what = f"{method} compares the predictions for each token, and the teacher has its own inputs"
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels: {what}; pass labels of the tokens to compare, −100 elsewhere")
    if not all(map(values_readable, spans)):
        return
    for row, (student, teacher) in enumerate(zip(*spans, strict=True)):
        for name, x in (("student", student), ("teacher", teacher)):
            numbers, counts = x[x >= 0].unique(return_counts=True)
            if bool((counts > 1).any()):
                span = int(numbers[counts > 1][0])
                raise ValueError(
                    f"{name}_spans: {what}, but span {span} of row {row} has several tokens; "
                    "pair the tokens one by one, or set the weight of soft targets to 0"
                )
    if not all(isinstance(x, Tensor) for x in ids):
        return
    paired = paired_positions(*spans)
    theirs = ids[1].gather(1, paired.clamp(min=0))
    wrong = (paired >= 0) & (ids[0] != theirs)
    if bool(wrong.any()):
        row, column = (int(x) for x in wrong.nonzero()[0])
        raise ValueError(
            f"teacher_spans: {what}, but token {column} of row {row} has the id "
            f"{int(ids[0][row, column])}, its pair of the teacher {int(theirs[row, column])}; "
            "pair equal tokens"
        )
