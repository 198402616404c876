"""Log-mel features of the speech judge (numpy; the codec has its own features, a judge must not share them)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

FFT_SECONDS = 0.032
HOP_SECONDS = 0.010
MELS = 40
FLOOR = -8.0
"""Nats below the loudest mel band of a clip that count as silence."""


def mel_filters(sample_rate: int, fft_size: int, mels: int = MELS) -> Float[np.ndarray, "mels bins"]:
    """Triangular filters, equally spaced on the mel scale (2595 log10(1 + f/700)) from 60 Hz to the Nyquist rate."""
    to_mel = lambda f: 2595 * np.log10(1 + np.asarray(f) / 700)  # noqa: E731
    edges = 700 * (10 ** (np.linspace(to_mel(60.0), to_mel(sample_rate / 2), mels + 2) / 2595) - 1)
    frequencies = np.fft.rfftfreq(fft_size, 1 / sample_rate)[None]
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (frequencies - low) / (centre - low)
    falling = (high - frequencies) / (high - centre)
    filters = np.maximum(0, np.minimum(rising, falling))
    # At low sample rates a narrow filter may fall between two bins: give it the nearest one.
    for i in np.flatnonzero(filters.sum(1) == 0):
        filters[i, np.abs(frequencies[0] - centre[i, 0]).argmin()] = 1
    return filters


def log_mel(waves: list[np.ndarray], sample_rate: int, frames: int) -> Float[np.ndarray, "n frames mels"]:
    """Log-mel pictures relative to the loudest point of each clip, scaled to about -1 ... 1.

    Args:
      waves: float32 [samples_i] each.
      sample_rate: Hz.
      frames: Clips are padded with silence or cut to this many frames of 10 ms.
    """
    fft_size, hop = round(FFT_SECONDS * sample_rate), round(HOP_SECONDS * sample_rate)
    filters = mel_filters(sample_rate, fft_size).T
    window = np.hanning(fft_size)
    samples = fft_size + (frames - 1) * hop
    starts = np.arange(frames)[:, None] * hop + np.arange(fft_size)[None]
    pictures = np.empty((len(waves), frames, MELS), np.float32)
    for i, wave in enumerate(waves):
        padded = np.zeros(samples)
        padded[: min(len(wave), samples)] = wave[:samples]
        power = np.abs(np.fft.rfft(padded[starts] * window)) ** 2
        mel = np.log(power @ filters + 1e-10)
        pictures[i] = np.maximum(mel - mel.max(), FLOOR) / (-FLOOR / 2) + 1
    return pictures
