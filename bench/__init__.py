"""Benchmarks: one file per loss says what is measured, `harness` says how.

Run from the repository as ``python -m bench`` or ``make bench``, and anywhere as ``fastkd bench``
(the package carries this folder as ``fastkd.bench``).
"""
