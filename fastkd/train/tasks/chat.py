"""Conversations: what the assistant says next."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fastkd._core.extras import require
from fastkd.analysis.model_inputs import in_eval_mode
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError, first_line
from fastkd.train.evaluation import rouge_l
from fastkd.train.input_columns import Columns, field, holds_text, settle_columns, text_of, whole
from fastkd.train.tasks.base import Task, Tokens
from fastkd.train.tasks.causal_lm import Decoder, next_token_loss_sums, perplexity

MESSAGES = "messages"
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
ASSISTANT = "assistant"
# By which a template says what the assistant writes, to `apply_chat_template`.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
NEW_TOKENS = 128  # the longest answer that is written


@dataclass(frozen=True)
class Chat(Decoder):
    """Columns ``messages``: lists of objects with ``role`` and ``content``.

    Rows with ``instruction``, perhaps ``input``, and ``output`` are conversations of one question.
    The tokenizer's chat template makes text of them; the losses count what the assistant says.
    Of a conversation longer than --max-length the last answer loses its end and what is before it
    its beginning, neither more than half of --max-length leaves it. What follows the last answer
    is not read. Scored are all answers by their loss, and the last one by ROUGE-L against what
    the model writes in its place, greedily, up to `NEW_TOKENS` tokens.
    """

    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "loss", "rouge_l")
    default_metrics: ClassVar[tuple[str, ...]] = ("perplexity", "rouge_l")
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"perplexity", "loss"})
    # The answers stand among the messages.
    columns: ClassVar[Columns] = Columns(MESSAGES, None, MESSAGES)
    evaluation_columns: ClassVar[tuple[str, ...]] = ("answer",)

    #: Rows are encoded up to where an answer is to be written.
    prompts: bool = False
    #: Rows hold several conversations.
    packed: bool = False

    @classmethod
    def features(cls, columns: Columns) -> dict[str, Any]:
        return {MESSAGES: ["large_string"]}

    @classmethod
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        if columns.text == MESSAGES and MESSAGES not in record and INSTRUCTION in record:
            answer = None if columns.label is None else OUTPUT
            columns = replace(columns, text=INSTRUCTION, label=answer)
            columns = replace(columns, pair=INPUT if INPUT in record else None)
        return settle_columns(columns, record, source)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        name = columns.text
        messages = (
            _of_instruction(record, columns, where)
            if name == INSTRUCTION
            else field(record, name, where)
        )
        if not isinstance(messages, list):
            raise InputError(
                f"{where}: column {name!r} is not a list of messages but {messages!r:.40}"
            )
        checked = [_message(message, i, name, where) for i, message in enumerate(messages, 1)]
        answers = [i for i, one in enumerate(checked) if one["role"] == ASSISTANT]
        if checked and answers[:1] == [0]:
            raise InputError(f"{where}: the first message is the assistant's, and answers nothing")
        if checked and columns.label is not None:
            if not answers:
                raise InputError(f"{where}: no message is the assistant's; there is no answer")
            checked = checked[: answers[-1] + 1]
            if not checked[-1]["content"].strip():
                raise InputError(f"{where}: message {len(checked)}, the answer, is empty")
        return {MESSAGES: [json.dumps(message, ensure_ascii=False) for message in checked]}

    @classmethod
    def has_text(cls, row: Mapping[str, Any]) -> bool:
        return bool(row[MESSAGES])

    @classmethod
    def hub_columns(cls, columns: Columns) -> list[str]:
        return list(dict.fromkeys(super().hub_columns(columns)))

    @classmethod
    def texts(cls, rows: Rows) -> list[str]:
        return [
            "\n".join(json.loads(message)["content"] for message in messages)
            for (messages,) in rows.columns(MESSAGES)
        ]

    def for_prediction(self) -> Task:
        return replace(self, prompts=True)

    def for_packing(self) -> Task:
        if not self.separate_documents:
            raise InputError(
                "--pack: the model doesn't tell conversations in a row apart by positions that "
                "start again"
            )
        return replace(self, packed=True)

    def added_tokens(self, tokenizer: Any, rows: Rows) -> tuple[int, str]:
        return 1, "a conversation"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        found: dict[str, list[Any]] = {n: [] for n in ("input_ids", "labels", "answer")}
        for where, kept in zip(batch["where"], batch[MESSAGES], strict=True):
            messages = [json.loads(message) for message in kept]
            last = messages[-1] if messages[-1]["role"] == ASSISTANT else {"content": ""}
            mask: Sequence[int]
            if self.prompts:
                asked = messages[:-1] if last is messages[-1] else messages
                ids = templated(asked, tokenizer, where, add_generation_prompt=True)[-max_length:]
                mask = [0] * len(ids)
            else:
                ids, mask = _shortened(*answers_of(messages, tokenizer, where), max_length)
            found["input_ids"].append(ids)
            found["labels"].append(
                [token if own else UNLABELLED for token, own in zip(ids, mask, strict=True)]
            )
            found["answer"].append(last["content"])
        if not self.packed:
            return {**found, "attention_mask": [[1] * len(ids) for ids in found["input_ids"]]}
        talks = list(zip(found["input_ids"], found["labels"], strict=True))
        parts = _fitted([len(ids) for ids, _ in talks], max_length)
        rows = [_joined([talks[i] for i in part]) for part in parts]
        return {
            **{name: [row[name] for row in rows] for name in rows[0]},
            "answer": ["" for _ in parts],
            "number": [batch["number"][part[0]] for part in parts],
        }

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The sum of -log p of the answers' tokens, how many they are, and what is written."""
        if not hasattr(model, "generate"):
            raise InputError(f"--onnx: --task {self.name()} lets the model write, which ONNX can't")
        found = next_token_loss_sums(model, batch)
        written = [tokens for _, tokens in write(model, prompts_of(batch), tokenizer)]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        return [(*one, text.strip()) for one, text in zip(found, texts, strict=True)]

    def generated(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], tokenizer: Any, seed: int
    ) -> list[dict[str, Any]]:
        prompts = prompts_of(batch)
        written = iter(write(model, prompts, tokenizer, Draw(seed, prompts)))
        rows = []
        for talks in _talks(batch):
            new = [next(written) for _ in talks]
            row = _joined([(p + said, [UNLABELLED] * len(p) + said) for p, said in new])
            rows.append({name: row[name] for name in row if name in batch})
        return rows

    def finite(self, answers: Any) -> bool:
        return all(math.isfinite(loss) for loss, *_ in answers)

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        loss = math.fsum(loss for loss, *_ in answers)
        loss /= max(1, sum(count for _, count, _ in answers))
        compute = {
            "perplexity": lambda: perplexity(loss),
            "loss": lambda: loss,
            "rouge_l": lambda: rouge_l(
                [text for *_, text in answers], examples.evaluation_columns["answer"][:]
            ),
        }
        return {name: compute[name]() for name in metrics}

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        written = {text for *_, text in answers}
        return f"are all {written.pop()!r:.40}" if len(written) == 1 < len(answers) else None

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"answer": text} for *_, text in answers]

    def shown_columns(self, rows: Rows) -> Iterator[dict[str, Any]]:
        for (messages,) in rows.columns(MESSAGES):
            yield {MESSAGES: [json.loads(message) for message in messages]}

    @classmethod
    def usage(cls, report: Mapping[str, Any], directory: str) -> str:
        shown = 'print(write([{"role": "user", "content": "..."}]))'
        return cls.pipeline_usage("write", f'"{directory}"', shown)


