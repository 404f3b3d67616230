"""Distillation inside ``transformers.Trainer``."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastkd._core import check
from fastkd._core.extras import require
from fastkd._core.warn import warn_caller
from fastkd.distill.distiller import Distiller, DistillerOutput
from fastkd.distill.labelled_order import LABELLED_SHARE, LabelledOrder, has_label
from fastkd.distill.method import Method
from fastkd.distill.teachers import averaging_teachers
from fastkd.models.batch import put_back, split_inputs
from fastkd.models.inputs import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

transformers = require("transformers", "train")
Trainer: Any = transformers.Trainer
TrainerCallback: Any = transformers.TrainerCallback

# Entries of a batch: the scale of its label loss, and the weight of its mean loss in the mean over
# the processes and the step's batches, which may have unlike numbers of rows.
LABEL_SHARE, SHARE = "label_share_of_step", "share_of_step"
METHOD_FILE = "method.pt"
# State of the averaging teachers, by their names in the Distiller's teacher.
AVERAGE_FILE = "ema_teacher.pt"


@dataclass(eq=False)
class _Callback(TrainerCallback):
    """Prepares the method from the training data, unless a checkpoint has restored its choice, and
    updates the Distiller's averaging teachers after each optimizer step.
    """

    trainer: "DistillationTrainer"

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer._logged = {}
        method, steps = trainer.distiller.method, trainer.args.gradient_accumulation_steps
        weights = [method.weights(progress) for progress in (0.0, 1.0)]
        terms = [x for x in method.across_samples if any(each.get(x) for each in weights)]
        if steps > 1 and terms and trainer.is_world_process_zero():
            trainer.warn(
                f"gradient_accumulation_steps={steps}: {type(method).__name__} compares samples "
                f"({', '.join(terms)}) within each accumulated batch only; "
                f"{trainer._larger_batch()}"
            )
        if method.scheduled and (why := method.schedule_warning(max(1, trainer.state.max_steps))):
            trainer.warn(why)
        if not trainer.distiller.method.prepared:
            # The data loader must not advance the random state of training.
            with torch.random.fork_rng():
                batches = itertools.islice(trainer._preparation_batches(), trainer.prepare_batches)
                trainer.distiller.prepare(batches)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        for average in averaging_teachers(self.trainer.distiller.teacher).values():
            average.update()


class _LabelledSampler(torch.utils.data.Sampler):
    """Sampler of a `LabelledOrder`, drawn anew in each epoch."""

    def __init__(self, order: LabelledOrder, seed: int) -> None:
        self.order, self.seed, self.epoch = order, seed, 0

    def __len__(self) -> int:
        return self.order.rows

    def set_epoch(self, epoch: int) -> None:
        """Called by Trainer, also for a resumed epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.order.draw(np.random.default_rng([self.seed, self.epoch])).tolist()


