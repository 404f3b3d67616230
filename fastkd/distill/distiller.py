"""Teacher, student and method as one module that any training loop can drive."""

import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastkd._core import check
from fastkd._core.numerics import autocast_off
from fastkd._core.warn import warn_caller
from fastkd.distill.accumulation import WholeBatch, accumulate
from fastkd.distill.by_row import ByRow
from fastkd.distill.cache import CacheWriter, TeacherCache, sample_keys
from fastkd.distill.method import Method, Only, check_method, other_vocabulary
from fastkd.distill.prediction_losses import countable
from fastkd.distill.spans import check_paired_tokens
from fastkd.distill.step import ItemCounts, Step, unit_gradients
from fastkd.distill.teachers import Teachers, as_teacher, averaging_teachers
from fastkd.distributed import InGroup, ranks_of
from fastkd.lm.soft_targets import Unmatched
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.models.backbone import Backbone, Blocks, backbone_of
from fastkd.models.batch import (
    SPAN_LABELS,
    Batch,
    batch_outputs,
    check_tokens,
    decoder_tokens,
    from_front,
    put_back,
    rotate,
    split_inputs,
)
from fastkd.models.hooks import replaced_embeddings
from fastkd.models.inputs import IGNORED, Batches
from fastkd.models.outputs import HeadOutput, Outputs
from fastkd.models.spans import paired_positions


