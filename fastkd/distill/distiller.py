"""Teacher, student and method as one module that any training loop can drive."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastkd._checks import check_number
from fastkd._numerics import upcast, zero_padding
from fastkd.analysis.layers import Batches, frames_mask
from fastkd.distill.accumulation import Whole, accumulate
from fastkd.distill.adapters import as_teacher
from fastkd.distill.blocks import Blocks, backbone_of
from fastkd.distill.cache import TeacherCache, sample_keys, wanted_of, write_cache
from fastkd.distill.capture import QKV, Backbone, Wanted, placed_for, replaced_embeddings
from fastkd.distill.documents import Documents, check_apart, decoder_tokens, find_documents
from fastkd.distill.method import Method, Term, check_method, weighted
from fastkd.distill.several import Several, Teachers
from fastkd.distill.spans import Spans
from fastkd.distill.step import Items, Outputs, SeveralOutputs, Step, countable, pooled_rows
from fastkd.distributed import InGroup, Ranks, ranks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Teacher = PreTrainedModel | Blocks | TeacherCache


SPAN_LABELS = ("start_positions", "end_positions")


@dataclass
class DistillerOutput:
    """Result of a `Distiller`.

    ``loss`` to call backward on; its ``terms`` by name, detached and before weighting, with their
    weighted sum as "total"; the student's ``logits``, detached, None without a head, those of start
    and end for question answering.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    logits: Tensor | tuple[Tensor, Tensor] | None


# DistributedDataParallel(static_graph=True) and FSDP2 find the loss as a leaf of the output.
torch.utils._pytree.register_dataclass(DistillerOutput)


