"""Stored log-probabilities as the teacher of a command: files of a top k, or chat completions."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastkd.integrations import openai
from fastkd.integrations.top_k_files import TopKFiles, TopKRows, key_of
from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.chat_template import runs_of
from fastkd.train.config import Config
from fastkd.train.conversations import LOGPROBS
from fastkd.train.errors import InputError
from fastkd.train.loading import Data, training_encoder
from fastkd.train.options import COMPLETIONS


class Completions(TopKRows):
    """The log-probabilities in the answers of chat rows; see `fastkd.integrations.openai`."""

    def __init__(self, config: Config, data: Data) -> None:
        super().__init__(f"--teacher {COMPLETIONS}", 1.0)
        talks = [json.loads(messages[-1]) for messages in data.corpus.train.column("text")]
        contents = [(talk.get(LOGPROBS) or {}).get("content") or [] for talk in talks]
        likely = (entry.get("top_logprobs") or () for content in contents for entry in content)
        self.top_k = max(map(len, likely), default=0)
        if not self.top_k:
            raise InputError(
                f"{self.what}: no answer of --train has logprobs; each row needs the logprobs of a "
                "finished chat completion (logprobs=true, top_logprobs=20), in choices or in its "
                "last message"
            )
        rows = training_encoder(config, data, data.max_length)(data.corpus.train)
        answers = read = probable = unknown = tokens = 0
        for i, content in enumerate(contents):
            ids, labels = rows[i]["input_ids"], rows[i]["labels"]
            run = runs_of([int(label != UNLABELLED) for label in labels])[-1]
            own = list(ids[run.start : run.stop])
            try:
                found = openai.top_k(content, own, data.tokenizer, self.top_k) if content else None
            except (TypeError, ValueError) as error:
                file, number = rows.source_of(i)
                raise InputError(f"{self.what}: {file}, row {number}: {error}") from error
            tokens += len(own)
            if found is not None:
                answers, read = answers + 1, read + found.read
                probable, unknown = probable + found.probable, unknown + found.unknown
            self._places[key_of(ids)] = (ids, run.start, found)
        self.reading = (
            f"{answers} of {len(contents)} answers have log-probabilities, at {read} of their "
            f"{tokens} tokens; {unknown} of {probable} probable tokens are no token of the student"
        )

    def find(self, place: Any) -> tuple[Tensor, Tensor]:
        """Row i has the predictions of token i + 1; outside the answer there are none."""
        ids, start, found = place
        first = torch.zeros(len(ids), self.top_k or 1, dtype=torch.int64)
        values = torch.full(first.shape, -torch.inf)
        if found is not None:
            part = slice(start - 1, start - 1 + len(found.top_k.ids))
            first[part], values[part] = found.top_k.ids, found.top_k.log_probs
        return first, values


def stored_teacher(config: Config, data: Data) -> TopKRows:
    """The teacher of --teacher completions, or of --teacher DIR with files of a top k."""
    name = cast(str, config.teacher)
    if data.task.two_tokenizers != "spans":
        raise InputError(
            f"--teacher {name}: its log-probabilities are of tokens; take --task causal-lm or chat"
        )
    if not Path(name).expanduser().exists():
        if data.task.name() != "chat":
            raise InputError(f"--teacher {name}: chat rows have completions; take --task chat")
        return Completions(config, data)
    try:
        return TopKFiles(Path(name).expanduser(), columns=config.teacher_columns.split(","))
    except (OSError, ValueError) as error:
        raise InputError(f"--teacher {name}: {error}") from error
