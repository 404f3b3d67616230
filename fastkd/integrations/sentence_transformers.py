"""Losses for sentence-transformers, to distil embedding models, which have no logits.

Each is a ``loss`` of ``SentenceTransformerTrainer``. The labels are the teacher's embeddings,
computed once (``{"label": teacher.encode(batch["text"])}`` in ``dataset.map``):

- (B, Dt) for one column of text, or for several columns of one meaning, such as translations: the
  columns' losses are averaged;
- (B, C, Dt) for C columns with an embedding each: their C·B texts are the samples of one batch, so
  anchors are compared with positives too.

Under DistributedDataParallel the texts of all processes are one batch (``gather``). Parameters of a
loss, which DistributedDataParallel doesn't handle, are broadcast from the first process and their
gradients averaged. ``mini_batch_size`` runs the student over micro-batches, twice, and compares the
whole batch (GradCache): memory holds the activations of one micro-batch, and the gradient is that
of the whole batch. The Trainer's ``gradient_accumulation_steps`` compares each batch by itself: it
changes all losses that compare samples.

The Trainer saves only the student. A loss's own parameters are in its ``state_dict()``; a resumed
run initialises them again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastkd._core import check
from fastkd._core.extras import require
from fastkd._core.numerics import Projector, working_dtype
from fastkd.distill.distiller import Distiller
from fastkd.distill.method import Method
from fastkd.distributed import world_size
from fastkd.losses import relation
from fastkd.losses.cca import CCALoss, Ridge
from fastkd.losses.cos_nce import cos_nce_loss
from fastkd.models.backbone import Backbone

EXTRA = "sentence-transformers"
_models: Any = require("sentence_transformers", EXTRA)
_gradcache: Any = require("sentence_transformers.base.losses.gradcache", EXTRA)
_merged_forward: Any = require("sentence_transformers.base.losses.merged_forward", EXTRA)
_CachedLossMixin: Any = _gradcache.CachedLossMixin

__all__ = ["CCADistillLoss", "CosNCEDistillLoss", "LayerDistillLoss", "RelationDistillLoss"]


class _SynchronisedLoss(nn.Module):
    """A loss that keeps its own parameters equal in all processes."""

    _synchronised = False

    def _own_parameters(self) -> list[nn.Parameter]:
        return []

    def _synchronise(self) -> None:
        """Broadcast the first process's parameters, once; average their gradients from then on."""
        if self._synchronised or world_size() == 1:
            return
        self._synchronised = True
        for parameter in self._own_parameters():
            dist.broadcast(parameter.data, 0)
            parameter.register_hook(_mean_over_processes)


