"""Which words two language models share: heads are padded, and tokenizers grow."""

import warnings
from typing import Any

from fastkd.distill.backbone import Model

# Vocabularies are padded to multiples of up to this.
LARGEST_PADDING = 1024
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


def other_vocabulary(student: int, teacher: int) -> str:
    """What is wrong with a student whose vocabulary has another size than the teacher's."""
    return (
        f"its vocabulary has {student} tokens, the teacher's {teacher}; both must read the same "
        "tokens"
    )


def shared_words(teacher: Model, student: Model) -> int | None:
    """n, where the first n words of both heads are the same and others stand behind them.

    None where all are the same, and where nothing says that any are. By tokenizers n is the first
    id that only one of them knows. Without them heads of two sizes share those of the smaller if
    the larger could be its padding and both configurations give their special tokens the same ids.
    Says it once.

    Raises:
        ValueError: the tokenizers have two tokens for one id, or few ids in common.
    """
    sizes = student.output_size, teacher.output_size
    if not (student.predicts_words and teacher.predicts_words) or None in sizes:
        return None
    least = min(x for x in sizes if x is not None)
    tokenizers = [x for x in (student.tokenizer, teacher.tokenizer) if x is not None]
    if tokenizers:
        n = min(least, _ids_in_common(*map(_by_id, tokenizers)))
        why = "that the tokenizers know as the same"
    elif sizes[0] != sizes[1] and _padded(teacher, student):
        n = least
        why = "as their configurations' special tokens agree (tokenizers=... has that checked)"
    else:
        return None
    if sizes == (n, n):
        return None
    warnings.warn(
        f"the student's head has {sizes[0]} words, the teacher's {sizes[1]}: their first {n} are "
        f"compared, {why}, and the others have no probability",
        stacklevel=2,
    )
    return n


def _by_id(tokenizer: Any) -> dict[int, list[str]]:
    """The tokens of each id."""
    found: dict[int, list[str]] = {}
    for token, i in sorted(tokenizer.get_vocab().items()):
        found.setdefault(i, []).append(token)
    return found


def _ids_in_common(*known: dict[int, list[str]]) -> int:
    first, other = known[0], known[-1]
    n = min(first.keys() ^ other.keys(), default=max(first, default=-1) + 1)
    for i in sorted(first):
        if i < n and first[i] != other[i]:
            raise ValueError(
                f"the student's tokenizer has the token {first[i][0]!r} for the id {i}, the "
                f"teacher's {other[i][0]!r}; predictions of different words can't be compared"
            )
    if 2 * n < max(map(len, known)):
        raise ValueError(
            f"the tokenizers have {len(first)} and {len(other)} tokens but only those below the id "
            f"{n} in common; predictions of different words can't be compared"
        )
    return n


def _padded(teacher: Model, student: Model) -> bool:
    """Whether configurations say that the ids of heads of two sizes are the same."""
    sizes = [x.output_size or 0 for x in (teacher, student)]
    configs: list[Any] = [getattr(model, "config", None) for model in (teacher, student)]
    if None in configs or max(sizes) - min(sizes) >= LARGEST_PADDING:
        return False
    texts = [x.get_text_config() if hasattr(x, "get_text_config") else x for x in configs]
    words = range(min(sizes))
    pairs = [[_ids(getattr(x, name, None)).intersection(words) for x in texts] for name in SPECIAL]
    both = [(a, b) for a, b in pairs if a and b]
    return bool(both) and all(a & b for a, b in both)


def _ids(given: Any) -> set[int]:
    """Of a configuration's special token: none, one or several."""
    return set() if given is None else set(given if isinstance(given, list) else [given])
