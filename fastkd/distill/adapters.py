"""Self-distillation of a model with PEFT adapters: its base, without them, is the teacher."""

from typing import Any

from torch import nn

from fastkd.analysis.model_inputs import in_eval_mode


class AdaptersOff(nn.Module):
    """The base model of a PEFT ``student``, in eval mode and without its adapters while it runs.

    It holds no parameters of its own: they are the student's.
    """

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.__dict__["student"] = student  # not a part, whose mode and state would be its own

    def get_base_model(self) -> nn.Module:
        """See ``peft.PeftModel``."""
        base: nn.Module = self.__dict__["student"].get_base_model()
        return base

    def forward(self, **inputs: Any) -> Any:
        """The base model's own result."""
        student = self.__dict__["student"]
        learns = [(p, p.requires_grad) for p in student.parameters()]
        try:
            with in_eval_mode(student), student.disable_adapter():
                return student.get_base_model()(**inputs)
        finally:
            for parameter, flag in learns:  # PEFT lets every active adapter learn again
                parameter.requires_grad_(flag)


def as_teacher(teacher: Any, student: Any) -> Any:
    """The teacher; `AdaptersOff` where it is the model that the student's adapters are in.

    Raises:
        ValueError: the student trains parameters of that model.
    """
    own = hasattr(student, "disable_adapter") and hasattr(student, "get_base_model")
    if not own or student.get_base_model() is not teacher:
        return teacher
    # PEFT puts the name of an adapter into that of each of its parameters.
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
