"""Loss weights of the scales of a picture (components 1.6.5)."""

from __future__ import annotations

import functools

import numpy as np

from ernie5_jax.sequence.positions import Scales


def scale_weights(scales: Scales, alpha: float, cap: float = 40.0) -> np.ndarray:
    """Weight of each scale's *mean* loss, float64 [K], sum 1.

    Proportional to n_k * min(cap, (n_K / n_k)^(1 / (1 + alpha))) (InfinityStar; alpha = 1 is Infinity's square root).
    """
    cells = np.asarray([h * w for h, w in scales], np.float64)
    weight = cells * np.minimum(cap, (cells[-1] / cells) ** (1 / (1 + alpha)))
    return weight / weight.sum()


@functools.lru_cache(maxsize=64)
def scale_token_weights(scales: Scales, alpha: float, cap: float = 40.0) -> tuple[float, ...]:
    """Weight of one token of each scale; the same rule, spread so that the mean over a frame's tokens is 1."""
    cells = np.asarray([h * w for h, w in scales], np.float64)
    return tuple((scale_weights(scales, alpha, cap) / cells * cells.sum()).tolist())
