"""A language model's predictions of rows of tokens, which a server or files have."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastkd.distill.cache import scatter
from fastkd.distill.method import Method
from fastkd.distill.teachers import OutputSource
from fastkd.lm.heads import Head
from fastkd.lm.targets import TopK
from fastkd.models.backbone import Model
from fastkd.models.batch import Batch
from fastkd.models.hooks import HeadInputs
from fastkd.models.outputs import Outputs


class SourceError(RuntimeError):
    """A row's predictions are missing, or can't be learned from."""


class SourceModel(Model):
    """Properties of a decoder that doesn't run here. Its vocabulary is the student's by default."""

    has_head = per_token = sentence_last = predicts_words = True
    class_labels: Sequence[str] = []

    def __init__(self, name: str, what: str, output_size: int | None = None) -> None:
        self.class_name, self._what, self.output_size = name, what, output_size

    @property
    def sizes(self) -> tuple[int, ...]:
        return ()

    def __getattr__(self, name: str) -> Any:
        if name in ("num_layers", "hidden_size"):
            raise ValueError(
                f"teacher: the method compares layers, but {self._what} has predictions only; "
                "take SoftTargets, or a teacher that runs here"
            )
        raise AttributeError(f"{type(self).__name__} has no {name}")


#: Of a row of T tokens, the top k (T − 1, K) of tokens 1 to T − 1, or the LM head's inputs (T, D).
Answer = TopK | Tensor


class RowSource(OutputSource):
    """A teacher that answers rows of token ids with a top k, or with the LM head's inputs."""

    what: str  # in errors
    top_k: int | None
    temperature: float
    head: Head | None = None

    def answers(self, rows: list[tuple[int, ...]]) -> list[Answer]:
        """The predictions of each row of token ids."""
        raise NotImplementedError

    def serve(self, method: Method, model: Model) -> None:
        """Raise unless every output that a built method reads is there."""
        name = type(method).__name__
        if self.top_k is None:
            return
        if method.merges_spans:
            raise ValueError(
                f"teacher: {name} compares all tokens, but {self.what} has the {self.top_k} most "
                "probable ones; pass a model, or a server's hidden_states=True and a head"
            )
        if wrong := {t for t in method.soft_temperatures if t != self.temperature}:
            raise ValueError(
                f"temperature: {name} has {min(wrong)}, the log-probabilities of {self.what} "
                f"{self.temperature}; give them one temperature"
            )

    def outputs(self, batch: Batch, request: dict[str, Any], device: torch.device) -> Outputs:
        """The teacher's outputs on a batch."""
        if not request["logits"]:
            return Outputs({}, None)
        answers = self.answers(self.rows_of(batch))
        real = batch.token_mask

        def at_tokens(parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
            """Rows (T, width) of each document at its tokens, (B, N, width); padding is zero."""
            return scatter(torch.cat([torch.zeros(0, width, dtype=dtype), *parts]), real).to(device)

        if self.top_k is None:
            assert self.head is not None
            head = self.head.map(lambda x: x.to(device))
            states = [answer for answer in answers if isinstance(answer, Tensor)]
            inputs = at_tokens(states, head.weight.shape[1], torch.float32)
            return Outputs({}, None, head_inputs=HeadInputs(inputs, head))
        # The last token of a row predicts nothing that is compared.
        last = torch.zeros(1, self.top_k)
        found = [answer for answer in answers if isinstance(answer, TopK)]
        ids = [torch.cat([each.ids, last.long()]) for each in found]
        values = [torch.cat([each.log_probs, last]) for each in found]
        first = at_tokens(ids, self.top_k, torch.int64)
        top_k = TopK(first, at_tokens(values, self.top_k, torch.float32))
        return Outputs({}, None, top_k=top_k)

    def rows_of(self, batch: Batch) -> list[tuple[int, ...]]:
        """The real tokens of each document."""
        ids = batch.inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or "decoder_input_ids" in batch.inputs:
            raise ValueError(f"input_ids: {self.what} reads token ids (B, N); pass them")
        documents = batch.documents
        tokens = ids if documents is None else documents.unpack(ids)
        mask = batch.token_mask if documents is None else documents.mask
        kept = zip(tokens.cpu(), mask.cpu(), strict=True)
        rows = [tuple(row[real].tolist()) for row, real in kept]
        return [row for row in rows if row]
