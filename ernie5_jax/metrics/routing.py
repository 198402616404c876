"""How evenly, and by whom, experts are used (ERNIE 5.0 section 6.4.1)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np


def normalized_entropy(counts: np.ndarray, experts: np.ndarray | None = None) -> np.ndarray:
    """Entropy of the expert load over that of a uniform one: NE = -sum_i p_i log p_i / log E.

    Args:
      counts: [..., E] tokens per expert, E >= 2, e.g. layers in front.
      experts: int [...], how many of the E there are, the first ones; None = all.

    Returns:
      float64 [...] in 0 ... 1; NaN where no token was routed or there is one expert only.
    """
    counts = _checked(counts)
    share = _share(counts)
    log_share = np.log(np.where(share > 0, share, 1))
    experts = np.asarray(counts.shape[-1] if experts is None else experts)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(experts > 1, -np.sum(share * log_share, axis=-1) / np.log(experts), np.nan)


def max_violation(counts: np.ndarray, experts: np.ndarray | None = None) -> np.ndarray:
    """Load of the busiest expert over the mean load, minus 1: 0 is perfect balance, E - 1 is collapse.

    Args:
      counts: [..., E] tokens per expert, E >= 2.
      experts: int [...], how many of the E there are, the first ones; None = all.

    Returns:
      float64 [...]; NaN where no token was routed.

    Source: arXiv:2408.15664, MaxVio.
    """
    counts = _checked(counts)
    return _share(counts).max(axis=-1) * (counts.shape[-1] if experts is None else experts) - 1


def top_experts(counts: np.ndarray, fraction: float = 0.25, experts: np.ndarray | None = None) -> np.ndarray:
    """bool [..., E]: the most used `fraction` of experts, halves rounded up, at least one, none that is never used; of
    equally used ones the lower index. `experts` as in `normalized_entropy`."""
    counts = _checked(counts)
    if not 0 < fraction <= 1:
        raise ValueError(f"argument 'fraction': found {fraction!r}, allowed: 0 < fraction <= 1")
    present = np.asarray(counts.shape[-1] if experts is None else experts)
    num = np.maximum(1, np.floor(fraction * present + 0.5))
    rank = np.argsort(np.argsort(-counts, axis=-1, kind="stable"), axis=-1)
    return (rank < num[..., None]) & (counts > 0)


def expert_iou(
    first: np.ndarray, second: np.ndarray, fraction: float = 0.25, experts: np.ndarray | None = None
) -> np.ndarray:
    """Intersection over union of the `top_experts` of two loads.

    Args:
      first: [..., E] tokens per expert, e.g. of one modality.
      second: [..., E].
      fraction: Share of experts that count as top.
      experts: As in `normalized_entropy`.

    Returns:
      float64 [...] in 0 ... 1; NaN where one of the two routed no token.
    """
    a, b = (top_experts(counts, fraction, experts) for counts in (first, second))
    routed = a.any(-1) & b.any(-1)
    return np.where(routed, np.sum(a & b, axis=-1) / np.maximum(np.sum(a | b, axis=-1), 1), np.nan)


def pairwise_expert_iou(
    counts: Mapping[str, np.ndarray], fraction: float = 0.25, experts: np.ndarray | None = None
) -> dict[tuple[str, str], np.ndarray]:
    """`expert_iou` of every two of the named loads [..., E], in the order of `counts`."""
    pairs = itertools.combinations(counts, 2)
    return {(a, b): expert_iou(counts[a], counts[b], fraction, experts) for a, b in pairs}


def _checked(counts: np.ndarray) -> np.ndarray:
    counts = np.asarray(counts, np.float64)
    if counts.ndim == 0 or counts.shape[-1] < 2:
        raise ValueError(f"argument 'counts': found shape {counts.shape}, allowed: [..., E] with E >= 2")
    return counts


def _share(counts: np.ndarray) -> np.ndarray:
    total = counts.sum(axis=-1, keepdims=True)
    return np.where(total > 0, counts / np.where(total > 0, total, 1), np.nan)
