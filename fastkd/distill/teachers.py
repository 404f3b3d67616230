"""Teachers of a step, behind one interface: a model that runs, a cache, several teachers."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core import check
from fastkd.distill.by_row import ByRow, RowOutputs, RowPart
from fastkd.distill.cache import TeacherCache, teacher_request
from fastkd.distill.method import Method
from fastkd.distill.several import EnsembleModel, Several
from fastkd.lm.soft_targets import UNMATCHED, Unmatched
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.models.backbone import Backbone, Blocks, Model, backbone_of, placed_for
from fastkd.models.batch import Batch, batch_outputs, with_sentence
from fastkd.models.hooks import HeadInputs, on_device
from fastkd.models.inputs import Batches, in_eval_mode, without_adapters
from fastkd.models.outputs import EnsembleOutputs, HeadOutput, Outputs, pooled_rows

HALF = (torch.bfloat16, torch.float16)


class EMATeacher(nn.Module):
    """Exponential moving average of a student's parameters, as its teacher.

    θ_t ← decay·θ_t + (1 − decay)·θ_s after each optimizer step: call `update`. A
    `DistillationTrainer` calls it itself. With decay 1 the teacher stays the student of the start.
    The teacher may get inputs of its own, ``teacher_...`` in a batch, such as a prompt with a
    demonstration (SDFT) or with feedback (SDPO): see `fastkd.distill.Distiller.forward`.

    The average is part of the Distiller's ``state_dict()`` and of a Trainer's checkpoints, so that
    a resumed run goes on with it. Under DistributedDataParallel each process updates its own copy,
    by equal parameters. Under FSDP2 make the teacher first, then shard its ``model`` as the
    student: each process averages its shards, and a Trainer must not save checkpoints.

    Args:
        student: a transformers model, also with PEFT adapters. It is copied here.
        decay: 0 to 1. Parameters in half precision are averaged in float32.

    Raises:
        ValueError, TypeError: a decay out of range, or a student described by `Blocks`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from fastkd.distill import Distiller, SoftTargets
    >>> student = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2))
    >>> teacher = EMATeacher(student, decay=0.99)
    >>> distiller = Distiller(teacher, student, SoftTargets())
    >>> optimizer = torch.optim.SGD(distiller.parameters(), lr=0.1)
    >>> ids = torch.arange(20).view(2, 10)
    >>> distiller(input_ids=ids, labels=ids).loss.backward()
    >>> optimizer.step()
    >>> teacher.update()  # after each optimizer step
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        super().__init__()
        check.fraction("decay", decay)
        if isinstance(student, Blocks):
            raise TypeError("student: EMATeacher averages transformers models, got Blocks")
        self.decay = float(decay)
        student = getattr(student, "_orig_mod", student)
        self.__dict__["student"] = student  # no submodule, whose mode and state would be its own
        self.model = copy.deepcopy(student).requires_grad_(False).eval()
        self._wide: dict[str, Tensor] = {}  # averages of half-precision parameters, in float32

    def get_base_model(self) -> nn.Module:
        """See ``peft.PeftModel``: the model whose layers are read."""
        return without_adapters(self.model)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the student; call it after each optimizer step.

        Raises:
            ValueError: the student has other parameters than when it was copied.
        """
        student = self.__dict__["student"]
        for module in (*self.model.modules(), *student.modules()):
            if hasattr(module, "reshard"):  # FSDP2 may hold whole parameters after a forward pass
                module.reshard()
        ours, theirs = (dict(x.named_parameters()) for x in (self.model, student))
        if ours.keys() != theirs.keys():
            changed = sorted(ours.keys() ^ theirs.keys())[0]
            raise ValueError(
                f"student: its parameters have changed since EMATeacher copied it, {changed} for "
                "one; make the teacher after adapters are added"
            )
        for name, average in ours.items():
            current = _like(theirs[name], average)
            if average.dtype in HALF:
                wide = self._wide.setdefault(name, average.float()).to(average.device)
                self._wide[name] = wide.lerp_(current.float(), 1 - self.decay)
                average.copy_(wide)
            else:
                average.lerp_(current.to(average.dtype), 1 - self.decay)
        for average, current in zip(self.model.buffers(), student.buffers(), strict=True):
            average.copy_(current)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Averages of half-precision parameters in float32, for ``state_dict()``."""
        return self._wide

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self._wide = {name: x.clone() for name, x in state.items()}


def _like(current: Tensor, average: Tensor) -> Tensor:
    """The student's parameter on the average's device, whole if the average is."""
    whole: Any = current
    if hasattr(current, "full_tensor") and not hasattr(average, "full_tensor"):
        whole = whole.full_tensor()
    moved: Tensor = whole if hasattr(average, "full_tensor") else whole.to(average.device)
    return moved


