"""Distillation inside ``transformers.Trainer``."""

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fastkd._core.checks import check_fraction, check_positive_int
from fastkd._core.extras import require
from fastkd.distill.batch import put_back, split_inputs
from fastkd.distill.distiller import Distiller
from fastkd.distill.ema import averaging_teachers
from fastkd.distill.labelled_order import LABELLED_SHARE, LabelledOrder, has_label
from fastkd.distill.method import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

transformers = require("transformers", "train")
Trainer: Any = transformers.Trainer
TrainerCallback: Any = transformers.TrainerCallback

METHOD_FILE = "method.pt"
# Averages that teach, by their names in the Distiller's teacher.
AVERAGE_FILE = "ema_teacher.pt"


class _Prepare(TrainerCallback):
    """Lets the method choose from the training data, unless a checkpoint says what it chose."""

    def __init__(self, trainer: "DistillationTrainer") -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer._logged = {}
        trainer._warn_of_parts()
        if not trainer.distiller.method.prepared:
            # The loader draws random numbers that training would otherwise have drawn.
            with torch.random.fork_rng():
                batches = itertools.islice(trainer._preparation(), trainer.prepare_batches)
                trainer.distiller.prepare(batches)


class _Average(TrainerCallback):
    """Updates the Distiller's averages after each optimizer step."""

    def __init__(self, trainer: "DistillationTrainer") -> None:
        self.trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        for average in averaging_teachers(self.trainer.distiller.teacher).values():
            average.update()


