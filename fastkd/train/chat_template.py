"""Tokens of a conversation in a tokenizer's chat template, and which of them are answers.

A template may mark the answers with ``{% generation %}``. Otherwise each answer is replaced by a
word, and the text that stays around the word is not the answer: what a template writes before any
answer, such as an empty ``<think></think>``, is a part of the prompt.

The thought of the last answer is a part of the answer, or of the prompt. Earlier thoughts are in
the text where the template keeps them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fastkd._core.extras import require
from fastkd.train.conversations import (
    ASSISTANT,
    CALLS,
    THOUGHTS,
    Message,
    thought_of,
    without_thought,
)
from fastkd.train.errors import InputError, first_line

# Mark of the assistant's text in a template, for `apply_chat_template`.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The word in place of an answer.
WORD = "fastkdanswer"
# A thought's beginning at the end of a text.
OPENED = re.compile(r"<think>\s*$")


@dataclass(frozen=True)
class Conversation:
    """Messages, their tools, and the prefix of errors.

    ``thinks``: whether a conversation without an answer asks for a thought. ``prompted``: whether
    the thought of the answer belongs to the prompt.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    where: str
    thinks: bool = False
    prompted: bool = False

    @property
    def answered(self) -> bool:
        """Whether the last message is an answer."""
        last = self.messages[-1]
        return last["role"] == ASSISTANT and bool(last["content"].strip() or CALLS in last)

    @property
    def thought(self) -> str:
        """The thought of the answer; "" without one."""
        return thought_of(self.messages[-1]) if self.answered else ""

    def render(self, tokenizer: Any, messages: list[Message] | None = None, **options: Any) -> Any:
        """``messages``, by default all, in the template; text unless ``tokenize``."""
        jinja2: Any = require("jinja2", "train")
        if self.tools:
            options["tools"] = self.tools
        thinks = bool(self.thought) if self.answered else self.thinks
        try:
            return tokenizer.apply_chat_template(
                self.messages if messages is None else messages,
                **{"tokenize": False, "return_dict": True, "enable_thinking": thinks, **options},
            )
        except jinja2.TemplateError as error:  # templates raise it for roles they do not know
            raise InputError(
                f"{self.where}: the tokenizer's chat template refuses it ({first_line(error)})"
            ) from error

    def ending(self, answer: Message) -> "Conversation":
        """The conversation with another last message."""
        return replace(self, messages=[*self.messages[:-1], answer])


class Answers(NamedTuple):
    """Token ids of a conversation, a mask with 1 for the assistant's tokens, and the text."""

    ids: list[int]
    mask: Sequence[int]
    text: str


def answers_of(talk: Conversation, tokenizer: Any) -> Answers:
    """Tokens of a conversation, and which of them are answers.

    Raises:
        InputError: there is no template, or it does not allow to find the answers.
    """
    if not _marked(tokenizer):
        text, places = _places(talk, tokenizer)
        tokens = _Tokens(text, tokenizer)
        mask = [0] * len(tokens.ids)
        for start, stop in places:
            first, end = tokens.first(start), tokens.end(stop)
            mask[first:end] = [1] * (end - first)
        return Answers(tokens.ids, mask, text)
    talk, kept_thought = _with_thought(talk, tokenizer)
    found = talk.render(tokenizer, tokenize=True, return_assistant_tokens_mask=True)
    ids, mask, text = found["input_ids"], found["assistant_masks"], talk.render(tokenizer)
    if not any(mask):
        raise InputError(f"{talk.where}: the tokenizer's chat template marks no token as an answer")
    if not kept_thought:
        raise InputError(
            f"{talk.where}: the tokenizer's chat template drops the thought of its answer, which "
            "--thinking keep trains; pass --thinking drop, or change the template"
        )
    if talk.prompted and talk.thought:
        answer = runs_of(mask)[-1]
        end = _Tokens(text, tokenizer).first(_behind_thought(talk, text, 0))
        mask = [*mask[: answer.start], *[0] * (end - answer.start), *mask[end:]]
    return Answers(ids, mask, text)


def prompt_of(talk: Conversation, tokenizer: Any) -> list[int]:
    """Token ids before the answer to a conversation, as in the training."""
    if _marked(tokenizer):
        return talk.render(tokenizer, tokenize=True, add_generation_prompt=True)["input_ids"]
    if not talk.thinks:
        asked = replace(talk, messages=[*talk.messages, {"role": ASSISTANT, "content": WORD}])
        text = asked.render(tokenizer)
        if WORD in text:
            tokens = _Tokens(text, tokenizer)
            return tokens.ids[: tokens.first(text.rindex(WORD))]
    return _Tokens(_asked(talk, talk.messages, tokenizer), tokenizer).ids


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


