"""Token ids of two vocabularies that denote the same text."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from fastkd._core import check

# eos comes first: where one token has several roles, it is matched as the end of a text.
ROLES = ("eos", "bos", "pad", "unk", "mask", "cls", "sep")
Side = Literal["student", "teacher"]
ANSWER = "fastkdanswer"  # in a chat template, before its end of turn


@dataclass(frozen=True, eq=False, repr=False)
class VocabularyMatch:
    """Pairs of a student's and a teacher's token ids that denote the same text.

    Args:
        student_ids: (n,) int64, the student's ids, none twice.
        teacher_ids: (n,) int64, the teacher's id for each of them, none twice.
        student_size, teacher_size: number of tokens in each vocabulary.
        by_role: for the repr, the pairs whose texts differ, each as role and two tokens.

    Raises:
        ValueError, TypeError: ids that are not int64, of unequal length, out of range or repeated,
            or sizes that aren't positive integers.

    >>> match = VocabularyMatch(torch.tensor([0, 2]), torch.tensor([5, 1]), 4, 8)
    >>> match
    VocabularyMatch(2 of 4 student tokens (50.0 %), 2 of 8 teacher tokens (25.0 %))
    >>> match.coverage([0, 0, 2, 3])
    0.75
    """

    student_ids: Tensor
    teacher_ids: Tensor
    student_size: int
    teacher_size: int
    by_role: tuple[tuple[str, str, str], ...] = ()
    _columns: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for side in ("student", "teacher"):
            size = getattr(self, f"{side}_size")
            check.positive_int(f"{side}_size", size)
            name = f"{side}_ids"
            ids = getattr(self, f"{side}_ids")
            if not isinstance(ids, Tensor):
                raise TypeError(f"{name} must be a Tensor, got {type(ids).__name__}")
            if ids.dtype != torch.int64:
                raise TypeError(f"{name} must be int64, got {ids.dtype}")
            if ids.ndim != 1:
                raise ValueError(f"{name} must have shape (n,), got {tuple(ids.shape)}")
            outside = ids[(ids < 0) | (ids >= size)]
            if len(outside):
                raise ValueError(f"{name} must be token ids 0 to {size - 1}, got {int(outside[0])}")
            values, counts = ids.unique(return_counts=True)
            if len(values) < len(ids):
                raise ValueError(
                    f"{name} must not repeat an id, got {int(values[counts > 1][0])} twice"
                )
        if len(self.student_ids) != len(self.teacher_ids):
            raise ValueError(
                "teacher_ids must have one id for each of student_ids, got "
                f"{len(self.teacher_ids)} for {len(self.student_ids)}"
            )
        self.columns(self.student_ids.device)  # not in a compiled graph

    @classmethod
    def of(cls, student_tokenizer: Any, teacher_tokenizer: Any) -> "VocabularyMatch":
        """Match two Hugging Face tokenizers by the text that their tokens stand for.

        Tokens are compared as bytes, in which a space marks the start of a word: byte-level BPE's
        "Ġthe", SentencePiece's "▁the" and WordPiece's "the" are " the"; "the", "the" and "##the"
        are "the". A punctuation mark of WordPiece is compared without a space, since WordPiece
        splits it from its word. "<0x0A>" is a byte. A text that has two tokens in a vocabulary is
        matched by the one that isn't a byte token, then by the lower id; the other one matches the
        token of the same spelling and convention. Case and accents count.
        Special tokens never match text. A token that one or both declare special is the token of
        the same name, first of all. Then they match as the token that ends a turn in both chat
        templates, then by role (eos, bos, pad, unk, mask, cls, sep); the repr lists the pairs of
        the last two kinds.

        The sizes are the tokenizers'. A model whose head has more rows (padding) takes them by
        ``dataclasses.replace(match, student_size=rows)``.

        Raises:
            TypeError: a tokenizer that isn't one of transformers.
        """
        for name, tokenizer in (("student", student_tokenizer), ("teacher", teacher_tokenizer)):
            if not hasattr(tokenizer, "get_vocab"):
                raise TypeError(
                    f"{name}_tokenizer must be a tokenizer of transformers, got "
                    f"{type(tokenizer).__name__}"
                )
        tokenizers = student_tokenizer, teacher_tokenizer
        specials = set().union(*map(_special_names, tokenizers))
        students, teachers = (_texts(tokenizer, specials) for tokenizer in tokenizers)
        pairs = {students[text]: teachers[text] for text in students.keys() & teachers.keys()}
        taken, by_role = set(pairs.values()), []
        for role, (student, teacher) in _roles(*tokenizers).items():
            if student not in pairs and teacher not in taken:
                pairs[student] = teacher
                taken.add(teacher)
                ours, theirs = map(_token, tokenizers, (student, teacher))
                by_role.append((role, ours, theirs))
        ordered = sorted(pairs.items())
        return cls(
            torch.tensor([student for student, _ in ordered], dtype=torch.int64),
            torch.tensor([teacher for _, teacher in ordered], dtype=torch.int64),
            _size(student_tokenizer),
            _size(teacher_tokenizer),
            tuple(by_role),
        )

    def coverage(self, ids: Tensor | Sequence[int], side: Side = "student") -> float:
        """Share of a text's tokens that have a match, 0 to 1.

        Args:
            ids: the text's token ids, of any shape, in the vocabulary of ``side``.
            side: "student" or "teacher".

        Raises:
            ValueError, TypeError: no ids, ids of another vocabulary, or an unknown side.
        """
        check.choice("side", side, ("student", "teacher"))
        if isinstance(ids, str):
            raise TypeError("ids must be token ids, got a str; tokenize the text")
        tokens = torch.as_tensor(ids)
        if not tokens.numel():
            raise ValueError("ids must have at least one token, got none")
        check.integers("ids", tokens)
        check.ids_below("ids", tokens, getattr(self, f"{side}_size"))
        matched: Tensor = getattr(self, f"{side}_ids")
        return torch.isin(tokens, matched.to(tokens.device)).double().mean().item()

    def to_student_ids(self, teacher_ids: Tensor) -> Tensor:
        """The student's id of each of the teacher's tokens, of any shape; −1 where it has none.

        Raises:
            ValueError, TypeError: ids that aren't a Tensor of the teacher's token ids.
        """
        if not isinstance(teacher_ids, Tensor):
            raise TypeError(f"teacher_ids must be a Tensor, got {type(teacher_ids).__name__}")
        check.integers("teacher_ids", teacher_ids)
        check.ids_below("teacher_ids", teacher_ids, self.teacher_size)
        ours, theirs = (x.to(teacher_ids.device) for x in (self.student_ids, self.teacher_ids))
        table = torch.full((self.teacher_size,), -1, device=ours.device)
        return table.index_copy_(0, theirs, ours)[teacher_ids.long()]

    def columns(self, device: torch.device) -> tuple[Tensor, ...]:
        """The pairs as columns of logits.

        Returns:
            (student_size,) the teacher's id of each student token, −1 where it has none; the ids of
            the student's unmatched tokens; those of the teacher's.
        """
        if device not in self._columns:
            ours, theirs = self.student_ids.to(device), self.teacher_ids.to(device)
            teacher_of = ours.new_full((self.student_size,), -1).index_copy_(0, ours, theirs)
            self._columns[device] = (
                teacher_of,
                _without(self.student_size, ours),
                _without(self.teacher_size, theirs),
            )
        return self._columns[device]

    def __repr__(self) -> str:
        n = len(self.student_ids)
        of_sides = (
            f"{n} of {size} {side} tokens ({n / size:.1%})".replace("%", " %")
            for side, size in (("student", self.student_size), ("teacher", self.teacher_size))
        )
        roles = (f"{role} {student!r} as {teacher!r}" for role, student, teacher in self.by_role)
        return f"VocabularyMatch({', '.join((*of_sides, *roles))})"


def _without(size: int, ids: Tensor) -> Tensor:
    """Token ids below ``size`` that ``ids`` doesn't have, ascending."""
    left = torch.ones(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, False)
    return left.nonzero()[:, 0]


