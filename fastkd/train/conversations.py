"""Conversations in the forms that data sets have, as messages with ``role`` and ``content``.

- ``messages``: OpenAI's, with parts of text as content, tool calls, and ``tools`` beside them.
  ``choices`` of a finished chat completion may have the answer.
- ``conversations``: ShareGPT's, messages with ``from`` and ``value``.
- ``prompt`` and ``completion``, each a text or a list of messages.
- ``instruction``, perhaps ``input``, and ``output``: Alpaca's, perhaps with ``history``, a list of
  earlier questions and answers.

A column ``system`` is the first message where the conversation begins with none, and with none of
a ``developer``.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns, field, holds_text, text_of

MESSAGES, CONVERSATIONS = "messages", "conversations"
INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
PROMPT, COMPLETION = "prompt", "completion"
SYSTEM, DEVELOPER, TOOLS, CALLS = "system", "developer", "tools", "tool_calls"
USER, ASSISTANT = "user", "assistant"
CALL = "function_call"
CHOICES, LOGPROBS = "choices", "logprobs"
# OpenAI's types of parts that are text.
TEXT_PARTS = ("text", "input_text", "output_text")
# ShareGPT's names of roles.
ROLES = {
    "human": USER,
    USER: USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    ASSISTANT: ASSISTANT,
    SYSTEM: SYSTEM,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    CALL: ASSISTANT,
}
Message = dict[str, Any]
#: Values of --thinking: thoughts are trained, left out, or a part of the prompt.
THINKING = KEEP, DROP, PROMPT = ("keep", "drop", "prompt")
#: Fields of a message that hold its thought, by the template.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def columns_by_form(columns: Columns, record: Mapping[str, Any]) -> Columns:
    """``columns`` of the form that ``record`` has, where they are the defaults."""
    if MESSAGES in record or columns.text != MESSAGES:
        own = columns.text if columns.label == MESSAGES and MESSAGES not in record else None
        return replace(columns, label=own or columns.label)
    for text, answer in (
        (CONVERSATIONS, CONVERSATIONS),
        (INSTRUCTION, OUTPUT),
        (PROMPT, COMPLETION),
    ):
        if text in record:
            pair = INPUT if text == INSTRUCTION and INPUT in record else None
            label = None if columns.label is None else answer
            return replace(columns, text=text, pair=pair, label=label)
    return columns


def messages_of(record: dict[str, Any], columns: Columns, where: str) -> list[Message]:
    """The messages of a row, checked; none if nothing is asked."""
    name = columns.text
    value = field(record, name, where)
    if name in (MESSAGES, CONVERSATIONS) or (isinstance(value, list) and name != INSTRUCTION):
        found = _listed(value, name, where) + _completed(record, where)
    else:
        question = text_of(record, name, where)
        if name == INSTRUCTION and record.get(INPUT) is not None:
            parts = question, text_of(record, INPUT, where)
            question = "\n\n".join(filter(holds_text, parts))
        if not holds_text(question):
            return []
        found = [*_history(record, where), {"role": USER, "content": question}]
    if columns.label not in (None, name):
        answer = field(record, columns.label, where)
        if isinstance(answer, list):
            found += _listed(answer, columns.label, where)
        else:
            answer = text_of(record, columns.label, where)
            found.append({"role": ASSISTANT, "content": answer})
    found = [_message(message, i, name, where) for i, message in enumerate(found, 1)]
    system = record.get(SYSTEM)
    if found and system is not None and found[0]["role"] not in (SYSTEM, DEVELOPER):
        text = text_of(record, SYSTEM, where)
        found = [{"role": SYSTEM, "content": text}] * holds_text(text) + found
    return found


def thought_and_answer(text: str) -> tuple[str, str]:
    """The thought at the beginning of a text, in ``<think>`` and ``</think>``, and the rest.

    The opening tag may be the prompt's. A thought without an end is all of the text.
    """
    before, end, answer = text.partition("</think>")
    start, opened, thought = before.rpartition("<think>")
    if start.strip() or not (opened or end):
        return "", text
    return thought.strip(), answer.strip() if end else ""


def thought_of(message: Message) -> str:
    """The thought of a message, in a field or in its content; "" without one."""
    fields = (message.get(name) for name in THOUGHTS)
    found = next((x for x in fields if isinstance(x, str) and x.strip()), None)
    return thought_and_answer(message["content"])[0] if found is None else found.strip()


def without_thought(message: Message) -> Message:
    """The message without its thought."""
    rest = {name: value for name, value in message.items() if name not in THOUGHTS}
    return {**rest, "content": thought_and_answer(message["content"])[1]}


def tools_of(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The tools in column ``tools``, a list of objects or its JSON; none without the column."""
    value = record.get(TOOLS)
    if isinstance(value, str):
        value = _parsed(value, f"{where}: column {TOOLS!r}") if value.strip() else None
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise InputError(f"{where}: column {TOOLS!r} is not a list of objects but {value!r:.40}")
    return [_present(tool) for tool in value]


