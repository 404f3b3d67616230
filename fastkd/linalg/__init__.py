"""Symmetric matrix square roots, canonical correlation and Cayley transforms."""
