"""The teacher's fine-tuning: its rows and options, and the time of a run before it."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastkd.distill.distiller import Distiller
from fastkd.distill.methods import Labels
from fastkd.train.arguments import steps_of
from fastkd.train.loading import encode
from fastkd.train.progress import clock
from fastkd.train.scoring import Run


class NoTeacher(nn.Module):
    """Stand-in for the teacher of a model that learns from labels alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        vars(self)["model"] = model  # not a submodule, whose parameters would be frozen

    def get_base_model(self) -> nn.Module:
        """The model whose sizes the method reads; see ``peft.PeftModel``."""
        base: nn.Module = vars(self)["model"]
        return base


def tuning_of(run: Run, max_length: int) -> Run:
    """The training of the teacher, on its own tokens."""
    config, data, sets = run.config, run.data, run.sets
    config = dataclasses.replace(
        config,
        num_train_epochs=config.finetune_teacher,
        training_steps=None,
        learning_rate=config.teacher_learning_rate,
    )
    if data.teacher_tokenizer is not None:
        data = dataclasses.replace(
            data, tokenizer=data.teacher_tokenizer, teacher_tokenizer=None, match=None
        )
        sets = encode(config, data, max_length)
    return dataclasses.replace(run, config=config, data=data, sets=sets)


def say_estimate(run: Run, tuning: Run, models: Mapping[str, Any]) -> None:
    """Print the time of the teacher's ``tuning`` and of the ``run``, before both.

    Teacher and student learn a batch from labels twice. The second pass is timed: the first also
    allocates memory. Random numbers and what learns stay as they are.
    """
    size = run.computation.batch_size
    teacher_steps = steps_of(tuning.config, size, len(tuning.sets.teacher))[0]
    student_steps = steps_of(run.config, size, len(run.sets.all))[0]
    seconds = {}
    for who, each in (("teacher", tuning), ("student", run)):
        model = models[who].to(run.computation.device)
        learned = {name for name, x in model.named_parameters() if x.requires_grad}
        training = model.training
        untaught: Any = NoTeacher(model.requires_grad_(True))
        seconds[who] = _seconds(each, Distiller(untaught, model, Labels()))
        model.zero_grad(set_to_none=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learned)
        model.train(training)
    # A step of distillation also runs the teacher forward, a third of the teacher's own step.
    of_student = student_steps * (seconds["student"] + seconds["teacher"] / 3)
    run.display.say(
        f"about {clock(teacher_steps * seconds['teacher'])} for {teacher_steps} steps of the "
        f"teacher and {clock(of_student)} for {student_steps} of the student, by one batch of each"
    )


def _seconds(run: Run, distiller: Distiller) -> float:
    """Seconds of a step without the optimizer."""
    device, size, sets = run.computation.device, run.computation.batch_size, run.sets
    distiller.to(device).train()
    seconds = 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        batch = next(sets.teacher.batches(sets.collate, size, device=device))
        own = {k: x for k, x in batch.items() if not k.startswith("teacher_")}
        own.pop("student_spans", None)
        for _ in range(2):
            began = time.perf_counter()
            with run.computation.autocast():
                loss = distiller(**own).loss
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
    return seconds