class _Drawn(torch.utils.data.Sampler):
    """The rows of an order, another draw in each epoch."""

    def __init__(self, order: LabelledOrder, seed: int) -> None:
        self.order, self.seed, self.epoch = order, seed, 0

    def __len__(self) -> int:
        return self.order.rows

    def set_epoch(self, epoch: int) -> None:
        """Called by Trainer, in a resumed epoch too."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.order.draw(np.random.default_rng([self.seed, self.epoch])).tolist()


class DistillationTrainer(Trainer):
    """``transformers.Trainer`` whose model is a `Distiller`.

    It trains on the distiller's loss, logs the terms, keeps the method's schedule, lets the
    method prepare itself from the training data, and evaluates, predicts and saves the student:
    every checkpoint is a directory for ``from_pretrained``, beside which ``method.pt`` holds what
    resuming needs of the method.

    Args:
        teacher, student, method: as in `Distiller`.
        model: a ready `Distiller` in their place.
        model_init: or a function that makes one, of a hyper-parameter search's trial (None outside
            of it) or of nothing: every ``train`` then starts from a new one.
        prepare_batches: training batches that `Distiller.prepare` reads at most.
        labelled_share: least share of labelled rows in a batch, 0 to 1. Where fewer rows of
            ``train_dataset`` have labels (not −100 or NaN), those are drawn again, and every other
            row comes once an epoch. Of data sets with a column of labels; 0 leaves the order alone.
        arguments: everything else goes to ``transformers.Trainer``.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> from fastkd.distill import FCD, student_from_teacher
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4,
        ...                     num_attention_heads=2, intermediate_size=32)
        >>> teacher = BertForSequenceClassification(config)
        >>> trainer = DistillationTrainer(
        ...     teacher, student_from_teacher(teacher, [2, 4]), FCD(),
        ...     args=TrainingArguments("unused", report_to="none", save_strategy="no"),
        ... )
        >>> type(trainer.distiller.method).__name__
        'FCD'
    """

    _signature_columns: list[str] | None

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
        check_positive_int("prepare_batches", prepare_batches)
        parts = teacher, student, method
        ways = [
            all(batch is not None for batch in parts),
            model is not None,
            model_init is not None,
        ]
        if sum(ways) != 1 or (not ways[0] and any(batch is not None for batch in parts)):
            raise ValueError(
                "pass teacher, student and method, or model=Distiller(...), or model_init=..., "
                "and only one of them"
            )
        if ways[0]:
            model = Distiller(*parts)  # type: ignore[arg-type]
        check_fraction("labelled_share", labelled_share)
        self.prepare_batches, self.labelled_share = prepare_batches, labelled_share
        if model is not None:
            self._take(model)
        super().__init__(model=model, model_init=model_init, **arguments)
        self.add_callback(_Prepare(self))
        self.add_callback(_Average(self))
        refused = {
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_loss_func": self.compute_loss_func is not None,
            "use_liger_kernel": getattr(self.args, "use_liger_kernel", False),
        }
        for name, given in refused.items():
            if given:
                raise ValueError(
                    f"{name} would change the loss in evaluation but not the method's in training; "
                    "leave it out"
                )
        if self.args.label_names is None:
            student_class = type(self.distiller.student_model.inner)
            self.label_names = transformers.utils.find_labels(student_class)
        # Heads with one prediction per token are averaged over the positions of all accumulated
        # batches, which Trainer then counts.
        self.model_accepts_loss_kwargs = self.distiller.counts_positions

    def _take(self, distiller: Distiller) -> None:
        self.distiller = distiller
        # Sum and number of steps since the last log.
        self._logged: dict[str, tuple[Tensor, float]] = {}

    def _preparation(self) -> Iterable[dict[str, Any]]:
        """The batches that the method prepares itself from."""
        return self.get_train_dataloader()

    def _warn_of_parts(self) -> None:
        """Warn where terms that compare samples see those of one accumulated batch at a time."""
        steps, method = self.args.gradient_accumulation_steps, self.distiller.method
        weights = [method.weights(progress) for progress in (0.0, 1.0)]
        terms = [x for x in method.across_samples if any(each.get(x) for each in weights)]
        if steps > 1 and terms and self.is_world_process_zero():
            warnings.warn(
                f"gradient_accumulation_steps={steps}: {type(method).__name__} compares samples "
                f"({', '.join(terms)}), those of each accumulated batch by itself, another loss "
                "than that of the whole; pass a larger batch, or take Distiller.accumulate in "
                "a loop of your own",
                stacklevel=2,
            )

    def call_model_init(self, trial: Any = None) -> Distiller:
        """See ``transformers.Trainer.call_model_init``."""
        model = super().call_model_init(trial)
        if not isinstance(model, Distiller):
            raise TypeError(f"model_init must return a Distiller, got {type(model).__name__}")
        self._take(model)
        return model

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The distiller's loss in training, the student's own in evaluation."""
        if model is self.distiller.student:
            return super().compute_loss(model, inputs, return_outputs)
        self._set_progress()
        loss_scale = 1.0
        if num_items_in_batch is not None:
            # Trainer leaves the mean over accumulated batches to a loss that knows its items.
            batches = self.current_gradient_accumulation_steps
            shares = self.args.world_size if self.args.average_tokens_across_devices else 1
            inputs = {**inputs, "num_items": num_items_in_batch / (batches * shares)}
            loss_scale = 1 / batches
        output = model(**inputs)
        self._note(output.terms)
        loss = loss_scale * output.loss
        return (loss, output) if return_outputs else loss

    def _set_progress(self) -> None:
        self.distiller.set_progress(min(1.0, self.state.global_step / max(1, self.state.max_steps)))

    def _note(self, terms: dict[str, Tensor]) -> None:
        """Keep a batch's terms for the next log, as the batch of its step that Trainer takes."""
        share = 1 / getattr(self, "current_gradient_accumulation_steps", 1)
        for name, value in terms.items():
            total, count = self._logged.get(name, (0, 0))
            self._logged[name] = total + value * share, count + share

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        columns = getattr(dataset, "column_names", None) or ()
        name = next((x for x in (*self.label_names, "label") if x in columns), None)
        # Lists of labels, a token's each, have no place here, and may be all that a corpus holds.
        if name is not None and len(dataset) and np.ndim(dataset[0][name]) == 0:
            share = self.labelled_share
            order = LabelledOrder(has_label(dataset[name][:]), self._train_batch_size, share)
            if order.rows != len(dataset):
                seed = self.args.data_seed
                return _Drawn(order, self.args.seed if seed is None else seed)
        return super()._get_train_sampler(train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """See ``transformers.Trainer``; of the labels those are counted that the loss compares."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if items is not None:
            items = torch.stack([self._items(batch) for batch in batches]).sum()
            items = items.to(device)
            if self.args.average_tokens_across_devices and self.args.world_size > 1:
                items = self.accelerator.gather(items).sum()
        return batches, items

    def _items(self, batch: dict[str, Any]) -> Tensor:
        return self.distiller.count_items(batch)

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
        """Adds the terms' means over steps and processes since the last time to a training log."""
        if "loss" in logs and self._logged:
            names, sums = zip(*self._logged.items(), strict=True)
            self._logged = {}
            means = torch.stack([total / count for total, count in sums])
            means = self.accelerator.reduce(means, "mean").tolist()
            logs = {**logs, **dict(zip(names, means, strict=True))}
        super().log(logs, *args, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            # A wrapped student's own signature may say less, and a teacher may read more of the
            # student's inputs than the student does: token types above all.
            distiller = self.distiller
            teachers = [backbone.known_inputs for backbone in distiller.teachers.live]
            shared = set().union(distiller.student_model.known_inputs, *teachers)
            own = {f"teacher_{name}" for name in set().union(*teachers)}
            targets = {"label", "label_ids", *self.label_names}
            # trl's collator reads from seq_lengths where the documents of a packed row begin.
            packing = {"segments", "loss_weights", "student_spans", "teacher_spans", "seq_lengths"}
            # The key of a cached teacher's samples has their token types.
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
        with self._student_as_model():  # which Trainer saves with save_pretrained
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
        # Trainer asks its model which missing keys are tied weights.
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
        raise ValueError(f"{checkpoint} has no {name} to resume from")
    return torch.load(path, map_location="cpu")
