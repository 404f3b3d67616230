"""Base classes of the methods: weighted terms, the layers they compare, trainable modules."""

import functools
import inspect
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor, nn

from fastkd._core import check
from fastkd.distill.prediction_losses import (
    MULTI_LABEL,
    REGRESSION,
    PredictionOptions,
    head_loss,
    soft_sums,
    task_loss,
)
from fastkd.distill.step import Step
from fastkd.lm.soft_targets import DivergenceWord
from fastkd.models.backbone import Backbone, Model
from fastkd.models.inputs import Batches
from fastkd.models.outputs import LayerRequest
from fastkd.models.student import resolve_layers

# Largest multiple to which vocabularies are padded.
LARGEST_PADDING = 1024
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


def other_vocabulary(student: int, teacher: int) -> str:
    """Error text for a student whose vocabulary differs in size from the teacher's."""
    return (
        f"its vocabulary has {student} tokens, the teacher's {teacher}; both must read the same "
        "tokens"
    )


def shared_tokens(teacher: Model, student: Model) -> int | None:
    """Number n of leading tokens that both heads share, or None to compare whole heads.

    With tokenizers, n is the first id that only one tokenizer has. Without tokenizers, heads of
    two sizes share the smaller head's tokens if the larger head could be a padded form of it and
    the configurations' special tokens have the same ids. A warning names n.

    Raises:
        ValueError: the tokenizers have different tokens for one id, or share few ids.
    """
    sizes = student.output_size, teacher.output_size
    if not (student.predicts_words and teacher.predicts_words) or None in sizes:
        return None
    smaller = min(x for x in sizes if x is not None)
    tokenizers = [x for x in (student.tokenizer, teacher.tokenizer) if x is not None]
    if tokenizers:
        n = min(smaller, _count_shared_ids(*map(_tokens_by_id, tokenizers)))
        why = "which the tokenizers share"
    elif sizes[0] != sizes[1] and _padded(teacher, student):
        n = smaller
        why = "since the special tokens agree (pass tokenizers=... to check all tokens)"
    else:
        return None
    if sizes == (n, n):
        return None
    warnings.warn(
        f"the student's head has {sizes[0]} tokens, the teacher's {sizes[1]}: the first {n} are "
        f"compared, {why}; all further tokens have probability 0",
        stacklevel=2,
    )
    return n


def _tokens_by_id(tokenizer: Any) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for token, i in sorted(tokenizer.get_vocab().items()):
        found.setdefault(i, []).append(token)
    return found


def _count_shared_ids(*vocabularies: dict[int, list[str]]) -> int:
    first, other = vocabularies[0], vocabularies[-1]
    n = min(first.keys() ^ other.keys(), default=max(first, default=-1) + 1)
    for i in sorted(first):
        if i < n and first[i] != other[i]:
            raise ValueError(
                f"tokenizers: id {i} is {first[i][0]!r} for the student, {other[i][0]!r} for the "
                "teacher; use models with one tokenizer, or pass "
                "tokenizers=VocabularyMatch.of(student's, teacher's)"
            )
    if 2 * n < max(map(len, vocabularies)):
        raise ValueError(
            f"tokenizers: they have {len(first)} and {len(other)} tokens but share only ids below "
            f"{n}; use models with one tokenizer, or pass "
            "tokenizers=VocabularyMatch.of(student's, teacher's)"
        )
    return n


def _padded(teacher: Model, student: Model) -> bool:
    """Whether the larger head can be a padded form of the smaller, by the special tokens' ids."""
    sizes = [x.output_size or 0 for x in (teacher, student)]
    configs: list[Any] = [getattr(model, "config", None) for model in (teacher, student)]
    if None in configs or max(sizes) - min(sizes) >= LARGEST_PADDING:
        return False
    texts = [x.get_text_config() if hasattr(x, "get_text_config") else x for x in configs]
    shared = range(min(sizes))
    pairs = [[_ids(getattr(x, name, None)).intersection(shared) for x in texts] for name in SPECIAL]
    both = [(a, b) for a, b in pairs if a and b]
    return bool(both) and all(a & b for a, b in both)


