"""What the rest of the library expects of a visual tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np


class VisualTokenizer(Protocol):
    """Pixels <-> latents. Images are one-frame videos."""

    @property
    def bits(self) -> int:
        """C, latent channels."""
        ...

    @property
    def scales(self) -> tuple[tuple[int, int], ...]:
        """(h_k, w_k) of every scale, the last is the latent grid."""
        ...

    @property
    def temporal_stride(self) -> int: ...

    @property
    def spatial_stride(self) -> int: ...

    @property
    def feature_dim(self) -> int:
        """D of the pre-quantiser features."""
        ...

    def encode(self, video: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [B, T, H, W, 3] -> latents float32 [B, t, h, w, C], features [B, t, h, w, D].

        T = 1 mod temporal stride, t = 1 + (T - 1) / temporal stride. Raises ValueError naming T when it does not fit.
        """
        ...

    def decode(self, quantized: np.ndarray) -> np.ndarray:
        """Quantised latents float32 [B, t, h, w, C] -> uint8 [B, T, H, W, 3]."""
        ...

    def fingerprint(self) -> str: ...

    def save(self, folder: Path) -> None: ...