class BatchReader:
    """Reads batches for a student, its teachers and their method."""

    def __init__(self, student: Backbone, teachers: Teachers, method: Method) -> None:
        self.student, self.teachers = student, teachers
        self.method_name = type(method).__name__
        #: Whether predictions for tokens are compared; spans pair those of a teacher's own inputs.
        self.pairs_tokens = (
            student.per_token
            and not student.encoder_decoder
            and any(m.uses_teacher and m.compares_logits(0.0, 1.0) for _, m in teachers.pairs)
        )
        #: Whether a teacher has another vocabulary: soft targets then are at paired tokens alone.
        self.two_vocabularies = any(
            isinstance(teacher.model.vocabulary, VocabularyMatch) for teacher in teachers.each
        )
        # Only transformers' models are known to separate packed documents without a mask.
        unmasks = all(model.shows_states for model in (student, *teachers.live))
        self._batch = functools.partial(Batch.of, student=student, unmasks=unmasks)
        #: Warnings of teachers with a vocabulary of another size, until a batch shows that they
        #: read the student's ids. Tokenizers and the heads' vocabularies were compared already.
        self.vocabulary_warnings = [
            other_vocabulary(student.num_tokens, model.num_tokens)
            for teacher, method in teachers.pairs
            for model in teacher.live
            if method.uses_teacher
            and student.num_tokens is not None
            and model.num_tokens not in (None, student.num_tokens)
            and student.tokenizer is None
            and model.vocabulary is None
        ]

    def read(self, inputs: Mapping[str, Any], num_items: float | Tensor | None = None) -> Batch:
        """Read arguments as in `Distiller.forward`; ``num_items`` in ``inputs`` is ignored."""
        by_row = self.teachers.by_row
        if by_row is None:
            return self._read(inputs, num_items, self.teachers.live)
        split = by_row.module.split(inputs)
        inputs = {name: x for name, x in inputs.items() if name != "teacher_id"}
        others = [model for model in self.teachers.live if model not in by_row.live]
        batch = self._read(inputs, num_items, others)
        batch.parts = {
            number: (rows, self._read(own, num_items, by_row.each[number].live))
            for number, (rows, own) in split.items()
        }
        return batch

    def _read(self, inputs: Mapping[str, Any], num_items: Any, live: Sequence[Backbone]) -> Batch:
        """Read a batch whose rows the models ``live`` read."""
        batch, own, spans = self._split(inputs, num_items)
        teaching = [(t, method) for t, method in self.teachers.pairs if method.uses_teacher]
        if self.two_vocabularies and self.pairs_tokens and spans is None:
            raise ValueError(
                "teacher_spans: the teacher has another vocabulary; pass its inputs and both "
                "spans, as TwoTokenizers returns them"
            )
        if own and teaching:
            batch.teacher = self._batch(own, readers=self.teachers.live)
            per_token = self.student.per_token or isinstance(batch.labels, tuple)
            paired = spans is not None and self.pairs_tokens
            for teacher, method in self.teachers.pairs:
                teacher.check_own_inputs(method, per_token, spans is not None, paired)
            if spans is not None and paired and not self.two_vocabularies:
                ids = inputs.get("input_ids"), own.get("input_ids")
                check_paired_tokens(self.method_name, spans, ids, batch.labels)
            if spans is not None:
                batch.align(spans, self.student.causal, several=not self.two_vocabularies)
        elif self.vocabulary_warnings and "input_ids" in batch.inputs:
            for warning in self.vocabulary_warnings:
                warnings.warn(
                    f"the student: {warning} (tokenizers=... has that checked; TwoTokenizers gives "
                    "each side its own)",
                    stacklevel=2,
                )
            self.vocabulary_warnings = []
        teachers = [("teacher", model) for teacher, _ in teaching for model in teacher.live
                    if model in live]  # fmt: skip
        check_tokens(batch, "", [("student", self.student), *([] if batch.teacher else teachers)])
        if batch.teacher is not None:
            check_tokens(batch.teacher, "teacher_", teachers)
        return batch

    def _split(self, inputs: Mapping[str, Any], num_items: Any = None) -> tuple[Batch, Any, Any]:
        """The student's batch, the teacher's own inputs, and the spans of student and teacher."""
        student, own, spans = split_inputs(inputs)
        own.pop("id", None)  # teacher_id
        labels, segments, _ = (student.pop(x, None) for x in ("labels", "segments", "num_items"))
        loss_weights = student.pop("loss_weights", None)
        pairs_labels = self.pairs_tokens and not self.two_vocabularies
        if spans is not None and isinstance(labels, Tensor) and pairs_labels:
            # Predictions are compared where both models read the token; no causal head predicts
            # the teacher's first one, which padding on the left moves.
            mask = own.get("attention_mask")
            start = 0 if mask is None else mask.to(torch.uint8).argmax(1, keepdim=True)
            unpaired = paired_positions(*spans) < start + int(self.student.causal)
            labels = labels.masked_fill(unpaired, IGNORED)
        first = None
        if self.student.writes:
            student, labels, first = from_front(self.student, student, labels)
            student = self.student.with_decoder_inputs(student, labels)
        readers = [self.student, *([] if own else self.teachers.live)]
        batch = self._batch(student, labels, num_items, segments, first, readers=readers)
        if loss_weights is not None:
            batch.loss_weights = self._checked_loss_weights(loss_weights, batch)
        return batch, own, spans

    def _checked_loss_weights(self, loss_weights: Any, batch: Batch) -> Tensor:
        """``loss_weights`` (B, N), in the token order of the labels."""
        if not self.student.per_token:
            raise ValueError(
                "loss_weights are factors of the predictions of tokens, and the head of "
                f"{self.student.class_name} gives one prediction a row; leave them out"
            )
        check.floating("loss_weights", loss_weights)
        check.no_grad("loss_weights", loss_weights)
        shape = batch.shape if batch.labels is None else getattr(batch.labels, "shape", ())
        check.shape("loss_weights", loss_weights, tuple(shape or ()), "one for each label")
        return loss_weights if batch.first is None else rotate(loss_weights, batch.first, 1)

    def read_student(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Batch:
        """Read the student's inputs alone, without those of a teacher."""
        inputs, labels, first = from_front(self.student, inputs, labels)
        return self._batch(inputs, labels, first=first, readers=[self.student])

    def teacher_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's inputs in a batch: its ``teacher_`` inputs, or else the student's."""
        student, own, _ = split_inputs(inputs)
        if own:
            return own
        student, labels, _ = from_front(self.student, student, student.get("labels"))
        read = self.student.with_decoder_inputs(student, labels)
        targets = {"labels", "num_items", "loss_weights", *SPAN_LABELS}
        found = {name: x for name, x in read.items() if name not in targets}
        # A decoder reads tokens without a label, which aren't compared.
        return found if decoder_tokens(read, None) is None else {**found, "labels": labels}

    def count_items(self, inputs: Mapping[str, Any]) -> Tensor:
        batch = self._split(inputs)[0]
        labels: Any = batch.labels
        if labels is not None and batch.mask is None:
            valid = torch.ones_like(labels, dtype=torch.bool)
        else:
            valid = batch.token_mask
        counted, _ = countable(labels, valid, batch.document_ids, self.student.causal)
        return counted.sum()


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Teacher = PreTrainedModel | Blocks | TeacherCache | ByRow


@dataclass
class DistillerOutput:
    """Result of a `Distiller`.

    Attributes:
        loss: the weighted sum of the terms, to call backward on.
        terms: each loss term by name, detached and before weighting; "total" is their weighted sum.
        logits: the student's logits, detached; a (start, end) pair for question answering. None
            without a head, and for a language model unless ``keep_logits=True``.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    logits: Tensor | tuple[Tensor, Tensor] | None


# DistributedDataParallel(static_graph=True) and FSDP2 find the loss as a leaf of the output.
torch.utils._pytree.register_dataclass(DistillerOutput)


class _Trained(InGroup):
    """What a training loop reads from a Distiller as from its student, or sets in it."""

    student: Any
    student_model: Backbone
    teacher: Any
    method: Method
    _progress: float | None
    #: The student's configuration.
    config: Any
    #: Whether the head predicts one label per token; see ``num_items`` in `forward`.
    counts_positions: bool

    @property
    def progress(self) -> float:
        """Fraction of the training that is done, 0 to 1; see `set_progress`."""
        return self._progress or 0.0

    @property
    def perturbs(self) -> bool:
        """Whether this step applies LRC-BERT's gradient perturbation."""
        training = self.student_model.uncompiled.training and torch.is_grad_enabled()
        return self.method.perturb and training

    @property  # type: ignore[override]
    def training(self) -> bool:
        """The student's mode."""
        student = self._modules.get("student")
        return student is None or student.training

    @training.setter
    def training(self, mode: bool) -> None:
        """nn.Module's bookkeeping; `train` reaches the student."""

    def train(self, mode: bool = True) -> Any:
        """Set the student's mode, True in a new distiller; the teacher stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def get_input_embeddings(self) -> nn.Module:
        """The student's input embeddings, to which transformers.Trainer's NEFTune adds noise."""
        return self.student.get_input_embeddings()  # type: ignore[operator]

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Checkpoint the student's activations; the teacher runs without gradient."""
        self.student.gradient_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """`gradient_checkpointing_enable` under transformers' newer name."""
        self.student.activation_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]


