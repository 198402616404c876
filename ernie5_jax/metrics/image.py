"""Distance between pictures."""

from __future__ import annotations

import numpy as np


def psnr(images: np.ndarray, references: np.ndarray, data_range: float = 1.0) -> np.ndarray:
    """Peak signal-to-noise ratio of every image; report the mean over images, not the ratio of a mean error.

    Args:
      images: [N, ...] any layout; clipped to [0, data_range].
      references: [N, ...] in [0, data_range].
      data_range: 1 for floats, 255 for uint8.

    Returns:
      float64 [N] decibels, inf for equal images.

    Raises:
      ValueError: Shapes differ.
    """
    if np.shape(images) != np.shape(references):
        raise ValueError(f"argument 'images': found shape {np.shape(images)}, allowed: {np.shape(references)}")
    difference = np.clip(np.asarray(images, np.float64), 0, data_range) - np.asarray(references, np.float64)
    error = np.mean(difference**2, axis=tuple(range(1, difference.ndim)))
    with np.errstate(divide="ignore"):
        return 10 * np.log10(data_range**2 / error)
