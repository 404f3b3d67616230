"""Distillation losses of five papers as fused, exact, drop-in PyTorch functions."""

__version__ = "0.1.0"