class Distiller(_Trained):
    """A student that learns from a teacher by a method.

    Calling it with a batch runs both models and returns the weighted sum of the method's loss
    terms. The teacher is frozen, stays in eval mode and runs without gradient; only the layers
    that the method compares are kept. The method's own trainable modules are part of
    ``parameters()`` from the start. ``state_dict()`` holds the student and the method, and of
    teachers only an `EMATeacher`; ``student.save_pretrained`` saves the student alone.
    DistributedDataParallel needs ``find_unused_parameters=True`` if a head or pooler is unused.

    Args:
        teacher: a fine-tuned transformers encoder, decoder or encoder-decoder, frozen in place; or
            a `TeacherCache` of its outputs. `Blocks` describes models that aren't from
            transformers. `ByRow` has a teacher for each row. A list of teachers needs one method
            each, in `Several`. The teacher may
            be the base of a PEFT student, ``Distiller(base, get_peft_model(base, ...), method)``:
            it runs with the adapters disabled, and its weights are in memory once.
        student: the model to train. It takes the teacher's inputs, or inputs of its own: see
            `forward`.
        method: a method of `fastkd.distill.methods`, or a subclass of `Method`.
        gather: compare the samples of all processes. If the loop averages gradients over the
            processes, value and gradient are those of one process with the whole batch, also for
            batches of unequal sizes. `fastkd.distributed` documents the communication. Without
            ``gather`` each process compares its own samples, and the loop averages.
        group: the processes that gather; all by default.
        keep_logits: return the logits of causal and masked language models too. By default the
            logits of all tokens are never computed: the terms come from hidden states and heads,
            a few tokens at a time. docs/support.md lists the models that always compute logits.
        tokenizers: tokenizers of language models whose token distributions are compared: one for
            all models, or the student's and each teacher's. Ids of the shared vocabulary must be
            the same tokens. Columns of logits beyond it (a head's padding, tokens that one model
            adds) are left out of both distributions; labels must be below it. Without tokenizers,
            heads of two sizes are compared on the smaller vocabulary, if the configurations'
            special tokens agree and the rest could be padding (fewer than 1024). A warning
            reports this. A `fastkd.VocabularyMatch` instead of tokenizers compares the matched
            tokens of two vocabularies, with batches of `TwoTokenizers`, at the tokens whose span
            has one token on both sides; soft targets are divided by all counted tokens.
        unmatched: what becomes of the unmatched tokens of a `fastkd.VocabularyMatch`; see
            `fastkd.soft_target_loss`. A cache of the teacher's top k needs "bucket": its outcomes
            are the matched ones of the k tokens, and all other tokens together.

    Raises:
        ValueError: teacher and student share weights or don't fit the method, or the tokenizers
            map one id to different tokens.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from fastkd.distill import FCD, student_from_teacher
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=4)
    >>> teacher = BertForSequenceClassification(config)
    >>> distiller = Distiller(teacher, student_from_teacher(teacher, [2, 4]), FCD())
    >>> ids = torch.arange(48).view(4, 12)
    >>> out = distiller(input_ids=ids, labels=torch.tensor([0, 1, 0, 1]))
    >>> out.loss.backward()
    >>> sorted(out.terms)
    ['samples', 'soft', 'task', 'tokens', 'total']
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
        keep_logits: bool = False,
        tokenizers: Any = None,
        unmatched: Unmatched = "renormalise",
    ) -> None:
        super().__init__()
        check_method("method", method)
        self.student_model = backbone_of(student, "student")
        taught: Any = as_teacher(teacher, student)
        if isinstance(teacher, (list, tuple)):
            taught = nn.ModuleList(as_teacher(each, student) for each in teacher)
        self.teachers = Teachers(taught, method)
        self.teachers.take_tokenizers(self.student_model, tokenizers, unmatched)
        shared = {id(p) for p in taught.parameters()} & {id(p) for p in student.parameters()}
        if shared:
            raise ValueError(
                "student: shares parameters with the teacher, which is frozen; copy the model, use "
                "student_from_teacher, or pass the base of a PEFT student as the teacher"
            )
        self.teacher, self.student, self.method = taught, student, method
        self.gather, self.group, self.keep_logits = gather, group, keep_logits
        self.config = self.student_model.config
        self.counts_positions = self.student_model.per_token
        self._progress = None
        method.build(self.teachers.model, self.student_model)
        device = next(student.parameters()).device
        for each, taught_by in self.teachers.pairs:
            each.check(taught_by, self.student_model, device)
        self.reader = BatchReader(self.student_model, self.teachers, method)
        #: Whether language models' terms are computed from hidden states and heads, not logits.
        self.uses_lm_head = (
            method.uses_lm_head and not self.student_model.encoder_decoder and not keep_logits
        )
        taught.requires_grad_(False).eval()
        # A half-precision student gets half-precision projections (an orthogonal one stays exact).
        method.to(device=device, dtype=self.student_model.dtype)
        self.train()  # from_pretrained gives models in eval mode
        self.register_state_dict_post_hook(_leave_teacher_out)
        self.register_load_state_dict_post_hook(_expect_no_teacher)

    def set_progress(self, progress: float) -> None:
        """Set the fraction of the training that is done, 0 to 1; LRCBERT's schedule reads it."""
        check.fraction("progress", progress)
        self._progress = float(progress)

    def prepare(self, batches: Batches) -> None:
        """Make the method's choices that need data (MC3KD: its teacher layers).

        Args:
            batches: dicts of model inputs, read once, and only if the method needs data.
        """
        self.teachers.prepare(self.method, map(self.reader.teacher_inputs, batches))

    def cache_teacher(
        self,
        batches: Batches,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        shard_bytes: int = 2**28,
        top_k: int | None = None,
    ) -> TeacherCache:
        """Store the teacher's outputs that the method needs, for each sample, in a folder.

        Samples that the folder already holds are skipped, so an interrupted call can be repeated,
        and several processes may write their shards of the data at once.

        Args:
            batches: dicts of arguments as in `forward`, with ``input_ids``.
            path: a new folder, or one that the same teacher has written to.
            tokenizer: a transformers tokenizer; a checksum of its vocabulary is stored.
            shard_bytes: approximate number of bytes in memory before a file is written.
            top_k: of a language model's soft targets, store the ids and log-probabilities of so
                many most probable tokens, at the method's temperature, instead of the head and its
                inputs. All other tokens then are one outcome (`fastkd.TopK`), whose probability is
                the rest.

        Returns:
            The cache, which replaces the teacher in a `Distiller`: see `TeacherCache`.

        Raises:
            ValueError: the folder was written by another teacher, tokenizer or method; the
                message names the difference.
        """
        model, source = self.teachers.to_cache()
        if source is not None:
            if top_k not in (None, source.top_k):
                raise ValueError(f"top_k: the source has top_k={source.top_k}, not {top_k}")
            batches, top_k = source.ahead(batches, self), source.top_k
        settings = Path(path), tokenizer, shard_bytes, top_k, source
        return CacheWriter(model, self.method, *settings).write(map(self.read, batches))

    def sample_keys(self, batch: dict[str, Any]) -> list[bytes]:
        """Keys of a batch's samples in a `TeacherCache`, for ``key in cache``."""
        return sample_keys(self.read(batch), self.teachers.model)[0]

    def forward(
        self,
        *,
        labels: Tensor | None = None,
        num_items: float | Tensor | None = None,
        segments: Tensor | None = None,
        loss_weights: Tensor | None = None,
        _micro_batch: tuple[WholeBatch, int] | None = None,
        **inputs: Any,
    ) -> DistillerOutput:
        """Loss of one batch.

        Rows may be packed with several documents. Each document is then one sample, as in a row
        of its own, and nothing is compared across documents. The first packed batch tests whether
        the models keep documents apart (not on sharded models); a model that reads a packed row as
        one document raises. transformers' decoders separate documents only without a mask, so
        they get none.

        For encoder-decoders the decoder's hidden states and predictions are compared, at labelled
        positions that ``decoder_attention_mask`` keeps. The decoder reads ``decoder_input_ids``,
        by default the labels shifted right.

        Args:
            labels: the labels of the student's head: (B,) classes or numbers, (B, V) yes or no,
                (B, N) with −100 for ignored positions. A row without a label has the class or
                answer −100, or the number NaN; both also mask one of several labels. With the
                configuration's problem_type "single_label_classification", (B, V) are probabilities
                of the classes. Question answering takes ``start_positions`` and ``end_positions``
                instead.
            num_items: for heads with one prediction per token, in gradient accumulation: the mean
                number of labelled positions (`count_items`) per micro-batch of the accumulation
                step. The sum is divided by it instead of this batch's own count, so the gradient
                doesn't depend on how the samples were split.
            segments: (B, N) document ids in packed rows. By default they come from ``seq_idx``,
                ``cu_seq_lens_q`` or ``position_ids`` that restart, as transformers'
                DataCollatorWithFlattening returns them.
            loss_weights: (B, N) floating, of any sign, without gradient, for heads with one
                prediction per token: factors of the labels' losses, in soft and task terms. Like a
                label, a weight belongs to the token at its position. The means divide by the number
                of positions that count, as without weights.
            inputs: the models' other inputs, such as ``attention_mask``, (B, N), or (B, C, N) for
                the C choices of a question, each a sample. If any name begins with ``teacher_``
                (``teacher_input_ids``, ``teacher_pixel_values``), the teacher gets these inputs
                only. Samples are then compared by the token that each head reads, or by their
                mean, as the method chooses. Methods that compare tokens need ``student_spans``
                (B, N) and ``teacher_spans`` (B, M) from `TwoTokenizers` or `align_spans`: the
                number of the text span of each token, −1 for none. They compare spans then. Soft
                targets of tokens need spans of one token each, the same token in both models, and
                ``labels``: the predictions of these tokens are compared, in task terms too.
                With `ByRow` ``teacher_id`` has each row's teacher: B names, or a tensor (B,) of
                numbers.
        """
        if getattr(self, "_is_replica", False):
            raise ValueError(
                "model: DataParallel runs copies of the models, which a Distiller can't hook; "
                "start one process per GPU (torchrun, DistributedDataParallel)"
            )
        if _micro_batch is not None:
            whole, index = _micro_batch
            return self.output(*whole.micro_batch_loss(index))
        if self._progress is None and self.method.scheduled and self.training:
            self._progress = warn_of_schedule(self.method)
        targets = {"labels": labels, "segments": segments, "loss_weights": loss_weights}
        batch = self.read({**targets, **inputs}, num_items)
        teacher = self.teachers.outputs(batch, self._progress or 0.0, self.uses_lm_head)
        items = ItemCounts(ranks_of(self.gather, self.group) if self.gather else None)
        if self.method.perturb and self.perturbs:
            (shift,) = unit_gradients(
                self.student_model,
                [batch],
                [lambda: self.losses(self.make_step(batch, teacher, items))],
                self.method.perturb_norm,
                items.ranks,
            )
            with replaced_embeddings(self.student_model, lambda emb: emb + shift):
                step = self.make_step(batch, teacher, items)
        else:
            step = self.make_step(batch, teacher, items)
        loss, terms = self.losses(step)
        terms = {**terms, "total": loss.detach()}
        if (ranks := items.ranks) is not None:
            # The gradient is this process's share; the value is that of all processes.
            values = ranks.sum(torch.stack(list(terms.values()))) / ranks.size
            terms = dict(zip(terms, values, strict=True))
            loss = values[-1] + (loss - loss.detach())
        return self.output(loss, terms, step)

    def count_items(self, batch: dict[str, Any]) -> Tensor:
        """Number of labelled positions in a batch; ``num_items`` is their mean over micro-batches.

        Counted are the positions that `forward` compares: for next-token prediction, those whose
        next token is neither padding nor of another document. Without labels all of them count.

        Args:
            batch: arguments as in `forward`, with ``labels`` (B, N) or ``input_ids``.
        """
        return self.reader.count_items(batch)

    def accumulate(
        self, batches: Iterable[dict[str, Any]], model: nn.Module | None = None
    ) -> Iterator[DistillerOutput]:
        """Losses of micro-batches whose gradients add up to those of one large batch, exactly.

        Losses that compare samples see all samples of ``batches`` (Gao et al. 2021, GradCache):
        the models run over each micro-batch without gradient, the loss of the whole batch is
        computed from the features that the method compares, and the student runs again over each
        micro-batch with that loss's gradient. Memory holds the activations of one micro-batch and
        the compared features of the whole batch. The student runs twice, with the same dropout.

        Call backward on each loss before the next one, undivided, then step the optimizer. Losses
        and terms are shares: they add up to those of the whole batch.

        Args:
            batches: dicts of arguments as in `forward`; their lengths may differ.
            model: the module around this distiller, such as DistributedDataParallel; gradients are
                then synchronised once, in the last micro-batch.

        >>> for out in distiller.accumulate(batches):  # doctest: +SKIP
        ...     out.loss.backward()
        >>> optimizer.step()  # doctest: +SKIP
        """
        if self._progress is None and self.method.scheduled and self.training:
            self._progress = warn_of_schedule(self.method)
        yield from accumulate(self, batches, self if model is None else model)

    def read(self, inputs: Mapping[str, Any], num_items: float | Tensor | None = None) -> Batch:
        """Read arguments as in `forward` into a batch; raise if a model has been replaced."""
        runs = [("student", self.student, self.student_model.uncompiled)]
        runs += [("teacher", self.teacher, teacher.module) for teacher in self.teachers.each]
        for name, module, run in runs:
            if all(inner is not run for inner in module.modules()):
                raise _replaced(name)
        return self.reader.read(inputs, num_items)

    def make_step(self, batch: Batch, teacher: Outputs, items: ItemCounts) -> Step:
        """Run the student on a batch; returns the step that a method computes its loss from."""
        request = self.method.layer_request("student")
        head: HeadOutput = "inputs" if self.uses_lm_head else "logits"
        student = batch_outputs(self.student_model, batch.inputs, request, batch, head)
        if batch.spans is not None:
            student = batch.spans.pool(student, 0, self.student_model, batch.feature_mask)
        step = Step(
            student,
            teacher,
            self.student_model,
            self.teachers.model,
            batch.feature_mask if batch.spans is None else batch.spans.mask,
            batch.labels,
            batch.num_items,
            token_mask=batch.mask,
            document_ids=batch.document_ids,
            loss_weights=batch.loss_weights,
            spans=batch.spans,
            first=batch.first,
            items=items,
        )
        return step if items.ranks is None else step.among_ranks()

    def losses(self, step: Step, only: Only | None = None) -> tuple[Any, dict[str, Tensor]]:
        """Weighted loss and detached terms of the method.

        With ``only`` a part of the terms; the loss is None if none of them has a weight.
        """
        with autocast_off(next(self.student.parameters())):
            loss, terms = self.method(step, self._progress or 0.0, only)
            if step.student.router is not None and only != "features":
                router = step.own_mean(step.student.router)
                weighted = self.student_model.stack_config.router_aux_loss_coef * router
                loss = weighted if loss is None else loss + weighted
                terms = {**terms, "router": router.detach()}
        if loss is None and only is None:
            name = type(self.method).__name__
            raise ValueError(f"method: all weights of {name} are zero; set at least one above 0")
        return loss, terms

    def output(self, loss: Tensor, terms: dict[str, Tensor], step: Step) -> DistillerOutput:
        """A step's result, with detached logits in the token order of the input rows."""
        if self.training and torch.is_grad_enabled() and not loss.requires_grad:
            check_trainable(self.parameters())
        # Attached logits that no term uses would make DistributedDataParallel wait for gradients.
        logits = tree_map_only(Tensor, Tensor.detach, step.student.logits)
        if step.first is not None and (self.student_model.per_token or isinstance(logits, tuple)):
            logits = put_back(logits, step.first)
        return DistillerOutput(loss, terms, logits)


