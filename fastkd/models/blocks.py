"""Teachers and students that are not transformers models: any module with a list of blocks."""

import inspect
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fastkd._core import check
from fastkd.models.backbone import Backbone


class Blocks(nn.Module):
    """Any model with a list of blocks, as a Distiller's teacher or student.

    A block takes hidden states (B, N, D), such as tokens of a text or patches of an image, as its
    first argument. It returns hidden states, alone or as the first entry of a tuple. Inputs are
    passed to the model by name. ``attention_mask`` (B, N) marks the real tokens; the model
    receives it only if its ``forward`` accepts it.

    Args:
        model: the model; it returns logits alone, as the first entry of a tuple, or as ``.logits``.
        blocks: name of its ModuleList or Sequential, such as "encoder.layers".
        hidden_size: D.
        output_size: number of classes or vocabulary entries of the logits; None for a model
            without a head, whose output is not read.
        final: name of the module whose output the head reads, such as the last norm; by default
            the last block.
        embeddings: name of the module whose output LRC-BERT perturbs.
        batch_first: False where hidden states are (N, B, D).
        per_token: the head makes a prediction for each token.
        causal: the logits at a position predict the next token.
        sentence_last: the head reads the last token, not the first.
        regression: the head predicts numbers.

    Raises:
        ValueError: the model has no module of this name, or ``blocks`` is no list of modules.

    >>> import torch
    >>> from fastkd.distill import FCD, Distiller
    >>> def model(layers):
    ...     return nn.Sequential(nn.Embedding(50, 16), nn.Sequential(
    ...         *(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    ...           for _ in range(layers))))
    >>> sides = [Blocks(model(n), "1", hidden_size=16) for n in (4, 2)]
    >>> out = Distiller(*sides, FCD(task_weight=0))(input=torch.arange(48).view(4, 12))
    >>> sorted(out.terms)
    ['samples', 'tokens', 'total']
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: str,
        *,
        hidden_size: int,
        output_size: int | None = None,
        final: str | None = None,
        embeddings: str | None = None,
        batch_first: bool = True,
        per_token: bool = False,
        causal: bool = False,
        sentence_last: bool = False,
        regression: bool = False,
    ) -> None:
        super().__init__()
        check.positive_int("hidden_size", hidden_size)
        for name, path in (("blocks", blocks), ("final", final), ("embeddings", embeddings)):
            try:
                model.get_submodule(path or "")
            except AttributeError as error:
                raise ValueError(
                    f"{name}: {type(model).__name__} has no module {path!r}; "
                    "pass a name from named_modules()"
                ) from error
        found = model.get_submodule(blocks)
        if not isinstance(found, (nn.ModuleList, nn.Sequential)) or not len(found):
            raise ValueError(
                f"blocks: {blocks!r} is a {type(found).__name__} of {len(list(found.children()))} "
                "modules; pass the name of a filled ModuleList or Sequential"
            )
        self.model, self.blocks = model, blocks
        self.hidden_size, self.output_size = hidden_size, output_size
        self.final, self.embeddings = final, embeddings
        self.batch_first, self.per_token, self.causal = batch_first, per_token, causal
        self.sentence_last, self.regression = sentence_last, regression

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


class BlocksBackbone(Backbone):
    """`Backbone` of a model that `Blocks` describes."""

    shows_states = False
    mixes_documents = False  # unknown; tested with a packed batch
    num_tokens = None

    def __init__(self, model: Blocks, name: str) -> None:
        inner: Any = model.model
        self.model: Any = model
        self.uncompiled = model
        self.inner, self.base = inner, inner
        self.config: Any = getattr(inner, "config", None)
        self.stack_config = self.config
        self.problem = "regression" if model.regression else None
        self.has_head, self.output_size = model.output_size is not None, model.output_size
        self.class_name, self._name = type(inner).__name__, name
        self.per_token, self.causal = model.per_token, model.causal
        self.sentence_last = model.sentence_last
        self.hidden_size, self.blocks_name = model.hidden_size, model.blocks
        self.blocks: Any = inner.get_submodule(model.blocks)
        self.num_layers = len(self.blocks)
        self.batch_dim = self.last_batch_dim = 0 if model.batch_first else 1
        self.shared_blocks = self.compiled = False
        self._hooks_reach = True
        self._replaced: list[Tensor] = []
        self.known_apart = set()
        self.last_modules = {inner.get_submodule(model.final) if model.final else self.blocks[-1]}
        parameters = inspect.signature(inner.forward).parameters
        self.known_inputs = self._accepts = set(parameters)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @property
    def embeddings(self) -> nn.Module:
        if self.model.embeddings is None:
            raise ValueError(
                f"embeddings: the method perturbs the embeddings of the {self._name} "
                f"({self.class_name}), but Blocks names none; pass embeddings=..., or set the "
                "method's perturb=False"
            )
        return self.inner.get_submodule(self.model.embeddings)

    def reads_last_position(self, batch: dict[str, Any]) -> bool:
        # The head may read the last position, padding or not.
        return self.has_head and self.sentence_last and not self.per_token

    def run(self, batch: dict[str, Any], *, compiled: bool = True) -> Any:
        inputs = dict(batch)
        if not self._takes_all:
            if "attention_mask" not in self.known_inputs:
                inputs.pop("attention_mask", None)
            self.check_inputs(inputs)
        output = self.model(**inputs)
        if not self.has_head:
            return SimpleNamespace(logits=None)
        if isinstance(output, (tuple, list)):
            output = output[0]
        elif not isinstance(output, Tensor):
            output = output["logits"] if isinstance(output, dict) else output.logits
        return SimpleNamespace(logits=output)

    def check_eager(self, method: str) -> None:
        raise ValueError(
            f"{method} compares attention maps, which only transformers models return "
            f"({self.class_name} is none); use another method"
        )


def backbone_of(model: nn.Module, name: str) -> Backbone:
    return BlocksBackbone(model, name) if isinstance(model, Blocks) else Backbone(model, name)