def _mean_over_processes(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / world_size()


class _EmbeddingLoss(_CachedLossMixin, _SynchronisedLoss):
    """A loss between the student's embeddings and the teacher's, which are the labels."""

    options: tuple[str, ...]  # of the subclass, besides those of all
    paper: tuple[str, str, int, str]  # key, author, year and title

    def __init__(
        self, model: Any, dims: Sequence[int] | None, gather: bool, mini_batch_size: int | None
    ) -> None:
        super().__init__()
        _check_one_vector("model", model, type(self).__name__)
        self.model = model
        width = model.get_embedding_dimension()
        if dims is None and model.truncate_dim is not None:  # encode truncates, forward doesn't
            dims = [width]
        self.dims = _checked_dims(dims, width)
        self.gather = gather
        if mini_batch_size is not None:
            check.positive_int("mini_batch_size", mini_batch_size)
        self.mini_batch_size = mini_batch_size
        self.uses_gradient_cache = mini_batch_size is not None

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None
    ) -> Tensor:
        """Loss of a batch: tokenised columns of text, and the teacher's embeddings."""
        self._synchronise()
        if self.uses_gradient_cache:
            cached: Any = self.forward_cached
            loss: Tensor = cached(sentence_features, labels)
            return loss
        embeddings = _merged_forward.embed_columns(self.model, sentence_features)
        return self.loss_of_embeddings(embeddings, labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """See sentence-transformers' ``CachedLossMixin``."""
        loss = self.loss_of_embeddings([torch.cat(parts) for parts in reps], labels)
        if not with_backward:
            return loss
        loss.backward()
        return loss.detach()

    def loss_of_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Loss of the student's embeddings (B, Ds) of each column of text.

        Args:
            embeddings: one tensor for each of C columns.
            labels: the teacher's embeddings, (B, Dt) or (B, C, Dt).

        Returns:
            Scalar: the mean over the prefixes ``dims``, and with labels (B, Dt) over the columns.

        Raises:
            ValueError: labels are missing, or of another shape.
        """
        dims: Sequence[int | None] = self.dims or (None,)
        losses = [
            self.compare(student if dim is None else student[:, :dim], teacher)
            for student, teacher in self._pairs(list(embeddings), labels)
            for dim in dims
        ]
        return torch.stack(losses).mean()

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Loss of student (B, d) and teacher (B, Dt) embeddings."""
        raise NotImplementedError

    def _pairs(self, embeddings: list[Tensor], labels: Tensor | None) -> list[tuple[Tensor, ...]]:
        name, rows, columns = type(self).__name__, len(embeddings[0]), len(embeddings)
        if labels is None:
            raise ValueError(
                f'{name}: labels are missing; add a column "label" with the teacher\'s embeddings '
                "to the data set, with dataset.map"
            )
        shape = tuple(labels.shape)
        if shape[:-1] != (rows,) and shape[:-1] != (rows, columns):
            raise ValueError(
                f"{name}: labels must be the teacher's embeddings, ({rows}, Dt) or "
                f"({rows}, {columns}, Dt), got shape {shape}"
            )
        dtype = working_dtype(embeddings[0])  # under autocast the student's are half precision
        embeddings = [student.to(dtype) for student in embeddings]
        teacher = labels.detach().to(embeddings[0].device, dtype)
        if labels.dim() == 2:
            return [(student, teacher) for student in embeddings]
        return [(torch.cat(embeddings), teacher.transpose(0, 1).flatten(0, 1))]

    def get_config_dict(self) -> dict[str, Any]:
        """The options, for the student's model card."""
        names = (*self.options, "dims", "gather", "mini_batch_size")
        return {name: getattr(self, name) for name in names}

    @property
    def citation(self) -> str:
        """The paper, for the student's model card."""
        entries = zip(("author", "year", "title"), self.paper[1:], strict=True)
        lines = ",\n".join(f"    {name} = {{{value}}}" for name, value in entries)
        return f"\n@misc{{{self.paper[0]},\n{lines}\n}}\n"


def _checked_dims(dims: Sequence[int] | None, width: int | None) -> list[int] | None:
    if dims is None:
        return None
    if not dims or len(set(dims)) < len(dims):
        raise ValueError(f"dims must be different lengths of embeddings, got {list(dims)}")
    for dim in dims:
        check.positive_int("dims", dim)
        if width is not None and dim > width:
            raise ValueError(f"dims must be at most {width}, the embeddings' length, got {dim}")
    return list(dims)


class RelationDistillLoss(_EmbeddingLoss):
    """Similarities between the texts of a batch, matched to the teacher's (FCD, eqs. 4 and 9).

    1 − ρ between the (B, B) similarities of the student's and of the teacher's embeddings:
    `fastkd.relation_loss` over samples. Embedding sizes may differ, without a projection. Larger
    batches have more pairs to compare.

    Args:
        model: the student, a SentenceTransformer.
        normalize, distance, temperature: as in `fastkd.relation_loss`.
        dims: lengths of prefixes of the student's embeddings (Matryoshka). Each prefix is compared
            with the teacher's whole embeddings, and the losses are averaged. By default the
            embeddings that ``encode`` returns: whole, or truncated to ``truncate_dim``.
        gather: compare the texts of all processes.
        mini_batch_size: texts in one micro-batch of the student; see the module's docstring.

    >>> loss = RelationDistillLoss(model, dims=[384, 128])  # doctest: +SKIP
    >>> SentenceTransformerTrainer(model, train_dataset=data, loss=loss)  # doctest: +SKIP
    """

    options = ("normalize", "distance", "temperature")
    paper = (
        "huang2023fcd", "Huang et al.", 2023,
        "Towards Efficient Pre-Trained Language Model via Feature Correlation Distillation",
    )  # fmt: skip

    def __init__(
        self,
        model: Any,
        *,
        normalize: relation.Normalize = "l2",
        distance: relation.Distance = "pearson",
        temperature: float = 10.0,
        dims: Sequence[int] | None = None,
        gather: bool = True,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__(model, dims, gather, mini_batch_size)
        relation.FCDLoss(0.0, 1.0, normalize, distance, temperature=temperature)  # checks options
        self.normalize, self.distance, self.temperature = normalize, distance, temperature

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        options = {name: getattr(self, name) for name in self.options}
        return relation.relation_loss(
            student, teacher, over="samples", gather=self.gather, **options
        )


class CCADistillLoss(_EmbeddingLoss):
    """Canonical correlation with the teacher's embeddings (MC3KD, eqs. 4-7): `fastkd.CCALoss`.

    Each text is one observation, so batches should have several times as many texts as the
    embeddings have dimensions. Otherwise every correlation is near 1, nothing is learned, and the
    loss warns. ``gather``, ``mini_batch_size`` and a larger ``ridge`` help.

    Args:
        model: the student, a SentenceTransformer.
        ridge, top_k: as in `fastkd.CCALoss`.
        dims, gather, mini_batch_size: as in `RelationDistillLoss`.
    """

    options = ("ridge", "top_k")
    paper = (
        "fan2025mc3kd", "Fan et al.", 2025,
        "Maximizing the Effectiveness of Larger BERT Models for Compression",
    )  # fmt: skip

    def __init__(
        self,
        model: Any,
        *,
        ridge: Ridge = 1e-4,
        top_k: int | None = None,
        dims: Sequence[int] | None = None,
        gather: bool = True,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__(model, dims, gather, mini_batch_size)
        self.ridge, self.top_k = ridge, top_k
        self.loss = CCALoss(ridge, top_k, gather=gather)

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        self.loss.ridge, self.loss.top_k, self.loss.gather = self.ridge, self.top_k, self.gather
        loss: Tensor = self.loss(student[:, None], teacher[:, None])
        return loss


class CosNCEDistillLoss(_EmbeddingLoss):
    """Contrastive loss by angle, with other texts as negatives (LRC-BERT): `cos_nce_loss`.

    Student embeddings of the teacher's length are compared directly. Others are projected to that
    length: the projection is initialised as a slice of the identity, is trained with the student,
    and isn't part of it.

    Args:
        model: the student, a SentenceTransformer.
        teacher_dim: length of the teacher's embeddings; by default the student's.
        dims, gather, mini_batch_size: as in `RelationDistillLoss`; each prefix of another length
            than the teacher's embeddings has its own projection.

    Raises:
        ValueError: ``mini_batch_size`` with a projection, whose gradient GradCache doesn't support.
    """

    options = ("teacher_dim",)
    paper = (
        "fu2021lrcbert", "Fu et al.", 2021,
        "LRC-BERT: Latent-representation Contrastive Knowledge Distillation",
    )  # fmt: skip

    def __init__(
        self,
        model: Any,
        *,
        teacher_dim: int | None = None,
        dims: Sequence[int] | None = None,
        gather: bool = True,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__(model, dims, gather, mini_batch_size)
        width = model.get_embedding_dimension()
        self.teacher_dim = width if teacher_dim is None else teacher_dim
        check.positive_int("teacher_dim", self.teacher_dim)
        self.projections = nn.ModuleDict(
            {
                str(dim): Projector(dim, self.teacher_dim, bias=False, device=model.device)
                for dim in self.dims or [width]
                if dim != self.teacher_dim
            }
        )
        for projection in self.projections.values():
            nn.init.eye_(projection.weight)  # type: ignore[arg-type]
        if mini_batch_size is not None and len(self.projections):
            sizes = ", ".join(self.projections)
            raise ValueError(
                f"mini_batch_size can't be combined with a projection, which embeddings of {sizes} "
                f"need to match the teacher's {self.teacher_dim}; leave it out, or use "
                "RelationDistillLoss"
            )

    def _own_parameters(self) -> list[nn.Parameter]:
        return list(self.projections.parameters())

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        if teacher.shape[-1] != self.teacher_dim:
            raise ValueError(
                f"labels must be embeddings of length {self.teacher_dim} (teacher_dim), got "
                f"{teacher.shape[-1]}"
            )
        name = str(student.shape[-1])
        if name in self.projections:
            linear: Any = self.projections[name]
            student = linear(student).to(student.dtype)
        return cos_nce_loss(student, teacher, gather=self.gather)


class LayerDistillLoss(_SynchronisedLoss):
    """Any method of `fastkd.distill` on the hidden states of two embedding models.

    Each column of text is its own batch; the columns' losses are averaged. The teacher runs in each
    step, so no labels are needed. Another loss of the same student may be added, which uses the
    embeddings of the same pass. ``forward`` then returns a dict of that loss and ``"layers"``,
    which the Trainer adds up and logs; without another loss it returns a scalar.

    Args:
        model: the student, a SentenceTransformer that begins with a transformers encoder or
            decoder.
        teacher: a SentenceTransformer of the same vocabulary; it is frozen.
        method: without terms on labels and logits: ``FCD(task_weight=0)``, ``LRKD(alpha=None)``,
            ``MC3KD(alpha=None)``, or ``Several(...)`` of them. For a method that chooses its layers
            from data call ``loss.distiller.prepare(batches)``.
        loss: a sentence-transformers loss of ``model``, without gradient cache; it gets the labels.
        gather: compare the texts of all processes.

    Raises:
        TypeError: a model that doesn't begin with a transformers model.
        ValueError: different vocabularies, or a method that needs a schedule, perturbed embeddings
            or labels, which the Trainer doesn't provide.

    >>> layers = LayerDistillLoss(model, teacher, FCD(task_weight=0))  # doctest: +SKIP
    >>> both = LayerDistillLoss(
    ...     model, teacher, FCD(task_weight=0), loss=RelationDistillLoss(model)
    ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        teacher: Any,
        method: Method,
        *,
        loss: nn.Module | None = None,
        gather: bool = True,
    ) -> None:
        super().__init__()
        for name, each in (("model", model), ("teacher", teacher)):
            _check_one_vector(name, each, type(self).__name__)
        student, taught = _encoder("model", model), _encoder("teacher", teacher)
        if model.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
            raise ValueError(
                "model and teacher have different vocabularies, and hidden states are compared "
                "token by token; compare embeddings (RelationDistillLoss), or layers by "
                "Distiller with TwoTokenizers"
            )
        if method.perturb or method.scheduled:
            needed = "perturbed embeddings" if method.perturb else "a schedule"
            raise ValueError(
                f"method: {type(method).__name__} needs {needed}, which sentence-transformers' "
                "Trainer doesn't provide; turn that off in its options"
            )
        if getattr(loss, "uses_gradient_cache", False):
            raise ValueError(
                "loss: its gradient cache runs the student over mini-batches of its own; use the "
                "loss without gradient cache"
            )
        self.model = model
        self.loss = loss
        self.distiller = Distiller(taught, student, method, gather=gather)
        self._encoder = _EncoderInPipeline(student)
        self.distiller.student_model = self.distiller.reader.student = self._encoder

    @property
    def method(self) -> Method:
        return self.distiller.method

    def _own_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.method.parameters() if p.requires_grad]

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Any:
        """Loss of a batch: tokenised columns of text, and labels for ``loss``."""
        if isinstance(self.model, nn.DataParallel):
            raise ValueError(
                "DataParallel runs copies of the student, whose hidden states LayerDistillLoss "
                "can't read; start a process for each GPU (torchrun, DistributedDataParallel)"
            )
        self._synchronise()
        columns = list(sentence_features)
        layers, embedded = [], []
        for features in columns:
            self._encoder.begin(self.model, features)
            read = {name: x for name, x in features.items() if name in self._encoder.known_inputs}
            layers.append(self.distiller(**read).loss)
            embedded.append(self._encoder.output)
        total = torch.stack(layers).mean()
        if self.loss is None:
            # DistributedDataParallel waits for all parameters of the pass, so add zeros that depend
            # on them: 0 · x before the sum, which may be infinite in float16, where 0 · inf is NaN.
            return total + sum((0 * x["sentence_embedding"]).sum() for x in embedded)
        value = self._other_loss(columns, embedded, labels)
        losses = value if isinstance(value, dict) else {"embeddings": value}
        return {**losses, "layers": total}

    def _other_loss(self, columns: list[Any], embedded: list[Any], labels: Tensor | None) -> Any:
        """``loss`` of the embeddings computed already, without running the student again."""
        known = {id(features): output for features, output in zip(columns, embedded, strict=True)}
        assert self.loss is not None
        before, name = self.model.forward, type(self.loss).__name__

        def embed(features: dict[str, Any], **options: Any) -> dict[str, Any]:
            if id(features) not in known:
                raise ValueError(
                    f"loss: {name} runs the student on other inputs than the batch's columns; use "
                    "it without LayerDistillLoss, or combine methods with Several"
                )
            return dict(known[id(features)])

        # Patch forward as sentence-transformers' MatryoshkaLoss does.
        self.model.forward = embed
        try:
            with _merged_forward.column_merging_disabled():
                return self.loss(columns, labels)
        finally:
            self.model.forward = before

    def get_config_dict(self) -> dict[str, Any]:
        """The options, for the student's model card."""
        name = None if self.loss is None else type(self.loss).__name__
        options = f"{type(self.method).__name__}({self.method.extra_repr()})"
        return {"method": options, "loss": name, "gather": self.distiller.gather}

    @property
    def citation(self) -> str:
        return getattr(self.loss, "citation", "")


class _EncoderInPipeline(Backbone):
    """The encoder in a SentenceTransformer, run through the whole pipeline.

    The hidden states come from the same pass as the embeddings, and from the pass that
    DistributedDataParallel handles.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__(encoder, "student")
        self._pipeline: Any = None
        self._features: dict[str, Any] = {}
        self.output: dict[str, Any] = {}

    def begin(self, pipeline: nn.Module, features: dict[str, Any]) -> None:
        """Set the pipeline and the features of the next pass."""
        self._pipeline, self._features = pipeline, features

    def run(self, batch: dict[str, Any], *, compiled: bool = True) -> Any:
        encoder: Any = self.inner
        own, plain = "forward" in vars(encoder), encoder.forward
        seen: list[Any] = []

        def as_module(*args: Any, **kwargs: Any) -> Any:
            encoder.forward = plain
            seen.append(encoder(*args, **kwargs))
            return seen[-1]

        # The pipeline calls encoder.forward, which skips hooks: call the module instead.
        encoder.forward = as_module
        try:
            self.output = self._pipeline({**self._features, **batch})
        finally:
            if own:
                encoder.forward = plain
            else:
                del encoder.forward
        return seen[-1]


# What the library's other models return, and where they are distilled.
OTHER_MODELS = {
    "MultiVectorEncoder": "has one for each token; pass its transformers models to a Distiller, or "
    "take a SentenceTransformer",
    "SparseEncoder": "has a weight for each token of its vocabulary; pass its transformers models "
    "to a Distiller, or take a SentenceTransformer",
    "CrossEncoder": "has a score for a pair of texts; use Distiller(teacher.model, student.model, "
    "method)",
}


def _check_one_vector(name: str, model: Any, loss: str) -> None:
    """Raise unless a model is a SentenceTransformer, with a dense vector for each text."""
    if isinstance(model, _models.SentenceTransformer):
        return
    for kind in type(model).__mro__:
        if kind.__name__ in OTHER_MODELS:
            raise TypeError(
                f"{name}: {loss} compares one vector a text, and {type(model).__name__} "
                f"{OTHER_MODELS[kind.__name__]}"
            )
    raise TypeError(f"{name} must be a SentenceTransformer, got {type(model).__name__}")


def _encoder(name: str, model: Any) -> Any:
    """The transformers model that a SentenceTransformer begins with."""
    first = next(iter(model.children()), None)
    encoder = getattr(first, "auto_model", None)
    if encoder is None:
        raise TypeError(
            f"{name} must be a SentenceTransformer that begins with a transformers model, got "
            f"{type(model).__name__} with {type(first).__name__} first"
        )
    return encoder