def _with_thought(talk: Conversation, tokenizer: Any) -> tuple[Conversation, bool]:
    """The conversation with its thought in a form that the template keeps, and whether it does."""
    thought, last = talk.thought, talk.messages[-1]
    if not thought:
        return talk, True
    plain = without_thought(last)
    fewer = talk.render(tokenizer, [*talk.messages[:-1], plain]).count(thought)
    content = f"<think>\n{thought}\n</think>\n\n{plain['content']}"
    fields = {**plain, **dict.fromkeys(THOUGHTS, thought)}
    for form in (last, fields, {**plain, "content": content}):
        changed = talk.ending(form)
        if changed.render(tokenizer).count(thought) > fewer:
            return changed, True
    return talk, False


def _places(talk: Conversation, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and start and end of each answer."""
    talk, kept = _with_thought(talk, tokenizer)
    last = talk.messages[-1]
    if kept:
        text = talk.render(tokenizer)
        numbers = [i for i, message in enumerate(talk.messages) if message["role"] == ASSISTANT]
        places = [_place(talk, i, text, tokenizer) for i in numbers]
    else:  # the template drops every thought: it stands before the answer
        plain = without_thought(last)
        text, places = _places(talk.ending(plain), tokenizer)
        start, stop = places.pop()
        prompt = _asked(talk, talk.messages[:-1], tokenizer)
        opened = OPENED.search(prompt) is not None and prompt.startswith(text[:start])
        before = prompt if opened else text[:start]
        thought = f"{talk.thought}\n</think>\n\n"
        thought = thought if opened else f"<think>\n{thought}"
        places.append((len(before), len(before) + len(thought) + stop - start))
        text = before + thought + text[start:]
    if talk.prompted and talk.thought:
        start, stop = places[-1]
        places[-1] = _behind_thought(talk, text, start), stop
    return text, places


def _behind_thought(talk: Conversation, text: str, start: int) -> int:
    """The place where the last answer's thought has ended, at or after ``start``."""
    last, thought = talk.messages[-1], talk.thought
    end = text.rindex(thought, start) + len(thought)
    content = without_thought(last)["content"]
    if content.strip():
        return text.index(content.strip(), end)
    tag = re.compile(r"\s*(</think>\s*)?").match(text, end)
    return end if tag is None else tag.end()


def _place(talk: Conversation, i: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """Start and end of answer ``i`` in the ``text`` of a conversation, with its end of turn.

    An end of turn that is not that of a last answer is left out.
    """
    word = {"role": ASSISTANT, "content": WORD}
    replaced = [*talk.messages[:i], word, *talk.messages[i + 1 :]]
    try:
        whole, part = (talk.render(tokenizer, some) for some in (replaced, replaced[: i + 1]))
    except InputError:  # results of tools need the calls that the word replaces
        whole = part = ""
    before, found, after = whole.partition(WORD)
    end = part.partition(WORD)[2]
    end = end if after.startswith(end) else ""
    around = text.startswith(before) and text.endswith(after)
    if found and around and len(text) > len(before) + len(after):
        return len(before), len(text) - len(after) + len(end)
    # The answer has a thought where the template would write an empty one.
    before = _asked(talk, talk.messages[:i], tokenizer)
    through = talk.render(tokenizer, talk.messages[: i + 1])
    if text.startswith(through) and through.startswith(before) and len(before) < len(through):
        return len(before), len(through)
    raise InputError(
        f"{talk.where}: the tokens of message {i + 1} cannot be found: the tokenizer's chat "
        "template changes its text; put {% generation %} and {% endgeneration %} around the "
        "answers in the template"
    )


def _asked(talk: Conversation, messages: list[Message], tokenizer: Any) -> str:
    """The text of ``messages`` with what the template writes before any answer to them.

    A template may ignore ``add_generation_prompt``: then it is what two answers have in common.
    """
    text = talk.render(tokenizer, messages, add_generation_prompt=True)
    if text != talk.render(tokenizer, messages):
        return text
    answers = ({"role": ASSISTANT, "content": word} for word in (WORD, WORD[::-1]))
    one, other = (talk.render(tokenizer, [*messages, answer]) for answer in answers)
    alike = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    common = OPENED.sub("", one[:alike])
    return common if common.startswith(text) else text


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