def _roles(student_tokenizer: Any, teacher_tokenizer: Any) -> dict[str, tuple[int, int]]:
    """Ids of the special tokens that have one role in both tokenizers, by role."""
    found: dict[str, tuple[int, int]] = {}
    ends = _end_of_turn(student_tokenizer), _end_of_turn(teacher_tokenizer)
    if ends[0] is not None and ends[1] is not None:
        found["end of turn"] = ends[0], ends[1]
    for role in ROLES:
        student = getattr(student_tokenizer, f"{role}_token_id", None)
        teacher = getattr(teacher_tokenizer, f"{role}_token_id", None)
        if student is not None and teacher is not None:
            found[role] = student, teacher
    return found


def _end_of_turn(tokenizer: Any) -> int | None:
    """Id of the first special token that the chat template writes after an answer."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template raises what it likes
        return None
    after = text.rpartition(ANSWER)[2]
    names = _special_names(tokenizer)
    places = {name: (after.index(name), -len(name)) for name in names if name in after}
    if not places:
        return None
    return int(tokenizer.convert_tokens_to_ids(min(places, key=places.__getitem__)))


def _token(tokenizer: Any, i: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(i))


def _special_names(tokenizer: Any) -> set[str]:
    marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {_token(tokenizer, i) for i in marked | set(tokenizer.all_special_ids)}


def _size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values()) + 1  # ids may have gaps


def _texts(tokenizer: Any, specials: set[str]) -> dict[tuple[str, bytes], int]:
    """Ids of a vocabulary by kind ("text", "special", or a spelling) and by their bytes.

    ``specials``: names of special tokens, of this or of the other tokenizer.
    """
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    marker = _word_marker(tokenizer, vocabulary)
    texts: dict[tuple[str, bytes], int] = {}
    # Byte tokens come last: a token of its own stands for the same byte in running text.
    for token, i in sorted(vocabulary.items(), key=lambda entry: (_is_byte(entry[0]), entry[1])):
        if token in specials:
            texts.setdefault(("special", token.encode()), i)
        else:
            text = token.encode() if token in added else _text(token, marker)
            key = ("text", text or b"")
            if not text or key in texts:  # only the same token of a like vocabulary matches
                key = (f"spelled with {marker}", token.encode())
            texts.setdefault(key, i)
    return texts


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes that each token stands for, of a special token its name; see `VocabularyMatch`."""
    texts = _texts(tokenizer, _special_names(tokenizer))
    return {i: text for (kind, text), i in texts.items() if kind in ("text", "special")}


