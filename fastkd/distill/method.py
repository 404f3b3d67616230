"""Base class of the methods: weighted loss terms, the layers they compare, trainable modules."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fastkd.analysis.model_inputs import Batches
from fastkd.distill.backbone import Backbone, Model
from fastkd.distill.layers import resolve_layers
from fastkd.distill.outputs import LayerRequest
from fastkd.distill.prediction_losses import PredictionOptions
from fastkd.distill.step import Step, check_head, check_same_head, check_same_kind

Layers = str | Sequence[int]
#: Terms to compute: those that read logits or hidden states at an LM head, or all others.
Only = Literal["predictions", "features"]


def check_method(name: str, given: Any) -> None:
    """Raise a TypeError with the likely fix unless ``given`` is a method."""
    if isinstance(given, Method):
        return
    what = type(given).__name__
    if isinstance(given, str):
        what = f"{given!r}; pass fastkd.distill.method_by_name({given!r})"
    elif isinstance(given, type) and issubclass(given, Method):
        what = f"the class {given.__name__}; pass an instance, {given.__name__}()"
    raise TypeError(f"{name} must be a fastkd.distill method, got {what}")


class Method(nn.Module):
    """Base class of all methods, yours too: ``Distiller(teacher, student, MyMethod())``.

    A subclass returns the weight of each term in `weights`. Each term is a method of that name,
    which takes a `Step` and returns a scalar; ``task`` is defined here. `choose_layers` selects
    the layers to capture from both models, `make_parts` creates trainable modules besides the
    student. Each constructor argument is kept as an attribute of its name, for `hyperparameters`.

    Layers to capture, counted from 1:

    - hidden states: ``student_layers`` and ``teacher_layers``; read by ``step.layers``
    - attention maps: ``student_attentions``, ``teacher_attentions``; ``step.attentions``. Both
      models need ``attn_implementation="eager"``: other implementations never hold the maps.
    - queries, keys and values: ``student_qkv``, ``teacher_qkv``; ``step.qkv``

    A step's rows start at position 0, with padding behind (``step.real``, or ``step.mask``, which
    is None if no row is padded). A term that compares samples applies ``step.whole`` to its
    features, and a mean over samples is ``step.mean(total, count)``: the term can then span
    several processes, see ``gather`` of `Distiller`.

    Example:
        >>> from torch.nn import functional as F
        >>> class HiddenAndAttention(Method):
        ...     def __init__(self, *, hidden=1.0, attention=1.0):
        ...         super().__init__()
        ...         self.hidden, self.attention = hidden, attention
        ...     def choose_layers(self, teacher, student):
        ...         self.pair_layers("uniform", teacher, student)
        ...         self.student_attentions = self.student_layers
        ...         self.teacher_attentions = self.teacher_layers
        ...     def make_parts(self, teacher, student):
        ...         self.W = nn.Linear(student.hidden_size, teacher.hidden_size)
        ...     def weights(self, progress):
        ...         return {"task": 1.0, "states": self.hidden, "maps": self.attention}
        ...     def states(self, step):
        ...         pairs = zip(*step.layers(self.student_layers, self.teacher_layers))
        ...         return sum(F.mse_loss(self.W(s[step.real]), t[step.real]) for s, t in pairs)
        ...     def maps(self, step):
        ...         maps = step.attentions(self.student_attentions, self.teacher_attentions)
        ...         real = step.real[:, None, :, None] & step.real[:, None, None, :]
        ...         return sum(F.mse_loss(s * real, t * real) for s, t in zip(*maps))
    """

    #: The paper's hyper-parameters that differ from the defaults; docs/studies has the reasons.
    paper: Mapping[str, Any] = {}
    #: Terms that read logits. Each is a mean over independent items, by ``step.mean``. If only the
    #: task term has a weight, the teacher's logits are not computed.
    logit_terms: tuple[str, ...] = ("task", "soft")
    #: Whether a term reads the teacher's outputs; otherwise the teacher doesn't run.
    uses_teacher: bool = True
    #: Terms that compare samples with each other; a micro-batch alone changes their value.
    across_samples: tuple[str, ...] = ()
    #: Whether a term compares samples of the same class; each sample then needs a class label.
    by_class: bool = False
    #: Pooling of the teacher's hidden states: "tokens" for none, or one row per sample, "cls" or
    #: "mean" as in `Step.pooled`. A teacher cache stores only the pooled states.
    teacher_pool: str = "tokens"
    #: Whether to train on the loss after LRC-BERT's gradient perturbation.
    perturb: bool = False
    #: Whether the weights depend on progress; the loop must then call ``Distiller.set_progress``.
    scheduled: bool = False
    #: Terms to skip in this step: the label loss on text that the student generated.
    left_out: frozenset[str] = frozenset()
    #: Scale of this process's label loss: its share of the labels of all processes, times the
    #: number of processes. None for 1.
    label_share: Any = None
    #: Hyper-parameters without the terms on logits; the commands use them for models without a
    #: head.
    headless: Mapping[str, Any] = {}
    #: Remedy in the error for a model without a head.
    _without_head: str = "set the weights of these terms to 0"

    def __init__(self) -> None:
        super().__init__()
        self.student_layers: list[int] = []
        self._teacher_layers: list[int] | None = []
        self.student_attentions: list[int] = []
        self.teacher_attentions: list[int] = []
        self.student_qkv: list[int] = []
        self.teacher_qkv: list[int] = []
        self._built_for: tuple[tuple[int, ...], ...] | None = None
        self.uses_lm_head = False  # set by `build`

    @property
    def teacher_layers(self) -> list[int]:
        """One teacher layer, counted from 1, for each of ``student_layers``."""
        if self._teacher_layers is None:
            raise RuntimeError(
                f"{type(self).__name__} chooses its teacher layers from data: call "
                "distiller.prepare(batches) before training, or pass layers=[...]"
            )
        return self._teacher_layers

    @teacher_layers.setter
    def teacher_layers(self, layers: list[int]) -> None:
        self._teacher_layers = layers

    def layer_request(self, side: str) -> LayerRequest:
        """Layers to capture from the "student" or the "teacher"."""
        kept = (getattr(self, f"{side}_{what}") for what in ("layers", "attentions", "qkv"))
        return LayerRequest(*map(tuple, kept))

    def build(self, teacher: Model, student: Backbone) -> None:
        """Create the trainable modules for two models; a second call needs the same sizes."""
        name = type(self).__name__
        check_same_kind(teacher, student)
        sizes = (teacher.sizes, student.sizes)
        if self._built_for not in (None, sizes):
            raise ValueError(
                f"method: this {name} was built for models of other sizes; make a new {name}"
            )
        both_ends = [self.weights(progress) for progress in (0.0, 1.0)]
        names = {*both_ends[0], *both_ends[1]}
        if type(self).compute is Method.compute:
            for term in names:
                if not callable(getattr(self, term, None)):
                    raise TypeError(
                        f"{name}.weights: {term!r} is not a term; define the method {term}(step)"
                    )
        kinds = type(self).__mro__
        owner = next(i for i, kind in enumerate(kinds) if "compute" in vars(kind))
        for term in names - {"task", "soft"}:
            if kinds[owner] is not Method and any(term in vars(k) for k in kinds[:owner]):
                raise TypeError(
                    f"{name}.{term}: {kinds[owner].__name__} computes this term in compute(), "
                    "which doesn't call the method; override compute instead"
                )
        # A user's own term may read logits, so only fastkd's own terms use LM-head inputs.
        made = [type(self).forward, type(self).compute, *(getattr(self, x, None) for x in names)]
        self.uses_lm_head = all(x is None or x.__module__.startswith("fastkd.") for x in made)
        on_output = [t for t in self.logit_terms if any(weights.get(t) for weights in both_ends)]
        check_head(student, on_output, name, self._without_head)
        if "soft" in on_output:
            check_same_head(teacher, student, name)
        if self._built_for is None:
            self.choose_layers(teacher, student)
            self.make_parts(teacher, student)
            self._built_for = sizes
        for backbone, kept in (
            (student, self.student_attentions),
            (teacher, self.teacher_attentions),
        ):
            if kept:
                backbone.check_eager(name)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        """Set the layers to capture from both models; none by default."""

    def pair_layers(self, layers: Layers, teacher: Model, student: Backbone) -> None:
        """Pair each student layer with a teacher layer: "uniform", "top", "bottom", or a list of
        one teacher layer per student layer."""
        self.student_layers = list(range(1, student.num_layers + 1))
        self.teacher_layers = resolve_layers(layers, teacher.num_layers, student.num_layers)

    def make_parts(self, teacher: Model, student: Backbone) -> None:
        """Create losses and projections; none by default."""

    def prepare(self, teacher: nn.Module, batches: Batches) -> None:
        """Make choices from data before training; none by default."""

    @property
    def prepared(self) -> bool:
        """Whether `prepare` is done or not needed."""
        return self._teacher_layers is not None

    def weights(self, progress: float) -> dict[str, float]:
        """Weight of each term at ``progress``, the fraction of the training that is done."""
        raise NotImplementedError

    def compares_logits(self, *progress: float) -> bool:
        """Whether a term reads the teacher's logits at any of these values of progress."""
        terms = [term for term in self.logit_terms if term.rpartition(".")[2] != "task"]
        return any(self.weights(share).get(term) for share in progress for term in terms)

    @property
    def prediction_options(self) -> PredictionOptions:
        """Options of the terms ``task`` and ``soft``."""
        return PredictionOptions()

    def forward(
        self, step: Step, progress: float, only: Only | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weighted loss (None if no term has a weight), and each unweighted term, detached.

        ``only`` selects the terms on predictions or on features, for micro-batch accumulation.
        """
        weights = {
            name: weight
            for name, weight in self.weights(progress).items()
            if weight != 0
            and only in (None, "predictions" if name in self.logit_terms else "features")
            and name not in self.left_out
        }
        shared = "task" in weights and self.label_share is not None
        if shared:
            weights["task"] = weights["task"] * self.label_share
        if not weights:
            return None, {}
        loss, terms = self.compute(step, weights)
        if shared:
            terms["task"] = terms["task"] * self.label_share
        return loss, terms

    def compute(self, step: Step, weights: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """Weighted sum of the terms in ``weights``, and each unweighted term, detached.

        By default a term is the method of its name; "task" and "soft" of language models come
        from one pass over hidden states and heads. A subclass overrides `compute` if one
        computation returns several terms.
        """
        loss: Any = 0.0
        terms: dict[str, Tensor] = {}
        predictions = {name: weights[name] for name in ("task", "soft") if name in weights}
        heads = step.student.head_inputs is not None and (
            "soft" not in predictions or step.teacher.head_inputs is not None
        )
        if predictions and self.uses_lm_head and heads:
            loss, terms = step.head_loss(predictions, self.prediction_options)
        for name, weight in weights.items():
            if name not in terms:
                term = getattr(self, name)(step)
                loss, terms[name] = loss + weight * term, term.detach()
        return loss, terms

    def task(self, step: Step) -> Tensor:
        """Student's loss on the labels."""
        return step.task_loss(self.prediction_options.label_spread)

    def hyperparameters(self) -> dict[str, Any]:
        """The constructor's arguments by name."""
        names = inspect.signature(type(self)).parameters
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise TypeError(
                f"{type(self).__name__}: the arguments {', '.join(missing)} are not attributes; "
                "keep each argument as an attribute of its name"
            )
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        names = inspect.signature(type(self)).parameters
        return ", ".join(f"{name}={getattr(self, name, ...)!r}" for name in names)
