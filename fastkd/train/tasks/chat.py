"""Conversations: the next message of the assistant."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fastkd._core.extras import require
from fastkd.distill.spans import align_spans
from fastkd.models.inputs import in_eval_mode
from fastkd.train.arrow_rows import TEACHER_PREFIX, UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError, first_line
from fastkd.train.evaluation import rouge_l
from fastkd.train.input_columns import Columns, field, holds_text, settle_columns, text_of, whole
from fastkd.train.tasks.base import TEXT, Task, Tokens
from fastkd.train.tasks.causal_lm import Decoder, next_token_loss_sums, perplexity

MESSAGES = "messages"
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
ASSISTANT = "assistant"
# Mark of the assistant's text in a template, for `apply_chat_template`.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
NEW_TOKENS = 128  # maximum length of a generated answer


@dataclass(frozen=True)
class Chat(Decoder):
    """A column ``messages``: lists of objects with ``role`` and ``content``.

    Rows with ``instruction``, perhaps ``input``, and ``output`` are conversations of one question.
    The tokenizer's chat template turns them into text; the losses count the assistant's tokens. In
    a conversation longer than --max-length the last answer loses its end and the text before it its
    beginning; each keeps at least half of --max-length. Messages after the last answer are not
    read. The loss is over all answers. ROUGE-L compares the last answer with the model's greedy
    generation, up to `NEW_TOKENS` tokens.
    """

    metrics = ("perplexity", "loss", "rouge_l")
    default_metrics = ("perplexity", "rouge_l")
    lower_is_better = frozenset({"perplexity", "loss"})
    # The answers are among the messages, each a JSON object.
    columns = Columns(MESSAGES, None, MESSAGES)
    stored: ClassVar[Mapping[str, Any]] = {"text": [TEXT]}
    optional = ()
    evaluation_columns = ("answer",)
    short_column = "answer"
    usage = (
        "from transformers import pipeline\n\n"
        'write = pipeline("$pipeline", "$directory")\n'
        'print(write([{"role": "user", "content": "..."}]))'
    )

    #: Whether rows hold several conversations: for --pack.
    packed: bool = False

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
        return {"text": [json.dumps(message, ensure_ascii=False) for message in checked]}

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
        for where, kept in zip(batch["where"], batch["text"], strict=True):
            messages = [json.loads(message) for message in kept]
            last = messages[-1] if messages[-1]["role"] == ASSISTANT else {"content": ""}
            mask: Sequence[int]
            if self.predicting:
                asked = messages[:-1] if last is messages[-1] else messages
                told = _apply(asked, tokenizer, where, add_generation_prompt=True)
                ids = told["input_ids"][-max_length:]
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

    def encode_both(
        self, batch: dict[str, list], tokenizer: Any, teachers: Any, max_length: int
    ) -> Tokens:
        """Each model's own template; spans are parts of the answers."""
        own = self.encode(batch, tokenizer, max_length)
        theirs = self.encode(batch, teachers, max_length)
        found: dict[str, list[Any]] = {"student_spans": [], "teacher_spans": []}
        for where, kept in zip(batch["where"], batch["text"], strict=True):
            messages = [json.loads(message) for message in kept]
            offsets = [
                torch.tensor([_answer_offsets(messages, each, where, max_length)])
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
            row = _joined([(p + ids, [UNLABELLED] * len(p) + ids) for p, ids in new])
            rows.append({name: row[name] for name in row if name in batch})
        return rows

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        loss = math.fsum(loss for loss, *_ in answers)
        loss /= max(1, sum(count for _, count, _ in answers))
        texts = [text for *_, text in answers]
        return {
            "perplexity": perplexity(loss),
            "loss": loss,
            "rouge_l": rouge_l(texts, examples.evaluation_columns["answer"][:]),
        }

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        return [{"answer": text} for *_, text in answers]


def _of_instruction(record: dict[str, Any], columns: Columns, where: str) -> list[dict[str, str]]:
    """The conversation of an instruction and its answer; an input follows an empty line."""
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
    """A message whose role and content are text; other entries are for the template."""
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


def _apply(messages: list[dict], tokenizer: Any, where: str, **options: Any) -> Mapping[str, Any]:
    """Token columns of a conversation in the tokenizer's template."""
    jinja2: Any = require("jinja2", "train")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except jinja2.TemplateError as error:  # templates raise it for roles they do not know
        reason = first_line(error)
        raise InputError(f"{where}: the tokenizer's chat template refuses it ({reason})") from error


def answers_of(messages: list[dict], tokenizer: Any, where: str) -> tuple[list[int], Sequence[int]]:
    """Token ids of a conversation, and a mask with 1 for the assistant's tokens.

    Raises:
        InputError: there is no template, or it does not allow to find the answers.
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
    ids = _apply(messages, tokenizer, where)["input_ids"]
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = _apply(messages[:i], tokenizer, where, add_generation_prompt=True)["input_ids"]
        through = _apply(messages[: i + 1], tokenizer, where)["input_ids"]
        start, stop = len(before), len(through)
        if ids[:stop] != through or ids[:start] != before or start >= stop:
            raise InputError(
                f"{where}: the tokens of message {i + 1} cannot be found: the tokenizer's chat "
                "template changes earlier text when a conversation continues; add {% generation %} "
                "marks to it"
            )
        mask[start:stop] = [1] * (stop - start)
    return ids, mask


def _answer_offsets(
    messages: list[dict], tokenizer: Any, where: str, max_length: int
) -> list[tuple[int, int]]:
    """Start and end of each token in the text of all answers; (0, 0) for all other tokens.

    The special token that ends an answer counts as a character.
    """
    ids, mask = answers_of(messages, tokenizer, where)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    options = {"tokenizer_kwargs": {"return_offsets_mapping": True}}
    given = _apply(messages, tokenizer, where, **options)["offset_mapping"]
    special = set(tokenizer.all_special_ids)
    found, before = [(0, 0)] * len(ids), 0
    contents = [m["content"].strip() for m in messages if m["role"] == ASSISTANT]
    for content, run in zip(contents, _runs(mask), strict=False):
        at = text.find(content, given[run[0]][0])
        end = at + len(content)
        if at < 0 or end > given[run[-1]][1]:  # the template has changed the answer
            continue
        last = run[0] - 1
        for i in run:
            start, stop = (min(max(x, at), end) - at + before for x in given[i])
            if stop > start:
                found[i], last = (start, stop), i
        if last + 1 in run and ids[last + 1] in special:
            found[last + 1] = before + len(content), before + len(content) + 1
        before += len(content) + 1
    return list(_shortened(found, mask, max_length)[0])


def _runs(mask: Sequence[int]) -> list[range]:
    """The positions of each run of ones."""
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _shortened(
    ids: list[Any], mask: Sequence[int], max_length: int
) -> tuple[list[Any], Sequence[int]]:
    if len(ids) <= max_length:
        return ids, mask
    start = _runs(mask)[-1].start
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
        answers = _runs([int(label != UNLABELLED) for label in labels])
        prompts.append(ids[: answers[-1].start] if answers else ids)
    return prompts


def stops_of(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the end token, and special tokens of the template after it."""
    talk = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    ids, mask = answers_of(talk, tokenizer, "a conversation of two messages")
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    special.discard(tokenizer.unk_token_id)  # the two words above may be unknown
    return sorted(({*ids[_runs(mask)[-1].start :]} & special | {tokenizer.eos_token_id}) - {None})


class Draw:
    """Logits processor whose likeliest token is a sample at temperature 1 (Gumbel-max).

    The sample of a prompt depends on ``seed`` and that prompt alone.
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
        waits = torch.empty_like(scores, dtype=torch.float64)  # in float32 too many are 0
        for row, generator in zip(waits, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.double().log_softmax(-1) - waits.log()


def write(
    model: Any, prompts: list[list[int]], tokenizer: Any, draw: Draw | None = None
) -> list[tuple[list[int], list[int]]]:
    """Each prompt, and the tokens that ``model`` generates after it, with the end token.

    Generation is greedy, or sampled by ``draw``. Prompts that leave no room lose their beginning.
    """
    new = NEW_TOKENS
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:
        new = min(new, max(1, positions // 2))
        prompts = [prompt[-(positions - new) :] for prompt in prompts]
    stops = stops_of(tokenizer)
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    # Options in a model's folder would change the samples.
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