def _ids(given: Any) -> set[int]:
    """Ids of a special token, of which a configuration may hold none, one or several."""
    return set() if given is None else set(given if isinstance(given, list) else [given])


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
    #: Those of `logit_terms` that read hidden states and LM heads of language models. If all with
    #: a weight are named here, no logits are computed. A subclass that defines such a term, or
    #: `compute` or `forward`, reads logits there, unless it sets ``head_terms`` itself.
    head_terms: tuple[str, ...] = ("task", "soft")
    #: Whether a term reads the teacher's outputs; otherwise the teacher doesn't run.
    uses_teacher: bool = True
    #: Terms that compare samples with each other; a micro-batch alone changes their value.
    across_samples: tuple[str, ...] = ()
    #: Whether a term compares samples of the same class; each sample then needs a class label.
    by_class: bool = False
    #: Pooling of the teacher's hidden states: "tokens" for none, or one row per sample, "cls" or
    #: "mean" as in `Step.pooled`. A teacher cache stores only the pooled states.
    teacher_pool: str = "tokens"
    #: Whether terms read a teacher's predictions of its own tokens, not those at paired tokens.
    merges_spans: bool = False
    #: Whether to train on the loss after LRC-BERT's gradient perturbation.
    perturb: bool = False
    #: Norm of the perturbation's gradient: of each "sample", or over the "batch".
    perturb_norm: Literal["sample", "batch"] = "sample"
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
    #: What subclasses of the class that defines `compute` define; it computes no such term.
    _own_terms: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own, whole = vars(cls), "compute" in vars(cls)
        cls._own_terms = frozenset() if whole else cls._own_terms | {*own}
        if "head_terms" not in own:
            whole |= "forward" in own
            cls.head_terms = tuple(x for x in cls.head_terms if not whole and x not in own)

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
        sizes = (teacher.sizes, student.sizes)
        if self._built_for not in (None, sizes):
            raise ValueError(
                f"method: this {name} was built for models of other sizes; make a new {name}"
            )
        if type(self).compute is Method.compute:
            for term in {**self.weights(0.0), **self.weights(1.0)}:
                if not callable(getattr(self, term, None)):
                    raise TypeError(
                        f"{name}.weights: {term!r} is not a term; define the method {term}(step)"
                    )
        self.uses_lm_head = {*self._weighted_logit_terms()} <= {*self.head_terms}
        self.check(teacher, student)
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

    def check(self, teacher: Model, student: Backbone) -> None:
        """Raise unless the models' heads have what the method's terms compare."""
        name, on_output = type(self).__name__, self._weighted_logit_terms()
        if teacher.writes != student.writes:
            models = [("teacher", teacher), ("student", student)]
            (one, model), (other, plain) = models if teacher.writes else models[::-1]
            raise ValueError(
                f"the {one} ({model.class_name}) is an encoder-decoder, the {other} "
                f"({plain.class_name}) is not, and their hidden states belong to different tokens; "
                "use two models of one kind"
            )
        if on_output and (student.aligns or not student.has_head):
            lacks = "no head" if not student.has_head else (
                "a CTC-like head, whose loss aligns outputs with labels, which fastkd doesn't "
                "support"
            )  # fmt: skip
            raise ValueError(
                f"{name} has terms on the student's output ({', '.join(on_output)}), but the "
                f"student ({student.class_name}) has {lacks}; {self._without_head}"
            )
        if "soft" in on_output:
            _check_same_head(teacher, student, name)

    def _weighted_logit_terms(self) -> list[str]:
        both_ends = [self.weights(progress) for progress in (0.0, 1.0)]
        return [t for t in self.logit_terms if any(weights.get(t) for weights in both_ends)]

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

    def schedule_warning(self, steps: int) -> str:
        """Sentence on terms that a training of so many steps is too short to train; else empty."""
        last = (steps - 1) / steps
        during, end = self.weights(last), self.weights(1.0)
        missed = [name for name, weight in end.items() if weight and not during.get(name)]
        if not self.scheduled or not missed:
            return ""
        return (
            f"{type(self).__name__} trains {', '.join(missed)} only near the end of its schedule, "
            f"beyond the last of {steps} steps (at {last:.0%}); train longer, or shorten the first "
            "stage (first_stage)"
        )

    def compares_logits(self, *progress: float) -> bool:
        """Whether a term reads the teacher's logits at any of these values of progress."""
        terms = [term for term in self.logit_terms if term.rpartition(".")[2] != "task"]
        return any(self.weights(share).get(term) for share in progress for term in terms)

    @property
    def prediction_options(self) -> PredictionOptions:
        """Options of the terms ``task`` and ``soft``."""
        return PredictionOptions()

    @property
    def soft_temperatures(self) -> set[float]:
        """Temperatures of the terms that read the teacher's logits."""
        if not self.compares_logits(0.0, 1.0):
            return set()
        return {float(getattr(self, "temperature", self.prediction_options.temperature))}

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
        own = self._own_terms - {*self.head_terms}
        loss, terms = self.compute(step, {x: w for x, w in weights.items() if x not in own})
        for name, weight in weights.items():
            if name not in terms:
                term = getattr(self, name)(step)
                loss, terms[name] = loss + weight * term, term.detach()
        if shared:
            terms["task"] = terms["task"] * self.label_share
        return loss, {name: terms[name] for name in (*weights, *terms)}

    def compute(self, step: Step, weights: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """Weighted sum of terms that one computation returns, and each unweighted, detached.

        These are "task" and "soft" of language models, from one pass over hidden states and heads.
        A subclass adds its own to the result of ``super().compute``. `forward` adds the terms
        of ``weights`` that are left, and those that a subclass of this class defines, each by the
        method of its name.
        """
        predictions = {name: weights[name] for name in ("task", "soft") if name in weights}
        heads = step.student.head_inputs is not None and (
            "soft" not in predictions or step.teacher.at_head
        )
        if predictions and self.uses_lm_head and heads:
            return head_loss(step, predictions, self.prediction_options)
        return 0.0, {}

    def task(self, step: Step) -> Tensor:
        """Student's loss on the labels."""
        return task_loss(step, self.prediction_options)

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


@dataclass(kw_only=True, eq=False, repr=False)
class WithSoftTargets(Method):
    """Base class of methods with the terms task and soft; their options are fields."""

    head_terms = ("task", "soft")

    temperature: float = 2.0
    divergence: DivergenceWord = "forward_kl"
    scale_by_t2: bool = True

    def __post_init__(self) -> None:
        Method.__init__(self)
        check.number("temperature", self.temperature, above=0)
        check_fields(self)

    @property
    def prediction_options(self) -> PredictionOptions:
        return PredictionOptions(self.temperature, self.divergence, self.scale_by_t2)

    def soft(self, step: Step) -> Tensor:
        """Divergence between softened output distributions, or MSE for regression.

        Question answering: the mean over start and end, each a distribution over the real tokens.
        Rerankers: a distribution over each list. Multi-label heads: the mean over the labels, each
        a distribution over yes and no.
        """
        means, options = [], self.prediction_options
        for places in zip(*(soft_sums(part, options) for part in step.parts()), strict=True):
            sums, counts, tokens = zip(*places, strict=True)
            total, count = (functools.reduce(operator.add, x) for x in (sums, counts))
            means.append(step.mean(total, count, over_tokens=tokens[0]))
        return means[0] if len(means) == 1 else torch.stack(means).mean()


def check_fields(method: Any) -> None:
    """Raise unless floats are finite numbers of at least 0, and words those of their type."""
    for field in fields(method):
        value = getattr(method, field.name)
        if get_origin(field.type) is Literal:
            check.choice(field.name, value, get_args(field.type))
        elif field.type is float or (field.type == float | None and value is not None):
            check.number(field.name, value, at_least=0)


def _check_same_head(teacher: Model, student: Backbone, method: str) -> None:
    """Raise if the logits of teacher and student can't be compared."""
    if not teacher.has_head:
        raise ValueError(
            f"{method} compares logits, but the teacher has no head ({teacher.class_name}); "
            "load it with its head"
        )
    if teacher.vocabulary is None and student.predicts_words and teacher.predicts_words:
        teacher.vocabulary = shared_tokens(teacher, student)
    sizes = [student.output_size, teacher.output_size]
    if teacher.vocabulary is None and None not in sizes and sizes[0] != sizes[1]:
        remedy = "; if their first tokens are the same, pass tokenizers=(student's, teacher's)"
        lm_heads = student.predicts_words and teacher.predicts_words
        raise ValueError(
            f"{method} compares logits, but the student has {sizes[0]} labels or vocabulary "
            f"entries and the teacher {sizes[1]}{remedy if lm_heads else ''}"
        )
    unset = student.problem is None and student.uses_problem_type
    if unset and teacher.problem in (REGRESSION, MULTI_LABEL):
        student.problem = teacher.problem
    problems = {model.problem for model in (student, teacher)} - {None}
    if len(problems) > 1 and problems & {REGRESSION, MULTI_LABEL}:
        raise ValueError(
            f"{method} compares logits, but the student's problem_type is {student.problem} and "
            f"the teacher's {teacher.problem}; set one problem_type in both configurations"
        )
    ours, theirs = student.class_labels, teacher.class_labels
    if ours != theirs and sorted(ours) == sorted(theirs):
        raise ValueError(
            f"{method} compares logits, but the student's classes are {', '.join(ours)} and the "
            f"teacher's {', '.join(theirs)}; use one order for both heads"
        )
