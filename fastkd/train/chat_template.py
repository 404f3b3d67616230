"""Tokens of a conversation in a tokenizer's chat template, and which of them are answers.

A template may mark the answers with ``{% generation %}``. Otherwise each answer is replaced by a
word, and the text that stays around the word is not the answer: what a template writes before any
answer, such as an empty ``<think></think>``, is a part of the prompt.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.train.conversations import ASSISTANT, Message
from fastkd.train.errors import InputError, first_line

# Mark of the assistant's text in a template, for `apply_chat_template`.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The word in place of an answer.
WORD = "fastkdanswer"


@dataclass(frozen=True)
class Conversation:
    """Messages, their tools, and the prefix of errors."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    where: str

    def render(self, tokenizer: Any, messages: list[Message] | None = None, **options: Any) -> Any:
        """``messages``, by default all, in the template; text unless ``tokenize``."""
        jinja2: Any = require("jinja2", "train")
        if self.tools:
            options["tools"] = self.tools
        try:
            return tokenizer.apply_chat_template(
                self.messages if messages is None else messages,
                **{"tokenize": False, "return_dict": True, **options},
            )
        except jinja2.TemplateError as error:  # templates raise it for roles they do not know
            raise InputError(
                f"{self.where}: the tokenizer's chat template refuses it ({first_line(error)})"
            ) from error

    def replaced(self, i: int) -> list[Message]:
        """The messages with `WORD` in place of answer ``i``."""
        word = {"role": ASSISTANT, "content": WORD}
        return [*self.messages[:i], word, *self.messages[i + 1 :]]


def answers_of(talk: Conversation, tokenizer: Any) -> tuple[list[int], Sequence[int]]:
    """Token ids of a conversation, and a mask with 1 for the assistant's tokens.

    Raises:
        InputError: there is no template, or it does not allow to find the answers.
    """
    if _marked(tokenizer):
        found = talk.render(tokenizer, tokenize=True, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        if not any(mask):
            raise InputError(
                f"{talk.where}: the tokenizer's chat template marks no token as an answer"
            )
        return ids, mask
    text = talk.render(tokenizer)
    tokens = _Tokens(text, tokenizer)
    mask = [0] * len(tokens.ids)
    for i, message in enumerate(talk.messages):
        if message["role"] == ASSISTANT:
            start, stop = _place(talk, i, text, tokenizer)
            first, end = tokens.first(start), tokens.end(stop)
            mask[first:end] = [1] * (end - first)
    return tokens.ids, mask


def prompt_of(talk: Conversation, tokenizer: Any) -> list[int]:
    """Token ids before the answer to a conversation, as in the training."""
    if not _marked(tokenizer):
        asked = Conversation([*talk.messages, {}], talk.tools, talk.where)
        text = asked.render(tokenizer, asked.replaced(len(talk.messages)))
        if WORD in text:
            tokens = _Tokens(text, tokenizer)
            return tokens.ids[: tokens.first(text.rindex(WORD))]
    return talk.render(tokenizer, tokenize=True, add_generation_prompt=True)["input_ids"]


def runs_of(mask: Sequence[int]) -> list[range]:
    """The positions of each run of ones."""
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _marked(tokenizer: Any) -> bool:
    """Whether the template marks answers and the tokenizer can follow the marks."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise InputError(
            f"--task chat needs a tokenizer with a chat template, and this "
            f"{type(tokenizer).__name__} has none"
        ) from None
    return bool(MARKED.search(template) and tokenizer.is_fast)


def _place(talk: Conversation, i: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """Start and end of answer ``i`` in the ``text`` of a conversation, with its end of turn."""
    replaced = talk.replaced(i)
    try:
        whole, part = (talk.render(tokenizer, some) for some in (replaced, replaced[: i + 1]))
    except InputError:  # results of tools need the calls that the word replaces
        whole = part = ""
    before, word, after = whole.partition(WORD)
    end = part.partition(WORD)[2]
    around = text.startswith(before) and text.endswith(after) and after.startswith(end)
    if word and around and len(text) > len(before) + len(after):
        return len(before), len(text) - len(after) + len(end)
    # The answer has a thought where the template would write an empty one.
    before = talk.render(tokenizer, talk.messages[:i], add_generation_prompt=True)
    through = talk.render(tokenizer, talk.messages[: i + 1])
    if text.startswith(through) and through.startswith(before) and len(before) < len(through):
        return len(before), len(through)
    raise InputError(
        f"{talk.where}: the tokens of message {i + 1} cannot be found: the tokenizer's chat "
        "template changes its text; put {% generation %} and {% endgeneration %} around the "
        "answers in the template"
    )


class _Tokens:
    """Tokens of a text, by places in the text."""

    def __init__(self, text: str, tokenizer: Any):
        self.text, self.tokenizer = text, tokenizer
        found = self._encoded(text, return_offsets_mapping=bool(tokenizer.is_fast))
        self.ids: list[int] = found["input_ids"]
        self.offsets: list[tuple[int, int]] | None = found.get("offset_mapping")

    def first(self, start: int) -> int:
        """Number of tokens that end before ``start``."""
        if self.offsets is None:
            return self._common(start)
        return next((i for i, (_, e) in enumerate(self.offsets) if e > start), len(self.ids))

    def end(self, stop: int) -> int:
        """Number of tokens that begin before ``stop``."""
        if self.offsets is None:
            return self._common(stop)
        return next((i for i, (s, _) in enumerate(self.offsets) if s >= stop), len(self.ids))

    def _common(self, at: int) -> int:
        """Number of tokens that the text up to ``at`` has alone, too."""
        alone = self._encoded(self.text[:at])["input_ids"]
        pairs = enumerate(zip(self.ids, alone, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(alone), len(self.ids)))

    def _encoded(self, text: str, **options: Any) -> Mapping[str, Any]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)