def _of_instruction(record: dict[str, Any], columns: Columns, where: str) -> list[dict[str, str]]:
    """The conversation of an instruction, with its input behind an empty line, and its answer."""
    question = text_of(record, columns.text, where)
    if not holds_text(question):
        return []
    if record.get(INPUT) is not None:
        more = text_of(record, INPUT, where)
        question = f"{question}\n\n{more}" if holds_text(more) else question
    messages = [{"role": "user", "content": question}]
    if columns.label is None:
        return messages
    return [*messages, {"role": ASSISTANT, "content": text_of(record, columns.label, where)}]


def _message(message: Any, number: int, name: str | None, where: str) -> dict[str, Any]:
    """A message, of which role and content are text; what else it has is the template's."""
    if not isinstance(message, dict):
        raise InputError(f"{where}: message {number} is not an object but {message!r:.40}")
    kept = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if not isinstance(kept.get(key), str):
            raise InputError(
                f"{where}: message {number} has no text {key!r} but {kept.get(key)!r:.40}"
            )
        whole(kept[key], name, where)
    return kept


def templated(messages: list[dict], tokenizer: Any, where: str, **options: Any) -> list[int]:
    """Token ids of a conversation."""
    return _apply(messages, tokenizer, where, **options)["input_ids"]


def _apply(messages: list[dict], tokenizer: Any, where: str, **options: Any) -> Mapping[str, Any]:
    jinja2: Any = require("jinja2", "train")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except jinja2.TemplateError as error:  # templates refuse what they don't know
        reason = first_line(error)
        raise InputError(f"{where}: the tokenizer's chat template refuses it ({reason})") from error


