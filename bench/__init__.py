"""Benchmarks: one file per loss says what is measured, `harness` says how.

``fastkd bench`` runs them: the package carries this folder as ``fastkd.bench``.
"""
