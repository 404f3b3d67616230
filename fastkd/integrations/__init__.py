"""Losses in the protocols of other libraries, and readers of inference servers' outputs."""