def answers_of(messages: list[dict], tokenizer: Any, where: str) -> tuple[list[int], Sequence[int]]:
    """Token ids of a conversation, and for each 1 where the assistant says it.

    Raises:
        InputError: there is no template, or it can't be told what is an answer.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise InputError(
            f"--task chat needs a tokenizer with a chat template, and this "
            f"{type(tokenizer).__name__} has none"
        ) from None
    if MARKED.search(template) and tokenizer.is_fast:
        found = _apply(messages, tokenizer, where, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        if not any(mask):
            raise InputError(f"{where}: the tokenizer's chat template marks no token as an answer")
        return ids, mask
    ids = templated(messages, tokenizer, where)
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = templated(messages[:i], tokenizer, where, add_generation_prompt=True)
        through = templated(messages[: i + 1], tokenizer, where)
        start, stop = len(before), len(through)
        if ids[:stop] != through or ids[:start] != before or start >= stop:
            raise InputError(
                f"{where}: message {i + 1} can't be told apart from the rest: the tokenizer's "
                "chat template writes a conversation otherwise than one that goes on; give the "
                "template {% generation %} marks"
            )
        mask[start:stop] = [1] * (stop - start)
    return ids, mask


def _last_run(counted: Sequence[int]) -> int:
    """Where the last run of ones begins."""
    stop = len(counted) - list(reversed(counted)).index(1)
    zeros = [i for i in range(stop) if not counted[i]]
    return zeros[-1] + 1 if zeros else 0


def _shortened(
    ids: list[int], mask: Sequence[int], max_length: int
) -> tuple[list[int], Sequence[int]]:
    if len(ids) <= max_length:
        return ids, mask
    start = _last_run(mask)
    stop = min(len(ids), start + max(max_length // 2, max_length - start))
    part = slice(max(0, stop - max_length), stop)
    return ids[part], mask[part]


# Tokens and labels of a conversation.
Talk = tuple[list[int], list[int]]


def _fitted(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Which conversations stand in each row of ``most`` tokens: one is in the first with room."""
    rows: list[list[int]] = []
    left: list[int] = []
    for i, length in enumerate(lengths):
        at = next((at for at, room in enumerate(left) if room >= length), len(rows))
        if at == len(rows):
            rows.append([])
            left.append(most)
        rows[at].append(i)
        left[at] -= length
    return rows


def _joined(talks: list[Talk]) -> dict[str, list[int]]:
    """A row of conversations, each of which begins at position 0."""
    labels = [[UNLABELLED, *own[1:]] for _, own in talks]  # a first token is only read
    row = {
        "input_ids": [ids for ids, _ in talks],
        "labels": labels,
        "attention_mask": [[1] * len(own) for own in labels],
        "position_ids": [list(range(len(own))) for own in labels],
    }
    return {name: list(itertools.chain(*parts)) for name, parts in row.items()}


def _talks(batch: Mapping[str, torch.Tensor]) -> list[list[Talk]]:
    """The conversations of each row."""
    rows = []
    for i, mask in enumerate(batch["attention_mask"].bool()):
        ids, labels = (batch[name][i][mask].tolist() for name in ("input_ids", "labels"))
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][i][mask] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], len(ids)]
        rows.append([(ids[a:b], labels[a:b]) for a, b in zip(starts, ends, strict=True)])
    return rows


def prompts_of(batch: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """The tokens of each conversation before its last answer; all where it has none."""
    prompts = []
    for ids, labels in itertools.chain(*_talks(batch)):
        counted = [int(label != UNLABELLED) for label in labels]
        prompts.append(ids[: _last_run(counted)] if any(counted) else ids)
    return prompts


def stops_of(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the end token, and the template's own behind an answer."""
    talk = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    ids, mask = answers_of(talk, tokenizer, "a conversation of two messages")
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    special.discard(tokenizer.unk_token_id)  # it may stand for the words above
    return sorted(({*ids[_last_run(mask) :]} & special | {tokenizer.eos_token_id}) - {None})


class Draw:
    """Makes the likeliest word a draw at temperature 1 (Gumbel's maximum; a logits processor).

    Seed and prompt decide what is drawn, not the prompts beside it.
    """

    def __init__(self, seed: int, prompts: list[list[int]]):
        seeds = (np.random.SeedSequence((seed, *prompt)) for prompt in prompts)
        self.seeds = [int(each.generate_state(1, np.uint64)[0]) for each in seeds]
        self.generators: list[torch.Generator] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.generators:
            made = (torch.Generator(scores.device) for _ in self.seeds)
            pairs = zip(made, self.seeds, strict=True)
            self.generators = [generator.manual_seed(seed) for generator, seed in pairs]
        waits = torch.empty_like(scores, dtype=torch.float64)  # float32 has too many of 0
        for row, generator in zip(waits, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.double().log_softmax(-1) - waits.log()


def write(
    model: Any, prompts: list[list[int]], tokenizer: Any, draw: Draw | None = None
) -> list[tuple[list[int], list[int]]]:
    """Each prompt, and what ``model`` writes behind it with the token that ends it.

    It takes the likeliest words, or a ``draw``. Prompts that leave no room lose their beginning.
    """
    new = NEW_TOKENS
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:
        new = min(new, max(1, positions // 2))
        prompts = [prompt[-(positions - new) :] for prompt in prompts]
    stops = stops_of(tokenizer)
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    # What else is set in a model's folder would change what it draws.
    options = {} if draw is None else {"logits_processor": [draw], "repetition_penalty": 1.0}
    with in_eval_mode(model), torch.no_grad():
        found = model.generate(
            input_ids=padded["input_ids"].to(model.device),
            attention_mask=padded["attention_mask"].to(model.device),
            max_new_tokens=new,
            eos_token_id=stops,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
            num_beams=1,
            **options,
        )
    written = found[:, padded["input_ids"].shape[1] :].tolist()
    ends = [next((i for i, t in enumerate(row, 1) if t in stops), len(row)) for row in written]
    return [(p, row[:end]) for p, row, end in zip(prompts, written, ends, strict=True)]


TASK = Chat