class Distiller(InGroup):
    """A student that learns from a teacher by a method.

    Calling it with a batch runs both models and returns the weighted sum of the method's loss
    terms. The teacher is frozen, stays in eval mode and runs without gradient; only the layers
    that the method compares are kept. What the method trains besides the student is among
    ``parameters()`` from the start. ``state_dict()`` holds the student and the method, not the
    teacher; ``student.save_pretrained`` holds nothing but the student. DistributedDataParallel
    needs ``find_unused_parameters=True`` where a head or pooler goes unused.

    Args:
        teacher: a transformers encoder, decoder or encoder-decoder, fine-tuned; it is frozen in
            place. Or what one said before: a `TeacherCache`. Models that aren't from transformers
            are described by `Blocks`. A list of teachers goes with as many methods, in `Several`.
            The base of a PEFT student, ``Distiller(base, get_peft_model(base, ...), method)``,
            teaches it with the adapters disabled and is held once.
        student: another one, which takes the same inputs, or inputs of its own: see `forward`.
        method: see `fastkd.distill.methods`.
        gather: compare the samples of all processes, as one process with the whole batch would:
            value and gradient are that process's, where the loop averages gradients over the
            processes, however unequal their batches. `fastkd.distributed` says what is sent.
            Without it every process compares its own samples, and the loop averages.
        group: the processes that gather, by default all.

    Raises:
        ValueError: teacher and student share weights, or don't fit the method.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from fastkd.distill import FCD, student_from_teacher
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4,
        ...                     num_attention_heads=2, intermediate_size=32)
        >>> teacher = BertForSequenceClassification(config)
        >>> distiller = Distiller(teacher, student_from_teacher(teacher, [2, 4]), FCD())
        >>> ids = torch.arange(48).view(4, 12)
        >>> out = distiller(input_ids=ids, labels=torch.tensor([0, 1, 0, 1]))
        >>> out.loss.backward()
        >>> sorted(out.terms)
        ['samples', 'task', 'tokens', 'total']
    """

    # transformers.Trainer: the loss is a mean over the batch, to be divided by the number of
    # accumulation steps.
    accepts_loss_kwargs = False

    def __init__(
        self,
        teacher: "Teacher | Sequence[Teacher]",
        student: "PreTrainedModel | Blocks",
        method: Method,
        *,
        gather: bool = False,
        group: "torch.distributed.ProcessGroup | None" = None,
    ) -> None:
        super().__init__()
        check_method("method", method)
        self._student_backbone = backbone_of(student, "student")
        taught: Any = as_teacher(teacher, student)
        if isinstance(teacher, (list, tuple)):
            taught = nn.ModuleList(as_teacher(each, student) for each in teacher)
            if not isinstance(method, Several):
                raise TypeError("several teachers want a method each: Several(first, second)")
        self._teacher_backbone = _teacher_backbone(taught)
        shared = {id(p) for p in taught.parameters()} & {id(p) for p in student.parameters()}
        if shared:
            raise ValueError(
                "teacher and student share parameters, and freezing one freezes the other; "
                "copy the model, use student_from_teacher, or teach a PEFT student by its base"
            )
        self.teacher, self.student, self.method = taught, student, method
        self.gather, self.group = gather, group
        self._progress: float | None = None
        method.build(self._teacher_backbone, self._student_backbone)
        for each, _, served in self._sides():
            if isinstance(each, TeacherCache):
                each.to(next(student.parameters()).device).serve(served)
        taught.requires_grad_(False).eval()
        # A half-precision student gets half-precision projections (an orthogonal one stays exact).
        method.to(device=next(student.parameters()).device, dtype=self._student_backbone.dtype)
        self.train()  # from_pretrained gives models in eval mode
        self.register_state_dict_post_hook(_leave_teacher_out)
        self.register_load_state_dict_post_hook(_expect_no_teacher)

    @property
    def config(self) -> Any:
        """The student's configuration."""
        return self._student_backbone.config

    @property
    def counts_positions(self) -> bool:
        """Whether the head predicts something for each token; see ``num_items`` in `forward`."""
        return self._student_backbone.per_token

    @property
    def progress(self) -> float:
        """How much of the training is done, 0 to 1; see `set_progress`."""
        return self._progress or 0.0

    def set_progress(self, progress: float) -> None:
        """Say how much of the training is done, 0 to 1: schedules such as LRCBERT's follow it."""
        check_number("progress", progress, at_least=0)
        if progress > 1:
            raise ValueError(f"progress must be at most 1, got {progress}")
        self._progress = float(progress)

    def prepare(self, batches: Batches) -> None:
        """Let the method choose from data what it must (MC3KD: its teacher layers).

        Args:
            batches: dicts of model inputs; read once, only if the method needs them.
        """
        if not isinstance(self.teacher, TeacherCache):  # chosen before it was written
            self.method.prepare(self.teacher, map(self._read_by_teacher, batches))

    def cache_teacher(
        self,
        batches: Batches,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        shard_bytes: int = 2**28,
    ) -> TeacherCache:
        """Write what the method needs of the teacher for each sample into a folder.

        Samples that are there already are passed over, so an interrupted call can be repeated and
        several processes may write their parts of the data at once.

        Args:
            batches: dicts of arguments as in `forward`, ``input_ids`` among them.
            path: the folder; a new one, or one that the same teacher began.
            tokenizer: a transformers tokenizer, whose vocabulary is then remembered.
            shard_bytes: about how many bytes to hold before a file is written.

        Returns:
            The cache, to be used in the teacher's place: see `TeacherCache`.

        Raises:
            ValueError: the folder was written by another teacher, tokenizer or method; the
                message says what differs.
        """
        return write_cache(self, batches, path, tokenizer, shard_bytes)

    def sample_keys(self, batch: dict[str, Any]) -> list[bytes]:
        """What a `TeacherCache` knows the samples of a batch by: ``key in cache``."""
        return sample_keys(self._part_of(batch))[0]

    @property  # type: ignore[override]
    def training(self) -> bool:
        """The student's mode."""
        student = self._modules.get("student")
        return student is None or student.training

    @training.setter
    def training(self, mode: bool) -> None:
        """nn.Module's bookkeeping; `train` reaches the student."""

    def train(self, mode: bool = True) -> "Distiller":
        """Set the student's mode, True in a new distiller; the teacher stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def get_input_embeddings(self) -> nn.Module:
        """The student's, where transformers.Trainer's NEFTune adds its noise."""
        return self.student.get_input_embeddings()  # type: ignore[operator]

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """The student's; the teacher keeps nothing for a backward pass anyway."""
        self.student.gradient_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """The student's, by its newer name."""
        self.student.activation_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]

    def forward(
        self,
        *,
        labels: Tensor | None = None,
        num_items: float | Tensor | None = None,
        segments: Tensor | None = None,
        _share: tuple[Whole, int] | None = None,
        **batch: Any,
    ) -> DistillerOutput:
        """Loss of one batch.

        Rows may be packed with several documents. Each is then a sample of its own, as if it
        stood in a row of its own, and nothing is compared across documents. A model that reads
        such a row as one document raises, which is tried out with the first packed batch (not on
        sharded models); transformers' decoders that keep them apart do so without a mask, and get
        none.

        Of encoder-decoders the decoder's hidden states and predictions are compared, at the
        positions whose labels count and that ``decoder_attention_mask`` doesn't leave out. The
        decoder reads ``decoder_input_ids``, by default the words before the labels.

        Args:
            labels: as the student's head takes them: (B,) classes or numbers, (B, V) yes or no,
                (B, N) with −100 for positions that don't count. A row without a label has the
                class or answer −100, or the number NaN; either leaves out one of several labels.
                Question answering takes ``start_positions`` and ``end_positions`` instead.
            num_items: for heads with one prediction per token and gradient accumulation: how
                many labelled positions (`count_items`) a batch of an accumulation step holds on
                average. The sum is divided by it instead of this batch's own count, so the
                gradient doesn't depend on how the samples were split.
            segments: (B, N) numbers of the documents in packed rows. By default they come from
                ``seq_idx``, ``cu_seq_lens_q`` or ``position_ids`` that start again, as
                transformers' DataCollatorWithFlattening gives them.
            batch: the models' other inputs, ``attention_mask`` (B, N) among them, or (B, C, N)
                for the C choices of a question, each a sample. A teacher of another kind takes
                those that begin with ``teacher_``, and no others: ``teacher_input_ids``,
                ``teacher_pixel_values``. Rows of both sides are then compared by the token that
                each head reads or their mean, as the method does it. Methods that compare tokens
                want ``student_spans`` (B, N) and ``teacher_spans`` (B, M), the number of the
                piece of text that each token belongs to, −1 for none, from `TwoTokenizers` or
                `align_spans`: spans stand in the tokens' place.
        """
        if getattr(self, "_is_replica", False):
            raise ValueError(
                "DataParallel runs copies of the models, into which a Distiller doesn't see; start "
                "a process for each GPU (torchrun, DistributedDataParallel)"
            )
        if _share is not None:
            whole, index = _share
            loss, terms, step = whole.share(index)
            return DistillerOutput(loss, terms, _detached(step.student.logits))
        part = self._part(batch, labels, num_items, segments)
        self._check_schedule()
        teacher = self._run_teacher(part)
        items = Items(self._ranks())

        def run_student() -> tuple[Tensor, dict[str, Tensor], Any]:
            step = self._step(part, self._run_student(part), teacher, items)
            return (*self._add_up(step), _detached(step.student.logits))

        if not self._perturbs:
            return DistillerOutput(*run_student())
        with self._leaf_embeddings() as embeddings:
            total = run_student()[0]
        shift = self._unit_gradient(total, embeddings, part)
        with self._moved_embeddings(shift):
            return DistillerOutput(*run_student())

    def count_items(self, batch: dict[str, Any]) -> Tensor:
        """How many labelled positions of a batch count, of which ``num_items`` are the average.

        Those that `forward` compares: a next word's, not of padding or another document.

        Args:
            batch: arguments as in `forward`, ``labels`` (B, N) among them.
        """
        rest = {name: x for name, x in batch.items() if name not in ("labels", "segments")}
        labels, own = batch["labels"], split_inputs(rest)[0]
        own = self._student_backbone.with_decoder_inputs(own, labels)
        part = self._read(own, labels, None, batch.get("segments"))
        valid = torch.ones_like(labels, dtype=torch.bool) if part.mask is None else part.mask
        counted, _ = countable(labels, valid, part.owner, self._student_backbone.causal)
        return counted.sum()

    def accumulate(
        self, batches: Iterable[dict[str, Any]], model: nn.Module | None = None
    ) -> Iterator[DistillerOutput]:
        """Losses of micro-batches whose gradients add up to those of one large batch, exactly.

        Losses that compare samples see all samples of ``batches`` (Gao et al. 2021, GradCache):
        the models run over each micro-batch without gradient, the loss of the whole batch is
        taken from what the method compares, and the student runs again over each micro-batch
        with that loss's gradient. Memory holds the activations of one micro-batch, and of the
        whole batch only what the method compares. The student runs twice, with the same dropout.

        Call backward on each loss as it comes, undivided, then step the optimizer. Losses and
        terms are shares: they add up to those of the whole batch.

        Args:
            batches: dicts of arguments as in `forward`; they may differ in length.
            model: what wraps this distiller, such as DistributedDataParallel, which then
                synchronises gradients once, in the last micro-batch.

        Example:
            >>> for out in distiller.accumulate(batches):  # doctest: +SKIP
            ...     out.loss.backward()
            >>> optimizer.step()  # doctest: +SKIP
        """
        yield from accumulate(self, batches, self if model is None else model)

    @property
    def _perturbs(self) -> bool:
        return self.method.perturb and self.training and torch.is_grad_enabled()

    def _ranks(self) -> Ranks | None:
        """The processes whose samples count as one batch; None for this one alone."""
        return ranks_of(self.gather, self.group)

    def _check_schedule(self) -> None:
        if self.training and self.method.scheduled and self._progress is None:
            self._progress = 0.0
            warnings.warn(
                f"{type(self.method).__name__} follows a schedule: call "
                "distiller.set_progress(step / total_steps) in the loop",
                stacklevel=3,
            )

    def _part(
        self,
        batch: dict[str, Any],
        labels: Tensor | None,
        num_items: float | Tensor | None,
        segments: Tensor | None,
    ) -> "Part":
        batch, own, spans = split_inputs(batch)
        batch = self._student_backbone.with_decoder_inputs(batch, labels)
        part = self._read(batch, labels, num_items, segments)
        if own and self.method.uses_teacher:
            part.teacher = self._read(own, None, None, None)
            self._check_own_inputs(part, spans is not None)
            if spans is not None:
                sides = zip((part, part.teacher), spans, strict=True)
                part.spans = Spans.of(*(side.unpacked_spans(x) for side, x in sides))
        self._check_apart(part)
        return part

    def _read_by_teacher(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch's inputs for the teacher, which may be its own."""
        student, own, _ = split_inputs(batch)
        if own:
            return own
        read = self._student_backbone.with_decoder_inputs(student, student.get("labels"))
        mask, _ = decoder_tokens(read, student.get("labels")) or (None, None)
        targets = {"labels", "segments", "num_items", *SPAN_LABELS}
        read = {name: x for name, x in read.items() if name not in targets}
        return read if mask is None else {**read, "decoder_attention_mask": mask.long()}

    def _part_of(self, batch: Mapping[str, Any]) -> "Part":
        """Of arguments as in `forward`, without ``num_items``."""
        options = {"labels": None, "segments": None, **batch}
        options.pop("num_items", None)
        return self._part(options, options.pop("labels"), None, options.pop("segments"))

    def _read(
        self,
        batch: dict[str, Any],
        labels: Tensor | None,
        num_items: float | Tensor | None,
        segments: Tensor | None,
    ) -> "Part":
        decoded = decoder_tokens(batch, labels)
        if decoded is None:
            mask = frames_mask(self._student_backbone.inner, batch, _token_mask(batch))
            shape = _batch_shape(batch, mask)
            documents = find_documents(shape, mask, batch, segments)
        elif segments is not None:
            raise ValueError("segments number documents in packed rows; a decoder's row is one")
        else:
            mask, shape = decoded
            documents = find_documents(shape, mask, {}, None)
        if documents is not None and documents.packed and not self._has_blocks:
            # With a mask transformers takes each row for one document. Nothing real sees padding:
            # no position goes on from the greatest.
            batch = {name: x for name, x in batch.items() if name != "attention_mask"}
            positions = batch.get("position_ids")
            if mask is not None and isinstance(positions, Tensor) and positions.shape == mask.shape:
                batch["position_ids"] = positions.masked_fill(~mask, positions.max())
        targets: Tensor | tuple[Tensor, Tensor] | None = labels
        if labels is None and all(batch.get(name) is not None for name in SPAN_LABELS):
            targets = batch["start_positions"], batch["end_positions"]
        return Part(batch, targets, num_items, shape, mask, documents)

    @property
    def _has_blocks(self) -> bool:
        models = self.student, *(teacher for teacher, _, _ in self._sides())
        return any(isinstance(model, Blocks) for model in models)

    def _check_apart(self, part: "Part") -> None:
        """Raise where a model would read the documents of packed rows as one."""
        read: list[tuple[str, nn.Module, Any, Part]]
        read = [("student", self.student, self._student_backbone, part)]
        for teacher, backbone, method in self._sides():
            if method.uses_teacher and not isinstance(teacher, TeacherCache):
                read.append(("teacher", teacher, backbone, part.teacher or part))
        for name, model, backbone, side in read:
            if side.documents is not None and side.documents.packed:
                inputs = placed_for(model, side.teacher_inputs)
                check_apart(backbone, name, inputs, side.documents)

    def _sides(self) -> list[tuple[nn.Module, Any, Method]]:
        """Each teacher, how it is read, and the method that compares it."""
        if isinstance(self.teacher, nn.ModuleList):
            methods: Any = self.method.methods
            return list(zip(self.teacher, self._teacher_backbone.models, methods, strict=True))
        return [(self.teacher, self._teacher_backbone, self.method)]

    def _check_own_inputs(self, part: "Part", spans: bool) -> None:
        """Raise unless the methods can compare a teacher that reads other tokens."""
        for teacher, _, method in self._sides():
            name, wanted = type(method).__name__, wanted_of(method)
            if isinstance(teacher, TeacherCache):
                raise ValueError(
                    "a cached teacher is known by the student's tokens; leave the teacher_ inputs "
                    "out"
                )
            if wanted["inside"]:
                raise ValueError(f"{name} compares attention, which other tokens don't share")
            spanned = self._student_backbone.per_token or isinstance(part.labels, tuple)
            if wanted["logits"] and spanned:
                raise ValueError(
                    f"{name} compares the predictions for each token, and the teacher's inputs are "
                    "others; set the weight of soft targets to 0"
                )
            if wanted["layers"] and wanted["pool"] == "tokens" and not spans:
                raise ValueError(
                    f"{name} compares tokens, and the teacher's are others; pass student_spans and "
                    "teacher_spans (fastkd.distill.TwoTokenizers), or choose a pooled comparison"
                )

    def _run_teacher(self, part: "Part") -> Outputs:
        parts = [self._run_one(part, *side) for side in self._sides()]
        several = isinstance(self.teacher, nn.ModuleList)
        return SeveralOutputs({}, None, parts=tuple(parts)) if several else parts[0]

    def _run_one(self, part: "Part", teacher: nn.Module, backbone: Any, method: Method) -> Outputs:
        if not method.uses_teacher:
            return Outputs({}, None)
        if isinstance(teacher, TeacherCache):
            return teacher.outputs(part, wanted_of(method), part.device)
        own = part.teacher or part
        _check_read("teacher", teacher, backbone)
        if teacher.training:  # put there since, by a module that holds it too
            teacher.eval()
        with torch.no_grad(), contextlib.ExitStack() as stack:
            inputs = placed_for(teacher, own.teacher_inputs)
            read = method.compares_logits(self.progress)
            if not read:
                stack.enter_context(without_vocabulary(backbone))
            outputs = _run(backbone, inputs, method.wanted("teacher"), own, part.device)
            if not read:
                outputs = outputs.without_logits()
            if part.spans is not None:
                return part.spans.pool(outputs, 1, backbone, own.feature_mask)
            if own is part:
                return outputs
            rows = outputs.features(
                lambda x, tokens: pooled_rows(method.teacher_pool, backbone, x, own.feature_mask)[
                    :, None
                ]
            )
            return dataclasses.replace(rows, pooled=True)

    def _run_student(self, part: "Part") -> Outputs:
        backbone = self._student_backbone
        _check_read("student", self.student, backbone)
        outputs = _run(backbone, part.batch, self.method.wanted("student"), part)
        if part.spans is None:
            return outputs
        return part.spans.pool(outputs, 0, backbone, part.feature_mask)

    def _step(self, part: "Part", student: Outputs, teacher: Outputs, items: Items) -> Step:
        return Step(
            student,
            teacher,
            self._student_backbone,
            self._teacher_backbone,
            part.feature_mask if part.spans is None else part.spans.mask,
            part.labels,
            part.num_items,
            token_mask=part.mask,
            owner=part.owner,
            ranks=items.ranks,
            items=items,
        ).among_ranks()

    def _terms(self, step: Step, on_logits: bool | None = None) -> list[Term]:
        with torch.autocast(next(self.student.parameters()).device.type, enabled=False):
            return self.method(step, self.progress, on_logits)

    def _add_up(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        terms = self._terms(step)
        if not terms:
            raise ValueError(f"all weights of {type(self.method).__name__} are zero")
        total = weighted(terms)
        values = torch.stack([*(term.value.detach() for term in terms), total.detach()])
        if step.ranks is not None:
            # Each process has its share of the gradient, and all of the value.
            values = step.ranks.sum(values) / step.ranks.size
            total = values[-1] + (total - total.detach())
        return total, dict(zip([*(term.name for term in terms), "total"], values, strict=True))

    def _leaf_embeddings(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        if self._student_backbone.compiled:
            raise ValueError(
                f"{type(self.method).__name__} moves the embeddings inside the student, which "
                "compiled code doesn't allow; pass the student uncompiled, or set perturb=False"
            )
        return replaced_embeddings(
            self._student_backbone, lambda emb: emb.detach().requires_grad_()
        )

    def _moved_embeddings(
        self, shift: Tensor | None
    ) -> contextlib.AbstractContextManager[list[Tensor]]:
        if shift is None:
            return contextlib.nullcontext([])
        return replaced_embeddings(self._student_backbone, lambda emb: emb + shift)

    def _unit_gradient(self, total: Tensor, embeddings: list[Tensor], part: "Part") -> Tensor:
        """g / ‖g‖ per sample, g the gradient of the loss at the embeddings (LRC-BERT, eqs. 7-8).

        Padding stays where it is: DeBERTa's convolution reads the token behind the last one.
        """
        if not embeddings:
            raise ValueError(
                f"{type(self.method).__name__} moves the embedding layer's output, which the "
                "student didn't compute; pass input_ids, or set perturb=False"
            )
        # float16 gradients vanish without a scale; the norm takes it out again.
        scale = 2.0**12 if torch.float16 in (_autocast_dtype(total), embeddings[0].dtype) else 1.0
        (g,) = torch.autograd.grad(total * scale, embeddings[0])
        samples, documents = self._student_backbone.batch_dim, part.documents
        others = [d for d in range(g.dim()) if d != samples]
        mask = part.mask.T if part.mask is not None and samples else part.mask
        if mask is not None and mask.shape == g.shape[:2]:
            g = zero_padding(g, mask)
        if documents is not None and documents.packed:
            norm = documents.norms(upcast(g).transpose(0, samples)).transpose(0, samples)
        else:
            norm = torch.linalg.vector_norm(upcast(g), dim=others, keepdim=True)
        usable = norm.isfinite() & (norm > 0)
        return torch.where(usable, g / norm, 0).to(g.dtype)


@dataclass
class Part:
    """A batch's inputs, and what was read from them."""

    batch: dict[str, Any]
    labels: Tensor | tuple[Tensor, Tensor] | None
    num_items: float | Tensor | None
    shape: tuple[int, int] | None  # (B, N) of the tokens
    mask: Tensor | None
    documents: Documents | None
    teacher: "Part | None" = None  # the teacher's inputs where they are its own
    spans: Spans | None = None

    @property
    def device(self) -> torch.device:
        """Where the batch is; parameters that are sharded and offloaded are elsewhere."""
        return next(x.device for x in self.batch.values() if isinstance(x, Tensor))

    @property
    def feature_mask(self) -> Tensor | None:
        """Which tokens of features are real, each document in a row of its own."""
        return self.mask if self.documents is None else self.documents.mask

    @property
    def owner(self) -> Tensor | None:
        """The document of each token, where rows are packed with several."""
        documents = self.documents
        return documents.owner if documents is not None and documents.packed else None

    def unpacked_spans(self, spans: Tensor) -> Tensor:
        """Spans of the tokens of features."""
        if spans.shape != self.shape:
            raise ValueError(
                f"spans have shape {tuple(spans.shape)}, but their tokens {self.shape}"
            )
        if self.documents is None:
            return spans
        if self.documents.packed:
            raise ValueError("packed rows have no spans; give each document a row of its own")
        return self.documents.unpack(spans).masked_fill(~self.documents.mask, -1)

    @property
    def empty(self) -> bool:
        """Whether there are no rows, as in the last batch of a process that has run out."""
        return any(isinstance(x, Tensor) and x.dim() and not len(x) for x in self.batch.values())

    @property
    def token_mask(self) -> Tensor:
        """`mask`, also where there is none."""
        if self.mask is not None:
            return self.mask
        assert self.shape is not None
        return torch.ones(self.shape, dtype=torch.bool)

    @property
    def teacher_inputs(self) -> dict[str, Any]:
        """Inputs without targets."""
        return {name: value for name, value in self.batch.items() if name not in SPAN_LABELS}


def _teacher_backbone(teacher: nn.Module) -> Any:
    if isinstance(teacher, nn.ModuleList):
        return Teachers([_teacher_backbone(each) for each in teacher])
    return teacher.model if isinstance(teacher, TeacherCache) else backbone_of(teacher, "teacher")


def _check_read(name: str, model: nn.Module, backbone: Backbone) -> None:
    """Raise if another model has been put in the place of the one that is read, or around it."""
    read = backbone.model
    if read is not model and all(part is not read for part in model.modules()):
        raise ValueError(
            f"the {name} was replaced after the Distiller was made, which runs the one before; "
            "make a new Distiller"
        )


def _detached(logits: Any) -> Any:
    """Attached, logits that no term uses would make DistributedDataParallel wait for them."""
    return tree_map_only(Tensor, Tensor.detach, logits)


def _run(
    backbone: Backbone,
    inputs: dict[str, Any],
    wanted: Wanted,
    part: Part,
    device: torch.device | None = None,
) -> Outputs:
    """What the model says about a part, on ``device``."""
    if part.empty:
        return Outputs.of(*backbone.observe(_one_row(inputs), wanted)).rows(0).to(device)
    outputs = Outputs.of(*backbone.observe(inputs, wanted)).to(device)
    documents = part.documents
    if documents is None:
        return outputs
    return dataclasses.replace(
        outputs,
        hidden={layer: documents.unpack(x) for layer, x in outputs.hidden.items()},
        attentions={layer: documents.unpack_maps(x) for layer, x in outputs.attentions.items()},
        qkv={layer: QKV(*map(documents.unpack_heads, x)) for layer, x in outputs.qkv.items()},
    )


@contextlib.contextmanager
def without_vocabulary(backbone: Backbone) -> Iterator[None]:
    """The head over a vocabulary, where it is a module of its own, reads a token of each row."""
    head = None
    # What a model does behind its head is known of transformers alone.
    if backbone.shows_states and not backbone.compiled:
        head = backbone.inner.get_output_embeddings()
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda module, args: (args[0][..., :1, :], *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def split_inputs(
    batch: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], tuple[Tensor, Tensor] | None]:
    """The student's inputs, the teacher's own, and the spans of both."""
    student, own = {}, {}
    for name, x in batch.items():
        if name.startswith("teacher_"):
            own[name.removeprefix("teacher_")] = x
        else:
            student[name] = x
    spans = student.pop("student_spans", None), own.pop("spans", None)
    if (spans[0] is None) != (spans[1] is None) or (spans[0] is not None and not own):
        raise ValueError("pass student_spans, teacher_spans and the teacher's inputs together")
    return student, own, None if spans[0] is None else (spans[0], spans[1])  # type: ignore[return-value]


def _one_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """In the place of no rows, of which models can't make anything: zeros, nothing padded.

    The parameters then take part in the loss, as data-parallel training wants it.
    """
    row = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.dim() and not len(x):
            shape = [1, *(max(1, size) for size in x.shape[1:])]
            row[name] = x.new_ones(shape) if "mask" in name else x.new_zeros(shape)
    return row


def _token_mask(batch: dict[str, Any]) -> Tensor | None:
    """attention_mask as bool (B, N); the choices of a question are rows of their own."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if mask.dim() not in (2, 3):
        raise ValueError(f"attention_mask must be (B, N), got shape {tuple(mask.shape)}")
    return mask.bool().flatten(0, -2)


def _batch_shape(batch: dict[str, Any], mask: Tensor | None) -> tuple[int, int] | None:
    """(B, N) of the tokens, None where only the models know it."""
    tokens = mask if mask is not None else batch.get("input_ids")
    if not isinstance(tokens, Tensor):
        tokens = batch.get("inputs_embeds")
        tokens = tokens[..., 0] if isinstance(tokens, Tensor) else None
    if tokens is None or tokens.dim() < 2:
        return None
    rows, length = tokens.flatten(0, -2).shape
    return rows, length


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _leave_teacher_out(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}teacher.")]:
        del state[key]


def _expect_no_teacher(module: Any, incompatible: Any) -> None:
    # Behind the prefix of a module around this one.
    ours = tuple(f"teacher.{key}" for key in module.teacher.state_dict())
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.endswith(ours)]
