"""Transformers models as fastkd reads them: blocks, outputs, heads, smaller students."""