class DistillationTrainer(Trainer):
    """``transformers.Trainer`` whose model is a `Distiller`.

    It trains on the distiller's loss, logs the terms, follows the method's schedule and prepares
    the method from the training data. It evaluates, predicts with and saves the student: every
    checkpoint is a directory for ``from_pretrained``, where ``method.pt`` holds the method's state
    for resuming.

    Args:
        teacher, student, method: as in `Distiller`.
        model: a `Distiller`, instead of teacher, student and method.
        model_init: a function that returns a new `Distiller` for every ``train``, instead of
            ``model``. Its optional argument is the trial of a hyper-parameter search, or None.
        prepare_batches: largest number of training batches for `Distiller.prepare`.
        labelled_share: minimum fraction of labelled rows in a batch, 0 to 1. If fewer rows of
            ``train_dataset`` have labels (not −100 or NaN), labelled rows are repeated and every
            unlabelled row is read once per epoch. The data set needs a label column; 0 keeps
            Trainer's order.
        arguments: all other arguments of ``transformers.Trainer``.

    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> from fastkd.distill import FCD, student_from_teacher
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=4)
    >>> teacher = BertForSequenceClassification(config)
    >>> trainer = DistillationTrainer(
    ...     teacher, student_from_teacher(teacher, [2, 4]), FCD(),
    ...     args=TrainingArguments("unused", report_to="none", save_strategy="no"),
    ... )
    >>> type(trainer.distiller.method).__name__
    'FCD'
    """

    _signature_columns: list[str] | None
    #: Number of micro-batches in which a process computes its rows of a batch, by
    #: `Distiller.accumulate`.
    accumulate = 1
    #: Weight of the mean loss of the current batch.
    _share: Any = 1.0
    # Losses of its micro-batches, which add up to the batch's, and their number.
    _parts: Iterator[DistillerOutput] | None = None
    # Sum and number of steps of each term since the last log.
    _logged: dict[str, tuple[Tensor, float]]
    _num_parts = 1

    def __init__(
        self,
        teacher: "PreTrainedModel | None" = None,
        student: "PreTrainedModel | None" = None,
        method: Method | None = None,
        *,
        model: Distiller | None = None,
        model_init: Callable[..., Distiller] | None = None,
        prepare_batches: int = 64,
        labelled_share: float = LABELLED_SHARE,
        **arguments: Any,
    ) -> None:
        check.positive_int("prepare_batches", prepare_batches)
        parts = teacher, student, method
        given = [part is not None for part in parts]
        ways = [all(given), model is not None, model_init is not None]
        if sum(ways) != 1 or any(given) != all(given):
            raise ValueError(
                "model: pass either teacher, student and method, or model=Distiller(...), or "
                "model_init=..."
            )
        if ways[0]:
            model = Distiller(*parts)  # type: ignore[arg-type]
        check.fraction("labelled_share", labelled_share)
        self.prepare_batches, self.labelled_share = prepare_batches, labelled_share
        if model is not None:
            self.distiller, self._logged = model, {}
        super().__init__(model=model, model_init=model_init, **arguments)
        self.add_callback(_Callback(self))
        refused = {
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_loss_func": self.compute_loss_func is not None,
            "use_liger_kernel": getattr(self.args, "use_liger_kernel", False),
        }
        for name, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"{name}: it changes the loss of evaluation but not the method's; leave it out"
                )
        if self.args.label_names is None:
            student_class = type(self.distiller.student_model.inner)
            self.label_names = transformers.utils.find_labels(student_class)
        # For heads with one prediction per token, the loss is a mean over the positions of all
        # accumulated batches, which Trainer then counts.
        self.model_accepts_loss_kwargs = self.distiller.counts_positions
        averages = averaging_teachers(self.distiller.teacher).values()
        sharded = any(isinstance(x, DTensor) for average in averages for x in average.parameters())
        if sharded and self.args.save_strategy != "no":  # one process's shards
            raise ValueError(
                "teacher: Trainer can't save an EMATeacher that is sharded by FSDP2; pass "
                'save_strategy="no" and save distiller.state_dict() by torch.distributed.checkpoint'
            )

    def _preparation_batches(self) -> Iterable[dict[str, Any]]:
        """Batches for `Distiller.prepare`."""
        return self.get_train_dataloader()

    def _larger_batch(self) -> str:
        """Remedy where terms that compare samples compare those of one accumulated batch only."""
        return "use a larger batch, or Distiller.accumulate in your own loop"

    def call_model_init(self, trial: Any = None) -> Distiller:
        """See ``transformers.Trainer.call_model_init``."""
        model = super().call_model_init(trial)
        if not isinstance(model, Distiller):
            raise TypeError(f"model_init must return a Distiller, got {type(model).__name__}")
        self.distiller, self._logged = model, {}
        return model

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """See ``transformers.Trainer.training_step``; runs the micro-batches of a batch."""
        inputs = self._prepare_inputs(dict(inputs))
        self._share = inputs.pop(SHARE, 1.0)
        label_share = inputs.pop(LABEL_SHARE, None)
        if label_share is not None:
            label_share = label_share / (self._share or 1)
        self.distiller.method.label_share = label_share
        if self.accumulate == 1:
            return super().training_step(model, inputs, *args)
        rows = len(next(iter(inputs.values())))
        if self.args.world_size > 1:  # the same number of micro-batches in all processes
            rows = int(self.accelerator.gather(torch.tensor([rows], device=self.args.device)).min())
        self._num_parts = max(1, min(self.accumulate, rows))
        split = (x.tensor_split(self._num_parts) for x in inputs.values())
        parts = [dict(zip(inputs, part, strict=True)) for part in zip(*split, strict=True)]
        self._parts = self.distiller.accumulate(parts, model)
        losses = [super(DistillationTrainer, self).training_step(model, x, *args) for x in parts]
        self._parts, self._num_parts = None, 1
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The distiller's loss in training, the student's own in evaluation.

        For a micro-batch it is the micro-batch's term of the whole batch's loss.
        """
        if model is self.distiller.student:
            return super().compute_loss(model, inputs, return_outputs)
        done = self.state.global_step / max(1, self.state.max_steps)
        self.distiller.set_progress(min(1.0, done))
        if self._parts is not None:
            output = next(self._parts)
            self._note(output.terms)
            return output.loss
        loss_scale = 1.0
        if num_items_in_batch is not None:
            # With num_items_in_batch Trainer does not divide by the number of accumulated batches.
            batches = self.current_gradient_accumulation_steps
            shares = self.args.world_size if self.args.average_tokens_across_devices else 1
            # A loss divided by the number of items of all processes already has its share.
            items = num_items_in_batch * self._share
            inputs = {**inputs, "num_items": items / (batches * shares)}
            loss_scale = 1 / batches
        output = model(**inputs)
        self._note(output.terms)
        loss = self._share * (loss_scale * output.loss)
        return (loss, output) if return_outputs else loss

    def warn(self, message: str) -> None:
        """Report a likely mistake."""
        warn_caller(message)

    def _note(self, terms: dict[str, Tensor]) -> None:
        """Add terms to the sums of the next log, weighted by the batch's fraction of a step.

        The terms of micro-batches add up to the batch's.
        """
        share = 1 / getattr(self, "current_gradient_accumulation_steps", 1)
        for name, value in terms.items():
            total, count = self._logged.get(name, (0, 0))
            total = total + value * self._share * share
            self._logged[name] = total, count + share / self._num_parts

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        columns = getattr(dataset, "column_names", None) or ()
        name = next((x for x in (*self.label_names, "label") if x in columns), None)
        # A label per token is no label of the row, and reading such a column may take much memory.
        if name is not None and len(dataset) and np.ndim(dataset[0][name]) == 0:
            share = self.labelled_share
            order = LabelledOrder(has_label(dataset[name][:]), self._train_batch_size, share)
            if order.rows != len(dataset):
                seed = self.args.data_seed
                return _LabelledSampler(order, self.args.seed if seed is None else seed)
        return super()._get_train_sampler(train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """See ``transformers.Trainer``; the items are the positions that the loss compares."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        # Trainer counts labels only, but soft targets need none.
        counts = self.model_accepts_loss_kwargs and batches
        if counts and not {"labels", "input_ids"}.isdisjoint(batches[0]):
            # A share of 0: rows that another process has, too.
            counts = [self.distiller.count_items(x) * (x.get(SHARE, 1.0) > 0) for x in batches]
            items = torch.stack(counts).sum().to(device)
            if self.args.average_tokens_across_devices and self.args.world_size > 1:
                items = self.accelerator.gather(items).sum()
        # A single batch of one process has all labels of the step.
        alone = self.args.world_size == 1 or self.distiller.gather
        if not self.model_accepts_loss_kwargs and len(batches) > (1 if alone else 0):
            shares = self._label_shares(batches, device)
            batches = [{**x, LABEL_SHARE: share} for x, share in zip(batches, shares, strict=True)]
        if len(batches) > 1:
            everywhere = rows = torch.tensor([count_rows(x) for x in batches])
            if self.args.world_size > 1:
                everywhere = self.accelerator.gather(rows[None].to(device)).cpu()
            shares = row_shares(rows, everywhere, self.distiller.gather).tolist()
            batches = [{**x, SHARE: share} for x, share in zip(batches, shares, strict=True)]
        return batches, items

    def _label_shares(self, batches: list[dict[str, Any]], device: torch.device) -> Sequence[Any]:
        """Scale of each batch's label loss: its share of the step's labels, times their number.

        The label losses then add up to the mean over the labels of all batches and processes. None
        where every row has a label: the Trainer's mean over the batches applies.
        """
        ranks, gather = self.args.world_size, self.distiller.gather
        counts = torch.tensor([count_labels(x) for x in batches], device=device)
        everywhere = self.accelerator.gather(counts[None]) if ranks > 1 else counts[None]
        labels, rows = everywhere.sum((0, 1))  # of (ranks, batches, 2)
        if bool(labels == rows):
            return [None] * len(batches)
        own = everywhere.sum(0)[:, 0] if gather else counts[:, 0] * ranks
        return (own * len(batches) / labels.clamp(min=1)).unbind()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See ``transformers.Trainer.evaluation_loop``; the weights stay as they were.

        For ``bf16_full_eval`` and ``fp16_full_eval`` Trainer rounds its model in place. A later
        ``train`` or ``save_model`` would continue with rounded weights, also of the teacher.
        """
        rounds = self.args.bf16_full_eval or self.args.fp16_full_eval
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.is_in_train or not rounds or sharded:
            return super().evaluation_loop(*args, **kwargs)
        kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (tensors, name, x, x.data)
            for module in self.distiller.modules()
            for tensors in (module._parameters, module._buffers)
            for name, x in tensors.items()
            if x is not None
        ]
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            for tensors, name, x, data in kept:
                x.data = data
                tensors[name] = x

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """See ``transformers.Trainer.prediction_step``; the model is the student."""
        own, _, _ = split_inputs(
            {n: x for n, x in inputs.items() if n not in ("segments", "loss_weights")}
        )
        distiller, labels = self.distiller, own.pop("labels", None)
        batch = distiller.reader.read_student(distiller.student_model.readable(own), labels)
        own = batch.inputs if labels is None else {**batch.inputs, "labels": batch.labels}
        loss, logits, targets = super().prediction_step(
            self.distiller.student, own, *args, **kwargs
        )
        if batch.first is None:
            return loss, logits, targets
        if distiller.student_model.per_token or isinstance(batch.labels, tuple):
            logits = put_back(logits, batch.first)
        if targets is not None:
            given = tuple(inputs[name] for name in self.label_names)
            targets = given if isinstance(targets, tuple) else given[0]
        return loss, logits, targets

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the terms' means over processes and the steps since the last log, too."""
        if "loss" in logs and self._logged:
            names, sums = zip(*self._logged.items(), strict=True)
            self._logged = {}
            means = torch.stack([total / count for total, count in sums])
            means = self.accelerator.reduce(means, "mean").tolist()
            logs = {**logs, **dict(zip(names, means, strict=True))}
        super().log(logs, *args, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            # A wrapped student's signature may list fewer inputs, and a teacher may read inputs
            # that the student does not, such as token types.
            distiller = self.distiller
            teachers = [backbone.known_inputs for backbone in distiller.teachers.live]
            shared = set().union(distiller.student_model.known_inputs, *teachers)
            own = {f"teacher_{name}" for name in set().union(*teachers)}
            targets = {"label", "label_ids", *self.label_names}
            # trl's collator reads the lengths of a packed row's documents from seq_lengths.
            packing = {"segments", "loss_weights", "student_spans", "teacher_spans", "seq_lengths"}
            # The keys of a teacher cache include token types.
            self._signature_columns = sorted({"token_type_ids"} | shared | own | targets | packing)

    @contextlib.contextmanager
    def _student_as_model(self) -> Iterator[None]:
        self.model, distiller = self.distiller.student, self.model
        try:
            yield
        finally:
            self.model = distiller

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        with self._student_as_model():  # Trainer saves it with save_pretrained
            super()._save(output_dir)
        if self.args.should_save:
            method = self.distiller.method.state_dict()
            torch.save(method, os.path.join(output_dir, METHOD_FILE))
            averages = averaging_teachers(self.distiller.teacher)
            if averages:
                states = {name: average.state_dict() for name, average in averages.items()}
                torch.save(states, os.path.join(output_dir, AVERAGE_FILE))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        # Trainer reads from its model which missing keys are tied weights.
        with self._student_as_model():
            super()._load_from_checkpoint(resume_from_checkpoint, self.distiller.student)
        self._load_method(resume_from_checkpoint)

    def _load_method(self, checkpoint: str) -> None:
        self.distiller.method.load_state_dict(_stored(checkpoint, METHOD_FILE))
        averages = averaging_teachers(self.distiller.teacher)
        states = _stored(checkpoint, AVERAGE_FILE) if averages else {}
        for name, average in averages.items():
            average.load_state_dict(states[name])

    def _load_best_model(self) -> None:
        with self._student_as_model():
            super()._load_best_model()
        self._load_method(self.state.best_model_checkpoint)


def _stored(checkpoint: str, name: str) -> Any:
    path = os.path.join(checkpoint, name)
    if not os.path.isfile(path):
        raise ValueError(
            f"{checkpoint} has no {name}; resume from a checkpoint of DistillationTrainer"
        )
    return torch.load(path, map_location="cpu")


def count_rows(batch: dict[str, Any]) -> int:
    """Number of rows; 0 if they are those of another process."""
    rows = len(next(x for x in batch.values() if hasattr(x, "__len__")))
    return rows if batch.get(SHARE, 1.0) else 0


def row_shares(rows: Tensor, everywhere: Tensor, gather: bool) -> Tensor:
    """Weight of each batch's mean loss: its share of the step's rows, times the number of losses.

    ``rows`` (batches) of this process, ``everywhere`` (processes, batches), or (batches) of one.
    With ``gather`` a loss covers the rows of all processes.
    """
    everywhere = everywhere.view(-1, len(rows))
    own = everywhere.sum(0) if gather else rows * len(everywhere)
    return own * len(rows) / everywhere.sum().clamp(min=1)


def count_labels(batch: dict[str, Any]) -> tuple[int, int]:
    """Number of labels of a batch, and of the rows' places for one."""
    if not batch.get(SHARE, 1.0):  # a process without rows left repeats some
        return 0, 0
    labels = batch.get("labels", batch.get("start_positions"))
    if not isinstance(labels, Tensor):
        return 0, 0
    known = torch.ones_like(labels, dtype=torch.bool)
    if "labels" not in batch:  # an answer beyond the text, or in padding, doesn't count
        x: Any = batch.get("input_ids", batch.get("inputs_embeds"))
        mask = batch.get("attention_mask")
        real = (x.new_ones(x.shape[:2]) if mask is None else mask).bool()
        known = real.gather(1, labels.clamp(0, x.shape[1] - 1).view(-1, 1)).view_as(labels)
        known &= labels < x.shape[1]
    if labels.is_floating_point():
        known = ~labels.isnan()
    if not labels.is_floating_point() or labels.dim() > 1:
        known &= labels != IGNORED
    return int(known.sum()), labels.numel()
