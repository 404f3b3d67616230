"""Conversations: the next message of the assistant."""

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from fastkd.distill.spans import align_spans
from fastkd.models.inputs import in_eval_mode
from fastkd.train.arrow_rows import TEACHER_PREFIX, UNLABELLED, Encoded, Rows
from fastkd.train.chat_template import OPENED, WORD, Conversation, answers_of, prompt_of, runs_of
from fastkd.train.conversations import (
    ASSISTANT,
    CALLS,
    DROP,
    KEEP,
    MESSAGES,
    PROMPT,
    THINKING,
    TOOLS,
    columns_by_form,
    messages_of,
    thought_and_answer,
    thought_of,
    tools_of,
    without_thought,
)
from fastkd.train.errors import InputError
from fastkd.train.files import Columns, settle_columns
from fastkd.train.generation import GREEDY, Generation, rouge_l
from fastkd.train.options import fits
from fastkd.train.tasks.base import TEXT, Corpus, LabelInfo, Task, Tokens
from fastkd.train.tasks.causal_lm import Decoder, next_token_loss_sums, perplexity


@dataclass(frozen=True)
class Chat(Decoder):
    """Conversations in one of the forms of `fastkd.train.conversations`.

    The tokenizer's chat template turns them into text; the losses count the assistant's tokens. In
    a conversation longer than --max-length the last answer loses its end and the text before it its
    beginning; each keeps at least half of --max-length. Messages after the last answer are not
    read. The loss is over all answers. ROUGE-L compares the last answer with the model's
    generated text, which is greedy unless `generation` samples it, both without thoughts.
    A row is asked as its answer was trained, one without an answer as most training rows.
    """

    metrics = ("perplexity", "loss", "rouge_l")
    default_metrics = ("perplexity", "rouge_l")
    lower_is_better = frozenset({"perplexity", "loss"})
    # The answers are among the messages, each a JSON object.
    columns = Columns(MESSAGES, None, MESSAGES)
    stored: ClassVar[Mapping[str, Any]] = {"text": [TEXT], TOOLS: TEXT}
    optional = ()
    evaluation_columns = ("answer",)
    short_column = "answer"
    usage = (
        "from transformers import pipeline\n\n"
        'write = pipeline("$pipeline", "$directory")\n'
        'print(write([{"role": "user", "content": "..."}]))'
    )

    summary = "Thoughts: `--thinking {thinking}`, in {thoughts:.0%} of the training answers."

    #: Whether rows hold several conversations: for --pack.
    packed: bool = False
    #: What becomes of the thought of a last answer, see `fastkd.train.chat_template`.
    thinking: str = KEEP
    #: Fraction of the last answers of the training that have a thought.
    thoughts: float = 0.0
    generation: Generation = field(default=GREEDY, kw_only=True, repr=False)

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> "Chat":
        found = cast(Chat, super().of(config, report))
        given: dict[str, Any] = {k: (report or {}).get(k) for k in ("thinking", "thoughts")}
        known = given["thinking"] in THINKING and fits(given["thoughts"], float)
        return replace(found, **given) if known else found

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> "Chat":
        return cls(thinking=given.thinking, thoughts=_thoughts(train) / max(1, len(train)))

    def describe(self, corpus: Corpus) -> Iterator[str]:
        sets = {"training": [corpus.train], "evaluation": [*corpus.evals.values()]}
        found = {k: (sum(map(_thoughts, x)), sum(map(len, x))) for k, x in sets.items()}
        if any(count for count, _ in found.values()):
            told = ", ".join(
                f"{count} {kind} answers with and {total - count} without"
                for kind, (count, total) in found.items()
            )
            yield f"thoughts (--thinking {self.thinking}): {told}"

    def report(self) -> dict[str, Any]:
        return {**super().report(), "thinking": self.thinking, "thoughts": self.thoughts}

    @classmethod
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        columns = columns_by_form(columns, record)
        return settle_columns(columns, record, source)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        checked = messages_of(record, columns, where)
        answers = [i for i, one in enumerate(checked) if one["role"] == ASSISTANT]
        if checked and answers[:1] == [0]:
            raise InputError(f"{where}: the first message is the assistant's, and answers nothing")
        if checked and columns.label is not None:
            if not answers:
                raise InputError(f"{where}: no message is the assistant's; there is no answer")
            checked = checked[: answers[-1] + 1]
            if not checked[-1]["content"].strip() and CALLS not in checked[-1]:
                raise InputError(f"{where}: message {len(checked)}, the answer, is empty")
        write = functools.partial(json.dumps, ensure_ascii=False)
        tools = tools_of(record, where)
        return {"text": [*map(write, checked)], TOOLS: write(tools) if tools else ""}

    @classmethod
    def texts(cls, rows: Rows) -> tuple[list[str], None]:
        return [
            "\n".join(json.loads(message)["content"] for message in messages)
            for messages in rows.column("text")
        ], None

    @classmethod
    def shown(cls, row: Mapping[str, Any]) -> dict[str, Any]:
        return {MESSAGES: [json.loads(message) for message in row["text"]]}

    def for_packing(self) -> Task:
        if not self.separate_documents:
            raise InputError(
                "--pack: the model does not separate the conversations of a row by positions that "
                "start again; leave it out"
            )
        return replace(self, packed=True)

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        found: dict[str, list[Any]] = {n: [] for n in ("input_ids", "labels", "answer")}
        for talk in self._conversations(batch):
            last = talk.messages[-1]
            mask: Sequence[int] = ()
            answer = without_thought(last)["content"] if talk.answered else ""
            if talk.answered:
                whole = answers_of(talk, tokenizer)
                if CALLS in last:
                    own = [whole.ids[i] for i in runs_of(whole.mask)[-1]]
                    answer = thought_and_answer(tokenizer.decode(own, skip_special_tokens=True))[1]
                ids, mask = _shortened(whole.ids, whole.mask, max_length)
                ids = ids[: runs_of(mask)[-1].start] if self.predicting else ids
            elif self.predicting:
                empty = last["role"] == ASSISTANT
                asked = replace(talk, messages=talk.messages[:-1]) if empty else talk
                ids = prompt_of(asked, tokenizer)[-max_length:]
            else:
                raise InputError(f"{talk.where}: the answer is empty without its thought")
            mask = [0] * len(ids) if self.predicting else mask
            found["input_ids"].append(ids)
            found["labels"].append(
                [token if own else UNLABELLED for token, own in zip(ids, mask, strict=True)]
            )
            found["answer"].append(answer)
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

    def encode_both(
        self, batch: dict[str, list], tokenizer: Any, teachers: Any, max_length: int
    ) -> Tokens:
        """Each model's own template; spans are parts of the answers."""
        own = self.encode(batch, tokenizer, max_length)
        theirs = self.encode(batch, teachers, max_length)
        found: dict[str, list[Any]] = {"student_spans": [], "teacher_spans": []}
        for talk in self._conversations(batch):
            offsets = [
                torch.tensor([_answer_offsets(talk, each, max_length)])
                for each in (tokenizer, teachers)
            ]
            for name, spans in zip(found, align_spans(*offsets), strict=True):
                found[name].append(spans[0].tolist())
        inputs = {f"{TEACHER_PREFIX}{n}": theirs[n] for n in ("input_ids", "attention_mask")}
        return {**own, **inputs, **found}

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The sum of -log p of the answers' tokens, their number, and the generated text."""
        if not hasattr(model, "generate"):
            raise InputError(f"--onnx: --task {self.name()} generates text; ONNX files cannot")
        found = next_token_loss_sums(model, batch)
        answers = write(model, prompts_of(batch), tokenizer, self.generation)
        texts = [_written(prompt, tokens, tokenizer) for prompt, tokens in answers]
        return [(*one, *text) for one, text in zip(found, texts, strict=True)]

    def generated(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], tokenizer: Any, seed: int
    ) -> list[dict[str, Any]]:
        prompts = prompts_of(batch)
        generation = replace(self.generation, temperature=1.0, seed=seed)
        written = iter(write(model, prompts, tokenizer, generation))
        rows = []
        for talks in _talks(batch):
            new = [next(written) for _ in talks]
            row = _joined([(p + ids, [UNLABELLED] * len(p) + ids) for p, ids in new])
            rows.append({name: row[name] for name in row if name in batch})
        return rows

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        loss = math.fsum(loss for loss, *_ in answers)
        loss /= max(1, sum(count for _, count, *_ in answers))
        texts = [text for *_, text in answers]
        return {
            "perplexity": perplexity(loss),
            "loss": loss,
            "rouge_l": rouge_l(texts, examples.evaluation_columns["answer"][:]),
        }

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        told = self.thoughts and self.thinking == KEEP
        return [
            {"answer": answer, **({"thought": thought} if told else {})}
            for *_, thought, answer in answers
        ]

    def _conversations(self, batch: Mapping[str, list]) -> Iterator[Conversation]:
        """The conversations of a batch of rows."""
        thinks, prompted = self.thinking == KEEP and self.thoughts > 0.5, self.thinking == PROMPT
        for where, kept, tools in zip(batch["where"], batch["text"], batch[TOOLS], strict=True):
            messages, last = [*map(json.loads, kept)], json.loads(kept[-1])
            if self.thinking == DROP:
                messages = [without_thought(m) if m["role"] == ASSISTANT else m for m in messages]
            elif prompted and self.predicting and last["role"] == ASSISTANT and thought_of(last):
                messages[-1]["content"] += WORD  # the answer may be empty
            yield Conversation(messages, json.loads(tools or "[]"), where, thinks, prompted)


