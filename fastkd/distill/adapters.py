"""Self-distillation of a PEFT model: the teacher is its base model without the adapters."""

from typing import Any

from torch import nn

from fastkd.analysis.model_inputs import in_eval_mode


class AdaptersOff(nn.Module):
    """The base model of a PEFT ``student``, run in eval mode with the adapters disabled.

    It has no parameters of its own; it uses the student's.
    """

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.__dict__["student"] = student  # as a submodule it would get this one's mode

    def get_base_model(self) -> nn.Module:
        """See ``peft.PeftModel``."""
        base: nn.Module = self.__dict__["student"].get_base_model()
        return base

    def forward(self, **inputs: Any) -> Any:
        """The base model's output."""
        student = self.__dict__["student"]
        learns = [(p, p.requires_grad) for p in student.parameters()]
        try:
            with in_eval_mode(student), student.disable_adapter():
                return student.get_base_model()(**inputs)
        finally:
            for parameter, flag in learns:  # PEFT sets requires_grad of every active adapter
                parameter.requires_grad_(flag)


def as_teacher(teacher: Any, student: Any) -> Any:
    """The teacher; `AdaptersOff` if it is the base model of the student's adapters.

    Raises:
        ValueError: the student trains parameters of that model.
    """
    own = hasattr(student, "disable_adapter") and hasattr(student, "get_base_model")
    if not own or student.get_base_model() is not teacher:
        return teacher
    # PEFT includes the adapter's name in the names of its parameters.
    learns = [
        name
        for name, parameter in student.named_parameters()
        if parameter.requires_grad and student.peft_config.keys().isdisjoint(name.split("."))
    ]
    if learns:
        raise ValueError(
            f"the student trains parameters of its base, {learns[0]} for one, and its base is the "
            "teacher, which would change with it; freeze them, name them in modules_to_save, or "
            "let a copy of the base teach"
        )
    return AdaptersOff(student)