def averaging_teachers(teacher: nn.Module) -> dict[str, EMATeacher]:
    """The averages in a Distiller's ``teacher`` by their names in it, "" for itself."""
    return {name: x for name, x in teacher.named_modules() if isinstance(x, EMATeacher)}


class AdaptersOff(nn.Module):
    """The base model of a PEFT ``student``, run in eval mode with the adapters disabled.

    It has no parameters of its own; it uses the student's.
    """

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.__dict__["student"] = student  # as a submodule it would get this one's mode

    def get_base_model(self) -> nn.Module:
        base: nn.Module = self.__dict__["student"].get_base_model()
        return base

    def forward(self, **inputs: Any) -> Any:
        student = self.__dict__["student"]
        flags = [(p, p.requires_grad) for p in student.parameters()]
        try:
            with in_eval_mode(student), student.disable_adapter():
                return student.get_base_model()(**inputs)
        finally:
            for parameter, flag in flags:  # PEFT sets requires_grad of every active adapter
                parameter.requires_grad_(flag)


def as_teacher(teacher: Any, student: Any) -> Any:
    """The teacher; `AdaptersOff` if it is the base model of the student's adapters.

    Raises:
        ValueError: the student trains parameters of that model.
    """
    if isinstance(teacher, ByRow):
        each = {
            n: as_teacher(x, student) for n, x in zip(teacher.names, teacher.models, strict=True)
        }
        return ByRow(each)
    own = hasattr(student, "disable_adapter") and hasattr(student, "get_base_model")
    if not own or student.get_base_model() is not teacher:
        return teacher
    # PEFT includes the adapter's name in the names of its parameters.
    trainable = [
        name
        for name, parameter in student.named_parameters()
        if parameter.requires_grad and student.peft_config.keys().isdisjoint(name.split("."))
    ]
    if trainable:
        raise ValueError(
            f"the student trains parameters of its base ({trainable[0]}, ...), and its base is the "
            "teacher, which would change with it; freeze them, name them in modules_to_save, or "
            "let a copy of the base teach"
        )
    return AdaptersOff(student)


class Teacher:
    """A teacher model that runs in each step."""

    def __init__(self, module: nn.Module) -> None:
        self.model = backbone_of(module, "teacher")
        #: The module that was passed as the teacher, uncompiled.
        self.module: Any = self.model.uncompiled
        #: The models that run: this one, or none for a cache.
        self.live = [self.model]
        #: The teachers that this one consists of.
        self.each: list[Teacher] = [self]

    def check(self, method: Method, student: Backbone, device: torch.device) -> None:
        """Raise unless a built method can compare every model of this teacher with the student, and
        read its outputs on ``device``."""

    def check_own_inputs(
        self, method: Method, per_token: bool, spans: bool, paired: bool = False
    ) -> None:
        """Raise unless the method can compare a teacher whose tokens are not the student's.

        ``paired``: the spans pair single tokens, whose predictions may be compared.
        """
        name, needed = type(method).__name__, teacher_request(method)
        if needed["inside"]:
            raise ValueError(
                f"{name} compares attention between tokens, but the teacher has inputs of its own; "
                "leave the teacher_ inputs out, or use another method"
            )
        if needed["logits"] and per_token and not paired:
            raise ValueError(
                f"{name} compares the predictions for each token, but the teacher has inputs of "
                "its own; pair equal tokens by student_spans and teacher_spans, or set the weight "
                "of soft targets to 0"
            )
        if needed["layers"] and needed["pool"] == "tokens" and not spans:
            raise ValueError(
                f"{name} compares tokens, but the teacher has inputs of its own; pass "
                "student_spans and teacher_spans (fastkd.distill.TwoTokenizers), or compare pooled "
                "states"
            )

    def run(self, batch: Batch, method: Method, progress: float, use_lm_head: bool) -> Outputs:
        """The teacher's outputs on a batch."""
        own, model = batch.teacher or batch, self.model
        if self.module.training:  # another module that holds the teacher may call train()
            self.module.eval()
        reads = method.compares_logits(progress)
        head: HeadOutput = "none"
        if reads:
            head = "inputs" if use_lm_head else "logits"
        with torch.no_grad(), on_device(self.module):
            inputs = placed_for(self.module, own.model_inputs)
            request = method.layer_request("teacher")
            outputs = batch_outputs(model, inputs, request, own, head).to(batch.device)
            if (found := outputs.head_inputs) is not None:
                # Offloading replaces the data of the model's own tensors.
                found = HeadInputs(found.states, found.head.map(Tensor.detach))
                outputs = dataclasses.replace(outputs, head_inputs=found)
            return outputs if batch.teacher is None else self.compared(outputs, batch, method)

    def compared(self, outputs: Outputs, batch: Batch, method: Method) -> Outputs:
        """Outputs on the teacher's own tokens, by spans or pooled; as they are without own ones."""
        own, model = batch.teacher, self.model
        if own is None:
            return outputs
        if batch.spans is not None:
            if not method.merges_spans:
                outputs = batch.spans.predictions(outputs)
            return batch.spans.pool(outputs, 1, model, own.feature_mask)
        return pooled(outputs, method.teacher_pool, model, own.feature_mask)


