"""Tokens that two language models share, although heads are padded and tokenizers extended."""

import warnings
from typing import Any

from fastkd.models.backbone import Model

# Largest multiple to which vocabularies are padded.
LARGEST_PADDING = 1024
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


def other_vocabulary(student: int, teacher: int) -> str:
    """Error text for a student whose vocabulary differs in size from the teacher's."""
    return (
        f"its vocabulary has {student} tokens, the teacher's {teacher}; both must read the same "
        "tokens"
    )


def shared_tokens(teacher: Model, student: Model) -> int | None:
    """Number n of leading tokens that both heads share, or None to compare whole heads.

    With tokenizers, n is the first id that only one tokenizer has. Without tokenizers, heads of
    two sizes share the smaller head's tokens if the larger head could be a padded form of it and
    the configurations' special tokens have the same ids. A warning names n.

    Raises:
        ValueError: the tokenizers have different tokens for one id, or share few ids.
    """
    sizes = student.output_size, teacher.output_size
    if not (student.predicts_words and teacher.predicts_words) or None in sizes:
        return None
    smaller = min(x for x in sizes if x is not None)
    tokenizers = [x for x in (student.tokenizer, teacher.tokenizer) if x is not None]
    if tokenizers:
        n = min(smaller, _count_shared_ids(*map(_tokens_by_id, tokenizers)))
        why = "which the tokenizers share"
    elif sizes[0] != sizes[1] and _padded(teacher, student):
        n = smaller
        why = "since the special tokens agree (pass tokenizers=... to check all tokens)"
    else:
        return None
    if sizes == (n, n):
        return None
    warnings.warn(
        f"the student's head has {sizes[0]} tokens, the teacher's {sizes[1]}: the first {n} are "
        f"compared, {why}; all further tokens have probability 0",
        stacklevel=2,
    )
    return n


def _tokens_by_id(tokenizer: Any) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for token, i in sorted(tokenizer.get_vocab().items()):
        found.setdefault(i, []).append(token)
    return found


def _count_shared_ids(*vocabularies: dict[int, list[str]]) -> int:
    first, other = vocabularies[0], vocabularies[-1]
    n = min(first.keys() ^ other.keys(), default=max(first, default=-1) + 1)
    for i in sorted(first):
        if i < n and first[i] != other[i]:
            raise ValueError(
                f"tokenizers: id {i} is {first[i][0]!r} for the student, {other[i][0]!r} for the "
                "teacher; use models with one tokenizer, or pass "
                "tokenizers=VocabularyMatch.of(student's, teacher's)"
            )
    if 2 * n < max(map(len, vocabularies)):
        raise ValueError(
            f"tokenizers: they have {len(first)} and {len(other)} tokens but share only ids below "
            f"{n}; use models with one tokenizer, or pass "
            "tokenizers=VocabularyMatch.of(student's, teacher's)"
        )
    return n


def _padded(teacher: Model, student: Model) -> bool:
    """Whether the larger head can be a padded form of the smaller, by the special tokens' ids."""
    sizes = [x.output_size or 0 for x in (teacher, student)]
    configs: list[Any] = [getattr(model, "config", None) for model in (teacher, student)]
    if None in configs or max(sizes) - min(sizes) >= LARGEST_PADDING:
        return False
    texts = [x.get_text_config() if hasattr(x, "get_text_config") else x for x in configs]
    shared = range(min(sizes))
    pairs = [[_ids(getattr(x, name, None)).intersection(shared) for x in texts] for name in SPECIAL]
    both = [(a, b) for a, b in pairs if a and b]
    return bool(both) and all(a & b for a, b in both)


def _ids(given: Any) -> set[int]:
    """Ids of a special token, of which a configuration may hold none, one or several."""
    return set() if given is None else set(given if isinstance(given, list) else [given])