def _word_marker(tokenizer: Any, vocabulary: dict[str, int]) -> str:
    """Mark that the vocabulary's tokens carry: "##", "Ġ", "▁", or "" for none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and type(backend.model).__name__ == "WordPiece":
        return str(backend.model.continuing_subword_prefix)
    counts = Counter(mark for token in vocabulary for mark in ("##", "Ġ", "▁")
                     if token.startswith(mark))  # fmt: skip
    return counts.most_common(1)[0][0] if counts else ""


def _text(token: str, marker: str) -> bytes | None:
    """Bytes of an ordinary token; None if no text has it."""
    if marker == "Ġ":
        table = _byte_alphabet()
        known = all(letter in table for letter in token)
        return bytes(table[letter] for letter in token) if known else token.encode()
    if marker == "▁":
        byte = _is_byte(token)
        return bytes([int(token[3:5], 16)]) if byte else token.replace("▁", " ").encode()
    if not marker:
        return token.encode()
    rest = token.removeprefix(marker)
    if len(rest) == 1 and _is_punctuation(rest):
        return token.encode() if rest == token else None  # WordPiece never continues with one
    return rest.encode() if rest != token else f" {token}".encode()


def _is_byte(token: str) -> bool:
    """Whether this is a SentencePiece byte token, such as "<0x0A>"."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _is_punctuation(letter: str) -> bool:
    """As BERT's tokenizer splits: Unicode's punctuation, and ASCII's symbols."""
    symbol = letter.isascii() and unicodedata.category(letter)[0] == "S"
    return symbol or unicodedata.category(letter)[0] == "P"


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte of each letter: printable Latin-1 is itself, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
