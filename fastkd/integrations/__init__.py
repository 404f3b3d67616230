"""Losses in the protocols of other libraries, and readers of inference servers' outputs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastkd.integrations.served_teacher import ServedTeacher

__all__ = ["ServedTeacher"]


def __getattr__(name: str) -> Any:
    # The readers need neither httpx nor a Distiller.
    if name == "ServedTeacher":
        from fastkd.integrations.served_teacher import ServedTeacher

        return ServedTeacher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
