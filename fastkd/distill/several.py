"""Several methods trained at once, with one shared teacher or one teacher each."""

from collections.abc import Sequence

from torch import Tensor, nn

from fastkd.distill.method import Method, Only, check_method
from fastkd.distill.step import Step
from fastkd.models.backbone import Backbone, Model
from fastkd.models.inputs import Batches
from fastkd.models.outputs import LayerRequest


class EnsembleModel(Model):
    """Properties of an ensemble of teachers, in the order of the methods."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = list(models)
        self.class_name = ", ".join(model.class_name for model in models)


class Several(Method):
    """Sum of several methods' losses from one run of the student.

    ``Distiller([first, second], student, Several(FCD(), LRKD()))`` pairs each method with its own
    teacher. With one teacher, all methods share it. Each method has its own weights, including
    the task weight. For a term that should count once, set its weight to 0 in all methods but
    one. Terms are numbered by method: ``"0.tokens"``, ``"1.projection"``.

    Args:
        methods: the methods, in the order of the teachers.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from fastkd.distill import FCD, LRKD, Distiller, student_from_teacher
    >>> sizes = dict(vocab_size=50, num_attention_heads=2, intermediate_size=32)
    >>> teachers = [BertModel(BertConfig(hidden_size=n, num_hidden_layers=4, **sizes))
    ...             for n in (16, 24)]
    >>> student = student_from_teacher(teachers[0], [2, 4])
    >>> method = Several(FCD(task_weight=0), LRKD(alpha=None))
    >>> out = Distiller(teachers, student, method)(input_ids=torch.arange(48).view(4, 12))
    >>> sorted(out.terms)
    ['0.samples', '0.tokens', '1.projection', 'total']
    """

    def __init__(self, *methods: Method) -> None:
        super().__init__()
        if not methods:
            raise TypeError("methods: none given; pass at least one fastkd.distill method")
        for method in methods:
            check_method("methods", method)
        self.methods = nn.ModuleList(methods)
        for name in ("perturb", "scheduled", "by_class", "uses_teacher"):
            setattr(self, name, any(getattr(method, name) for method in methods))
        norms = {method.perturb_norm for method in methods if method.perturb}
        if len(norms) > 1:
            raise ValueError("methods: their perturb_norm differ; use one norm")
        self.perturb_norm = norms.pop() if norms else "sample"
        pools = {method.teacher_pool for method in methods}
        self.teacher_pool = pools.pop() if len(pools) == 1 else "tokens"
        reading = [method for method in methods if method.compares_logits(0.0, 1.0)]
        self.merges_spans = any(method.merges_spans for method in reading)
        #: Methods that can't share a teacher with those that merge spans.
        self._paired = [m for m in reading if self.merges_spans and not m.merges_spans]
        self.logit_terms = self._named("logit_terms")
        self.across_samples = self._named("across_samples")

    @property
    def each(self) -> list[Method]:
        return list(self.methods)  # type: ignore[arg-type]

    def _named(self, kind: str) -> tuple[str, ...]:
        return tuple(f"{i}.{term}" for i, m in enumerate(self.each) for term in getattr(m, kind))

    def build(self, teacher: Model, student: Backbone) -> None:
        count = len(self.methods)
        teachers = teacher.models if isinstance(teacher, EnsembleModel) else [teacher] * count
        if len(teachers) != count:
            raise ValueError(
                f"teacher: got {len(teachers)} teachers for {count} methods; pass {count}, or one "
                "for all methods"
            )
        if self._paired and not isinstance(teacher, EnsembleModel):
            raise ValueError(
                f"method: {type(self._paired[0]).__name__} reads the teacher's predictions at "
                "paired tokens, another method those of the teacher's own tokens; pass a list with "
                "the teacher once for each method"
            )
        for method, model in zip(self.each, teachers, strict=True):
            method.build(model, student)
        self.uses_lm_head = all(method.uses_lm_head for method in self.each)

    def check(self, teacher: Model, student: Backbone) -> None:
        for method in self.each:
            method.check(teacher, student)

    def layer_request(self, side: str) -> LayerRequest:
        """Union of the methods' layer requests."""
        each = [method.layer_request(side) for method in self.each]
        return LayerRequest(
            *(tuple(sorted(set().union(*layers))) for layers in zip(*each, strict=True))
        )

    def prepare(self, teacher: nn.Module, batches: Batches) -> None:
        """Prepare every method from the same teacher and batches."""
        if self.prepared:
            return
        batches = list(batches)
        for method in self.each:
            method.prepare(teacher, batches)

    @property
    def prepared(self) -> bool:
        return all(method.prepared for method in self.each)

    def weights(self, progress: float) -> dict[str, float]:
        return {
            f"{i}.{name}": weight
            for i, method in enumerate(self.each)
            for name, weight in method.weights(progress).items()
        }

    @property
    def soft_temperatures(self) -> set[float]:
        return set().union(*(method.soft_temperatures for method in self.each))

    def forward(
        self, step: Step, progress: float, only: Only | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Sum of the methods' losses, and all terms."""
        total, terms = None, {}
        for i, method in enumerate(self.each):
            method.left_out, method.label_share = self.left_out, self.label_share
            loss, own = method(step.of_teacher(i), progress, only)
            terms.update({f"{i}.{name}": term for name, term in own.items()})
            if loss is not None:
                total = loss if total is None else total + loss
        return total, terms

    def extra_repr(self) -> str:
        return ""