def _replaced(name: str) -> ValueError:
    return ValueError(
        f"{name}: the {name} was replaced after the Distiller was made, which still runs the old "
        "one; make a new Distiller"
    )


def check_trainable(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if neither the student nor the method has a parameter to train."""
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            "student: none of its parameters requires a gradient; call "
            "student.requires_grad_(True) on a copy of a frozen teacher, load adapters with "
            "is_trainable=True, or call distiller.eval() to compare without training"
        )


def warn_of_schedule(method: Method) -> float:
    """Warn once if the loop trains a scheduled method without setting the progress; returns 0."""
    warn_caller(
        f"{type(method).__name__} follows a schedule; call "
        "distiller.set_progress(step / total_steps) in the loop"
    )
    return 0.0


def _leave_teacher_out(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    kept = tuple(f"{prefix}teacher.{name}" for name in _prefixes_of_averages(module))
    for key in [key for key in state if key.startswith(f"{prefix}teacher.")]:
        if not key.startswith(kept):
            del state[key]


def _prefixes_of_averages(module: Any) -> tuple[str, ...]:
    """Beginnings of the names of teachers that change in training, in ``module.teacher``."""
    return tuple(f"{name}." if name else "" for name in averaging_teachers(module.teacher))


def _expect_no_teacher(module: Any, incompatible: Any) -> None:
    # A module around this one adds a prefix.
    averages = _prefixes_of_averages(module)
    ours = tuple(
        f"teacher.{key}" for key in module.teacher.state_dict() if not key.startswith(averages)
    )
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.endswith(ours)]