def _thoughts(rows: Rows) -> int:
    """Number of rows whose last answer has a thought."""
    lasts = (json.loads(messages[-1]) for messages in rows.column("text"))
    return sum(last["role"] == ASSISTANT and bool(thought_of(last)) for last in lasts)


def _written(prompt: list[int], tokens: list[int], tokenizer: Any) -> tuple[str, str]:
    """The thought and the answer in what a model generated after a ``prompt``."""
    channels = tokenizer.decode(tokens)
    if channels.startswith("<|channel|>"):  # gpt-oss
        special = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)))
        thought, *answer = re.split(r"<\|channel\|>\s*final\s*<\|message\|>", channels, maxsplit=1)
        thought = thought.partition("<|message|>")[2].partition("<|end|>")[0]
        parts = thought, "".join(answer)
        thought, rest = (special.sub("", part).strip() for part in parts)
        return thought, rest
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    opened = OPENED.search(tokenizer.decode(prompt[-TAIL:]))
    return thought_and_answer(f"<think>{text}" if opened else text)


# Tokens in which a thought that the prompt begins is looked for.
TAIL = 16


def _answer_offsets(talk: Conversation, tokenizer: Any, max_length: int) -> list[tuple[int, int]]:
    """Start and end of each token in the text of all answers; (0, 0) for all other tokens.

    The special token that ends an answer counts as a character.
    """
    ids, mask, text = answers_of(talk, tokenizer)
    given = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = given["offset_mapping"]
    special = set(tokenizer.all_special_ids)
    found, length = [(0, 0)] * len(ids), 0
    answers = [message for message in talk.messages if message["role"] == ASSISTANT]
    for message, run in zip(answers, runs_of(mask), strict=False):
        at, last = offsets[run[0]][0], None
        for part in (thought_of(message), without_thought(message)["content"].strip()):
            before, length = length, length + len(part) + 1
            start = text.find(part, at)
            end = start + len(part)
            if not part or start < 0 or end > offsets[run[-1]][1]:  # the template has changed it
                continue
            at = end
            for i in run:
                begins, ends = (min(max(x, start), end) - start + before for x in offsets[i])
                if ends > begins:
                    found[i], last = (begins, ends), i
        if last is not None and last + 1 in run and ids[last + 1] in special:
            found[last + 1] = length - 1, length
    return list(_shortened(found, mask, max_length)[0])


