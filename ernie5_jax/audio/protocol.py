"""What the rest of the library expects of an audio tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np


class AudioTokenizer(Protocol):
    """Waveform <-> codec frames."""

    @property
    def sample_rate(self) -> int: ...

    @property
    def samples_per_frame(self) -> int: ...

    @property
    def levels(self) -> int:
        """Q, codec levels."""
        ...

    @property
    def bins(self) -> int: ...

    def encode(self, waves: list[np.ndarray]) -> list[np.ndarray]:
        """float32 [samples_i] in [-1, 1] each -> int32 [frames_i, Q], frames = ceil(samples / samples_per_frame).

        The waveform is padded, never the features; a batch gives the same codes as one clip alone.
        """
        ...

    def features(self, waves: list[np.ndarray]) -> list[np.ndarray]:
        """Encoder output before quantisation, float32 [frames_i, D]."""
        ...

    def decode(self, codes: list[np.ndarray]) -> list[np.ndarray]:
        """int32 [frames_i, Q] each -> float32 [frames_i * samples_per_frame]."""
        ...

    def fingerprint(self) -> str: ...

    def save(self, folder: Path) -> None: ...