def _listed(value: Any, name: str | None, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: column {name!r} is not a list of messages but {value!r:.40}")
    return list(value)


def _completed(record: dict[str, Any], where: str) -> list[Any]:
    """The answer of a finished chat completion in ``choices``, with its ``logprobs``."""
    choices = record.get(CHOICES)
    if not choices:
        return []
    if not isinstance(choices, list) or len(choices) > 1 or not isinstance(choices[0], dict):
        raise InputError(f"{where}: column {CHOICES!r} is not a list of one completion")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise InputError(f"{where}: column {CHOICES!r} has no message")
    return [{**message, LOGPROBS: choices[0].get(LOGPROBS)}]


def _history(record: dict[str, Any], where: str) -> list[Message]:
    """Earlier questions and answers."""
    found: list[Message] = []
    turns = record.get(HISTORY) or ()
    for turn in turns if isinstance(turns, list | tuple) else [turns]:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise InputError(
                f"{where}: column {HISTORY!r} is not a list of pairs, a question and its answer, "
                f"but has {turn!r:.40}"
            )
        found += [{"role": r, "content": x} for r, x in zip((USER, ASSISTANT), turn, strict=True)]
    return found


def _message(message: Any, number: int, name: str | None, where: str) -> Message:
    """A message whose role and content are text; other entries are for the template."""
    if not isinstance(message, dict):
        raise InputError(f"{where}: message {number} is not an object but {message!r:.40}")
    whose = f"{where}: message {number}"
    kept = _present(message)
    if "from" in kept and "role" not in kept:
        kept = _of_sharegpt(kept, whose)
    if CALLS in kept:
        kept[CALLS] = [_call(call, whose) for call in _listed(kept[CALLS], CALLS, whose)]
        kept.setdefault("content", "")
    if isinstance(kept.get("content"), list):
        kept["content"] = "".join(_text_of_part(part, whose) for part in kept["content"])
    for key in ("role", "content"):
        if not isinstance(kept.get(key), str):
            raise InputError(f"{whose} has no text {key!r} but {kept.get(key)!r:.40}")
        field({name: kept[key]}, name, where)  # its characters
    return kept


def _of_sharegpt(message: Message, whose: str) -> Message:
    role, value = message.pop("from"), message.pop("value", None)
    if role not in ROLES:
        raise InputError(f"{whose} is from {role!r:.40}; {nearest(str(role), ROLES)}")
    if role == CALL and isinstance(value, str):
        calls = _parsed(value, whose)
        return {"role": ASSISTANT, CALLS: calls if isinstance(calls, list) else [calls], **message}
    return {"role": ROLES[role], "content": value, **message}


def _text_of_part(part: Any, whose: str) -> str:
    """The text of a part of OpenAI's content."""
    typed = isinstance(part, dict) and part.get("type", TEXT_PARTS[0]) in TEXT_PARTS
    if typed and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise InputError(
        f"{whose} has a part {kind!r:.40}, and --task chat reads text; docs/recipes.md has a "
        "vision-language student"
    )


def _call(call: Any, whose: str) -> Any:
    """A tool call whose arguments, JSON in OpenAI's form, are an object, as templates want."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{whose} has a tool call without a name: {call!r:.40}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{whose}: arguments of a tool call") if arguments else {}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{what}: not JSON but {text!r:.40}") from None


def _present(value: Any) -> Any:
    """``value`` without entries None, with which Parquet fills objects."""
    if isinstance(value, dict):
        return {key: _present(entry) for key, entry in value.items() if entry is not None}
    return [_present(entry) for entry in value] if isinstance(value, list) else value
