"""Benchmarks of every loss, for pytest-benchmark: ``pytest bench``."""
