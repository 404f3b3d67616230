"""Whether two tokenizers are one: the same ids for the same texts."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastkd.train.tasks.base import Corpus

# Rows that are read with both tokenizers, characters of each, and rows in memory at a time.
ROWS, CHARACTERS, BATCH = 1024, 4096, 32
# Tokens of a row that a message shows.
SHOWN = 8


class Difference(NamedTuple):
    """A row that two tokenizers read differently, and the tokens from the first other one."""

    row: int
    first: list[str]
    second: list[str]


def sample(corpus: Corpus) -> tuple[list[int], list[str]]:
    """Numbers and beginnings of texts of the first training rows."""
    train = corpus.train
    numbers: list[int] = []
    found: list[str] = []
    for start in range(0, min(len(train), ROWS), BATCH):
        rows = train.select(list(range(start, min(start + BATCH, len(train), ROWS))))
        texts, pairs = type(corpus.task).texts(rows)
        both = [*texts, *(pairs or ())]
        # A row may have several texts.
        numbers += [rows.number(i * len(rows) // len(texts)) for i in range(len(texts))]
        numbers += numbers[-len(texts) :] * bool(pairs)
        found += [text[:CHARACTERS] for text in both]
    return numbers, found


def difference(
    first: Any, second: Any, rows: tuple[list[int], list[str]], special: bool = True
) -> Difference | None:
    """The first of ``rows`` with other ids; ``special``: special tokens around a text count."""
    both = (_ids(each, rows[1], special) for each in (first, second))
    for number, ids, others in zip(rows[0], *both, strict=True):
        if ids != others:
            pairs = enumerate(itertools.zip_longest(ids, others))
            at = next(i for i, (one, other) in pairs if one != other)
            part = slice(max(0, at - 1), at - 1 + SHOWN)
            return Difference(
                number,
                first.convert_ids_to_tokens(ids[part]),
                second.convert_ids_to_tokens(others[part]),
            )
    return None


def same_tokens(first: Any, second: Any, rows: tuple[list[int], list[str]], special: bool) -> bool:
    """Whether two tokenizers are one for ``rows``: one may have further tokens, with further ids.

    Two vocabularies of which one holds the other may still cut a text differently.
    """
    one, other = first.get_vocab().items(), second.get_vocab().items()
    nested = one <= other or one >= other
    return nested and difference(first, second, rows, special) is None


def other_token(first: Any, second: Any, texts: Sequence[str]) -> tuple[int, str, str] | None:
    """An id of ``texts`` read by ``first`` that is another token of ``second``, and both tokens."""
    own = {i: token for token, i in second.get_vocab().items()}
    known = first.get_vocab()
    used = {i for ids in _ids(first, texts, True) for i in ids}
    for token, i in sorted(known.items(), key=lambda pair: pair[1]):
        if i in used and own.get(i, token) != token:
            return i, token, own[i]
    return None


def _ids(tokenizer: Any, texts: Sequence[str], special: bool) -> Iterator[list[int]]:
    for start in range(0, len(texts), BATCH):
        part = list(texts[start : start + BATCH])
        yield from tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"]
