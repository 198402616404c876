"""How varied generated pictures are, and whether they copy training pictures.

Distances are root mean squares over all pixels and channels, pixels in 0 ... 1.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from ernie5_jax.evaluation.errors import EvaluationError


def rms_distances(a: UInt8[np.ndarray, "n h w c"], b: UInt8[np.ndarray, "m h w c"]) -> Float[np.ndarray, "n m"]:
    """Pairwise pixel RMS distances between two sets of pictures, float64 [n, m] in 0 ... 1."""
    if a.shape[1:] != b.shape[1:]:
        raise EvaluationError(f"pictures: found sizes {a.shape[1:]} and {b.shape[1:]}, allowed: equal sizes")
    x = a.reshape(len(a), -1).astype(np.float64) / 255
    y = b.reshape(len(b), -1).astype(np.float64) / 255
    squared = (x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * x @ y.T
    return np.sqrt(np.maximum(squared, 0) / x.shape[1])


def within_class_distance(images: UInt8[np.ndarray, "n h w c"], labels: np.ndarray) -> float:
    """Mean over classes of the mean distance between two different pictures of that class."""
    means = []
    for label in np.unique(labels):
        members = images[labels == label]
        if len(members) > 1:
            means.append(rms_distances(members, members)[np.triu_indices(len(members), 1)].mean())
    if not means:
        raise EvaluationError("variety: found at most one picture per class, allowed: a class with two or more")
    return float(np.mean(means))


def same_class_counts(labels: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Indices into `pool` whose classes occur as often as in `labels` (all there are, where `pool` has fewer)."""
    chosen = [np.flatnonzero(pool == label)[: int((labels == label).sum())] for label in np.unique(labels)]
    return np.concatenate(chosen)


def image_variety(
    samples: UInt8[np.ndarray, "n h w c"],
    sample_labels: np.ndarray,
    real: UInt8[np.ndarray, "m h w c"],
    real_labels: np.ndarray,
) -> float:
    """Within-class distance of samples over that of real pictures, with the same class counts.

    Args:
      samples: Generated pictures; `sample_labels` is the class each was asked for.
      real: Real pictures after a tokenizer round trip, so that its smoothing cancels; first ones are used first.
    """
    chosen = same_class_counts(sample_labels, real_labels)
    return within_class_distance(samples, sample_labels) / within_class_distance(real[chosen], real_labels[chosen])


def near_duplicates(
    samples: UInt8[np.ndarray, "n h w c"],
    training: UInt8[np.ndarray, "t h w c"],
    held_out: UInt8[np.ndarray, "m h w c"],
    percentile: float = 1.0,
) -> float:
    """Share of generated pictures that lie suspiciously near to a training picture.

    Suspicious is nearer than the `percentile` of the same distance (to the nearest training picture) over held-out
    pictures after a tokenizer round trip.
    """
    threshold = np.percentile(rms_distances(held_out, training).min(1), percentile)
    return float((rms_distances(samples, training).min(1) < threshold).mean())