def _shortened(
    ids: list[Any], mask: Sequence[int], max_length: int
) -> tuple[list[Any], Sequence[int]]:
    if len(ids) <= max_length:
        return ids, mask
    start = runs_of(mask)[-1].start
    stop = min(len(ids), start + max(max_length // 2, max_length - start))
    part = slice(max(0, stop - max_length), stop)
    return ids[part], mask[part]


# Token ids and labels of a conversation.
Talk = tuple[list[int], list[int]]


def _fitted(lengths: Sequence[int], most: int) -> list[list[int]]:
    """The conversations of each row of ``most`` tokens: each is in the first row with room."""
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
    """A row of conversations; each begins at position 0."""
    labels = [[UNLABELLED, *own[1:]] for _, own in talks]  # a first token is not predicted
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
    """The tokens of each conversation before its last answer; all if it has no answer."""
    prompts = []
    for ids, labels in itertools.chain(*_talks(batch)):
        answers = runs_of([int(label != UNLABELLED) for label in labels])
        prompts.append(ids[: answers[-1].start] if answers else ids)
    return prompts


def stops_of(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the end token, and special tokens of the template after it."""
    talk = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    where = "a conversation of two messages"
    ids, mask, _ = answers_of(Conversation(talk, [], where), tokenizer)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    special.discard(tokenizer.unk_token_id)  # the two words above may be unknown
    return sorted(({*ids[runs_of(mask)[-1].start :]} & special | {tokenizer.eos_token_id}) - {None})


def write(
    model: Any, prompts: list[list[int]], tokenizer: Any, generation: Generation = GREEDY
) -> list[tuple[list[int], list[int]]]:
    """Each prompt, and the tokens that ``model`` generates after it, with the end token.

    Prompts that leave no room lose their beginning.
    """
    new = generation.max_new_tokens
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:
        new = min(new, max(1, positions // 2))
        prompts = [prompt[-(positions - new) :] for prompt in prompts]
    stops = stops_of(tokenizer)
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    with in_eval_mode(model), torch.no_grad():
        found = model.generate(
            input_ids=padded["input_ids"].to(model.device),
            attention_mask=padded["attention_mask"].to(model.device),
            eos_token_id=stops,
            pad_token_id=tokenizer.pad_token_id,
            **{**generation.options(prompts), "max_new_tokens": new},
        )
    written = found[:, padded["input_ids"].shape[1] :].tolist()
    ends = [next((i for i, t in enumerate(row, 1) if t in stops), len(row)) for row in written]
    return [(p, row[:end]) for p, row, end in zip(prompts, written, ends, strict=True)]


TASK = Chat
