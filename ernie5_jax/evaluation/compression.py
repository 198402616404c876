"""Text compression figures that bits per byte of a language model are read against."""

from __future__ import annotations

import zlib

import numpy as np

from ernie5_jax.evaluation.errors import EvaluationError


def order0_bits_per_byte(data: bytes) -> float:
    """Entropy of the byte frequencies of `data` (an order-0 model that knows them beforehand)."""
    _check(data)
    counts = np.bincount(np.frombuffer(data, np.uint8))
    p = counts[counts > 0] / len(data)
    return float(-(p * np.log2(p)).sum())


def zlib_bits_per_byte(data: bytes) -> float:
    """Bits per byte of `zlib` at its highest level over all of `data` at once."""
    _check(data)
    return 8 * len(zlib.compress(data, 9)) / len(data)


def _check(data: bytes) -> None:
    if not data:
        raise EvaluationError("text: found no held-out bytes, allowed: at least one byte")
