"""Losses on a language model's predictions: soft targets, labels, LM heads, vocabularies."""
