"""Warnings that point at the caller's line."""

import sys
import warnings

import torch

LIBRARIES = ("fastkd", "torch")


def warn_caller(message: str) -> None:
    """Warn at the nearest calling line outside of fastkd and of torch, which calls Modules."""
    if torch.compiler.is_compiling():  # Dynamo reads no frames
        warnings.warn(message, stacklevel=2)
        return
    level = 2
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
