"""Checkpoints of other libraries."""

from ernie5_jax.interop.ernie4_5 import InteropError, from_ernie4_5

__all__ = ["InteropError", "from_ernie4_5"]
