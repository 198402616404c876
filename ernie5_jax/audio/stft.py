"""Short-time Fourier transform, its inverse by overlap-add, and Griffin-Lim phase reconstruction.

A waveform of T * hop samples has exactly T spectral frames; frame i is centred on samples [i * hop, (i + 1) * hop).
What lies outside the waveform is silence.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.cache
def hann_window(fft_size: int) -> np.ndarray:
    """Periodic Hann window, float32 [fft_size]."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft_size) / fft_size)).astype(np.float32)


def stft(waves: jax.Array, fft_size: int, hop_length: int) -> jax.Array:
    """float32 [..., T * hop] -> complex64 [..., T, fft_size // 2 + 1].

    Scaled so that a sine of amplitude 1 at the centre of a bin has magnitude 1.
    """
    count = waves.shape[-1] // hop_length
    before = (fft_size - hop_length) // 2
    strips = -(-fft_size // hop_length)  # hops that one window touches
    after = (count + strips - 1) * hop_length - count * hop_length - before
    padded = jnp.pad(waves, [(0, 0)] * (waves.ndim - 1) + [(before, after)])
    hops = padded.reshape(*waves.shape[:-1], count + strips - 1, hop_length)
    frames = jnp.concatenate([hops[..., i : i + count, :] for i in range(strips)], axis=-1)[..., :fft_size]
    window = hann_window(fft_size)
    return jnp.fft.rfft(frames * window, axis=-1) * (2 / window.sum())


def istft(spectrum: jax.Array, fft_size: int, hop_length: int) -> jax.Array:
    """Least-squares inverse of `stft` (Griffin & Lim 1984): complex64 [..., T, bins] -> float32 [..., T * hop]."""
    window = hann_window(fft_size)
    frames = jnp.fft.irfft(spectrum * (window.sum() / 2), n=fft_size, axis=-1) * window
    count = spectrum.shape[-2]
    weights = _overlap_add(jnp.broadcast_to(window**2, (count, fft_size)), hop_length)
    return _overlap_add(frames, hop_length) / jnp.maximum(weights, 1e-3)


def _overlap_add(frames: jax.Array, hop_length: int) -> jax.Array:
    """[..., T, fft_size] -> [..., T * hop], the samples that `stft` had padded cut off."""
    count, fft_size = frames.shape[-2:]
    strips = -(-fft_size // hop_length)
    lead = frames.shape[:-2]
    frames = jnp.pad(frames, [(0, 0)] * (frames.ndim - 1) + [(0, strips * hop_length - fft_size)])
    parts = frames.reshape(*lead, count, strips, hop_length)
    total = jnp.zeros((*lead, count + strips - 1, hop_length), frames.dtype)
    for i in range(strips):  # a sum of shifted slices: no scatter
        total = total.at[..., i : i + count, :].add(parts[..., i, :])
    before = (fft_size - hop_length) // 2
    return total.reshape(*lead, -1)[..., before : before + count * hop_length]


def log_magnitude(waves: jax.Array, fft_size: int, hop_length: int, floor: float) -> jax.Array:
    """log(max(|stft|, floor)): float32 [..., T * hop] -> float32 [..., T, bins]."""
    return jnp.log(jnp.maximum(jnp.abs(stft(waves, fft_size, hop_length)), floor))


def griffin_lim(magnitude: jax.Array, fft_size: int, hop_length: int, iterations: int, momentum: float) -> jax.Array:
    """A waveform whose spectrogram is close to `magnitude` (fast Griffin-Lim, Perraudin et al. 2013).

    Args:
      magnitude: [..., T, bins], scaled like `stft`.
      fft_size, hop_length: Samples.
      iterations: Fixed number of projections.
      momentum: 0 is the classic algorithm; below 1.

    Returns:
      float32 [..., T * hop]. Deterministic: the first phase is drawn from a fixed key.
    """
    # The same start for every clip of a batch, so that a clip's waveform does not depend on its neighbours.
    angle = jax.random.uniform(jax.random.key(0), magnitude.shape[-2:], maxval=2 * jnp.pi)
    start = magnitude * jnp.exp(1j * angle)

    def project(carry, _):
        spectrum, previous = carry
        rebuilt = stft(istft(spectrum, fft_size, hop_length), fft_size, hop_length)
        ahead = rebuilt + momentum * (rebuilt - previous)
        power = ahead.real**2 + ahead.imag**2  # jnp.abs guards against overflow, at a third of the time
        return (ahead * (magnitude * lax.rsqrt(jnp.maximum(power, 1e-16))), rebuilt), None

    (spectrum, _), _ = lax.scan(project, (start, start), length=iterations)
    return istft(spectrum, fft_size, hop_length)