def pooled(outputs: Outputs, pool: str, model: Model, mask: Tensor | None) -> Outputs:
    """Outputs with one row (B, 1, D) per sample."""
    if not outputs.pooled:
        at = outputs.sentence
        outputs = outputs.features(lambda x, tokens: pooled_rows(pool, model, x, mask, at)[:, None])
    return dataclasses.replace(outputs, pooled=True)


class OutputSource(nn.Module):
    """Base class of what stands in for a teacher that doesn't run here, such as a live server.

    Attributes:
        model: properties of the teacher. Without a size of its own the student's is assumed.
    """

    model: Model

    def serve(self, method: Method, model: Model) -> None:
        """Raise unless every output that a built method reads is there.

        ``model`` has the properties of the teacher in a Distiller, such as its vocabulary.
        """
        raise NotImplementedError

    def outputs(self, batch: Batch, request: dict[str, Any], device: torch.device) -> Outputs:
        """The teacher's outputs on a batch; ``request`` is that of `teacher_request`."""
        raise NotImplementedError

    def configuration(self) -> dict[str, Any]:
        """Settings that change the outputs, by name; a cache of them stores these."""
        raise NotImplementedError


class SourceTeacher(Teacher):
    """A teacher whose outputs are read; no model runs."""

    def __init__(self, source: Any) -> None:
        self.module = source
        self.model: Any = copy.copy(source.model)  # each Distiller sets its own vocabulary
        self.live, self.each = [], [self]

    def check(self, method: Method, student: Backbone, device: torch.device) -> None:
        self.module.to(device).serve(method, self.model)

    def run(self, batch: Batch, method: Method, progress: float, use_lm_head: bool) -> Outputs:
        own = batch.teacher or batch
        outputs = self.module.outputs(own, teacher_request(method), batch.device)
        if not outputs.pooled:
            outputs = with_sentence(outputs, self.model, own.inputs, own.documents)
        return self.compared(outputs, batch, method)


class RowTeacher(Teacher):
    """A teacher for each row."""

    def __init__(self, module: ByRow) -> None:
        self.module = module
        self.each = [_teacher_of(x) for x in module.models]
        self.live = [model for teacher in self.each for model in teacher.live]
        self.model = self.each[0].model

    def check(self, method: Method, student: Backbone, device: torch.device) -> None:
        first, *others = (teacher.model for teacher in self.each)
        if method.merges_spans:
            raise ValueError(
                f"teacher: {type(method).__name__} merges the spans of one teacher; take "
                "SoftTargets, or one teacher"
            )
        if not method.prepared:
            raise ValueError(
                f"teacher: {type(method).__name__} chooses layers of one teacher; pass layers=[...]"
            )
        layers = any(method.layer_request("teacher"))
        for name, model in zip(self.module.names[1:], others, strict=True):
            if layers and (model.sizes, model.sentence_last) != (first.sizes, first.sentence_last):
                raise ValueError(
                    f"teacher: {type(method).__name__} compares layers, and {name!r} "
                    f"({model.class_name}) has other sizes than {self.module.names[0]!r} "
                    f"({first.class_name}); use teachers of one size, or SoftTargets"
                )
            method.check(model, student)
        for teacher in self.each:
            teacher.check(method, student, device)

    def check_own_inputs(self, method: Method, *flags: bool) -> None:
        for teacher in self.each:
            teacher.check_own_inputs(method, *flags)

    def run(self, batch: Batch, method: Method, progress: float, use_lm_head: bool) -> Outputs:
        assert batch.parts is not None
        parts = []
        for number, (rows, own) in batch.parts.items():
            teacher = self.each[number]
            outputs = teacher.run(own, method, progress, use_lm_head)
            if method.teacher_pool != "tokens" and not outputs.pooled and batch.spans is None:
                outputs = pooled(outputs, method.teacher_pool, teacher.model, own.feature_mask)
            parts.append(RowPart(rows, own, teacher.model, outputs))
        return RowOutputs.of(parts)


class Teachers:
    """One teacher, or several with a method each."""

    def __init__(self, module: Any, method: Method) -> None:
        self.several = isinstance(module, nn.ModuleList)
        if self.several and not isinstance(method, Several):
            raise TypeError(
                "method: several teachers need one method each; pass Several(first, second)"
            )
        teachers = [_teacher_of(x) for x in (module if self.several else [module])]
        self.each = [each for teacher in teachers for each in teacher.each]
        self.live = [model for teacher in self.each for model in teacher.live]
        by_row = [teacher for teacher in teachers if isinstance(teacher, RowTeacher)]
        if len(by_row) > 1:
            raise ValueError("teacher: two of them are ByRow, and teacher_id names one; pass one")
        #: The teacher for each row, if there is one.
        self.by_row = by_row[0] if by_row else None
        models = [teacher.model for teacher in teachers]
        methods: Any = method.each if self.several else [method]  # type: ignore[attr-defined]
        #: Each teacher with its method; `Several.build` checks their number.
        self.pairs: list[tuple[Teacher, Method]] = list(zip(teachers, methods, strict=False))
        #: The model that methods read sizes and heads from.
        self.model: Model = EnsembleModel(models) if self.several else models[0]

    def take_tokenizers(self, student: Backbone, tokenizers: Any, unmatched: Unmatched) -> None:
        """Assign tokenizers: one for all models, the student's and each teacher's, or a match."""
        check.choice("unmatched", unmatched, UNMATCHED)
        if unmatched != "renormalise" and not isinstance(tokenizers, VocabularyMatch):
            raise ValueError(
                f"unmatched={unmatched!r} needs a VocabularyMatch as tokenizers; pass one, or "
                "leave it out"
            )
        for teacher in self.each:
            if isinstance(teacher.module, OutputSource) and teacher.model.output_size is None:
                teacher.model.output_size = student.output_size
                teacher.module.model.output_size = student.output_size
        models: list[Model] = [student, *(teacher.model for teacher in self.each)]
        if isinstance(tokenizers, VocabularyMatch):
            for model in models[1:]:
                model.unmatched = unmatched
                model.vocabulary = dataclasses.replace(
                    tokenizers,
                    student_size=student.output_size or tokenizers.student_size,
                    teacher_size=model.output_size or tokenizers.teacher_size,
                )
            return
        if not isinstance(tokenizers, (list, tuple)):
            tokenizers = [tokenizers] * len(models)
        if len(tokenizers) != len(models):
            raise ValueError(
                f"tokenizers must be one, or the student's and each teacher's ({len(models)}), got "
                f"{len(tokenizers)}"
            )
        for model, tokenizer in zip(models, tokenizers, strict=True):
            if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
                raise TypeError(
                    f"tokenizers must be transformers tokenizers, got {type(tokenizer).__name__}"
                )
            model.tokenizer = tokenizer

    def outputs(self, batch: Batch, progress: float, use_lm_head: bool) -> Outputs:
        """Outputs of all teachers on a batch; empty if the method doesn't use a teacher."""
        outputs = tuple(
            teacher.run(batch, method, progress, use_lm_head)
            if method.uses_teacher
            else Outputs({}, None)
            for teacher, method in self.pairs
        )
        return EnsembleOutputs({}, None, parts=outputs) if self.several else outputs[0]

    def batches_of(self, source: OutputSource, batch: Batch) -> list[Batch]:
        """What a source reads of a batch: its rows, or all."""
        if batch.parts is None:
            return [batch]
        assert self.by_row is not None
        parts = ((self.by_row.each[number], own) for number, (_, own) in batch.parts.items())
        return [own for teacher, own in parts if teacher.module is source]

    def prepare(self, method: Method, batches: Batches) -> None:
        """Make the methods' choices from data; a cache already contains them."""
        if self.several and method.prepared:
            return
        batches = list(batches) if self.several else batches
        for teacher, each in self.pairs:
            if teacher.live and not each.prepared:
                each.prepare(teacher.module, batches)

    def to_cache(self) -> tuple[Any, Any]:
        """The model whose outputs a cache stores, and the source of its outputs if it doesn't run
        here; raise if there is not exactly one."""
        if self.several or self.by_row:
            raise ValueError(
                "teacher: several teachers are cached one by one; call Distiller(teacher, student, "
                "method).cache_teacher(...) for each, then pass the caches in their place"
            )
        if isinstance(self.each[0].module, OutputSource):
            return self.each[0].model, self.each[0].module
        if not self.live:
            raise ValueError("teacher: it is a cache already; pass a model to write another")
        if isinstance(self.each[0].module, EMATeacher):
            raise ValueError(
                "teacher: an EMATeacher changes in each step; cache a teacher that stays as it is"
            )
        if isinstance(self.each[0].module, AdaptersOff):
            raise ValueError(
                "teacher: the teacher is the student's base; write its cache with another student, "
                "before adapters are added"
            )
        return self.live[0], None


def _teacher_of(module: Any) -> Teacher:
    if isinstance(module, ByRow):
        return RowTeacher(module)
    reads = isinstance(module, (TeacherCache, OutputSource))
    return SourceTeacher(module) if reads else Teacher(module)
