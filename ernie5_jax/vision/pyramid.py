"""Scale pyramid of bitwise codes: one set of fixed matrices for tokenizer, training input and decode loop.

Follows the multi-scale residual quantiser of VAR / Infinity / VideoAR with binary spherical codes: per frame and per
scale k, r = D_k(F - acc), bits = r > 0, acc += U_k(code(bits)), D = area (adaptive average), U = linear without
antialiasing. `jax.image.resize` offers neither, so both are matrices. All functions take numpy or JAX arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ernie5_jax.config import SelfCorrectionConfig
from ernie5_jax.vision.errors import VisionError


def area_matrix(size: int, target: int) -> np.ndarray:
    """Adaptive average pooling, float32 [target, size]: row i covers columns floor(i n / m) ... ceil((i + 1) n / m)."""
    matrix = np.zeros((target, size), np.float32)
    for i in range(target):
        start, stop = i * size // target, -(-(i + 1) * size // target)
        matrix[i, start:stop] = 1 / (stop - start)
    return matrix


def linear_matrix(size: int, target: int) -> np.ndarray:
    """Linear interpolation between cell centres (no antialiasing, edges clamped) as a float32 [target, size] matrix."""
    matrix = np.zeros((target, size), np.float32)
    for i in range(target):
        position = min(max((i + 0.5) * size / target - 0.5, 0.0), size - 1.0)
        lower = min(int(position), max(size - 2, 0))
        matrix[i, lower] += 1 - (position - lower)
        if size > 1:
            matrix[i, lower + 1] += position - lower
    return matrix


@dataclasses.dataclass(frozen=True)
class TeacherForcing:
    """What next-scale prediction learns from t frames; P = tokens of a frame, scales concatenated coarse to fine.

    Attributes:
      bits: int8 [t, P, C], targets: unflipped bits of the residual against the (flipped) accumulation.
      inputs: float32 [t, P, C], D_k(acc_{k-1}) of every scale; zeros for the first.
      summary: float32 [t, h_1 * w_1, C], all scales brought to the first grid (the SS token).
      quantized: float32 [t, h, w, C], the final accumulation.
    """

    bits: np.ndarray
    inputs: np.ndarray
    summary: np.ndarray
    quantized: np.ndarray


def _namespace(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import jax.numpy as jnp  # only arrays of JAX need it; data workers stay free of it

    return jnp


def _at_least_float32(array: Any) -> Any:
    return array.astype(np.promote_types(array.dtype, np.float32))


class ScalePyramid:
    """Residual bitwise quantisation over `scales`.

    Args:
      scales: (h_k, w_k) from coarse to fine; the last is the latent grid.
      bits: C, latent channels = bits of one code.

    Attributes:
      counts: Tokens of each scale.

    Raises:
      VisionError: Scales that do not grow, or no bits.
    """

    def __init__(self, scales: Sequence[tuple[int, int]], bits: int):
        self.scales = tuple((int(h), int(w)) for h, w in scales)
        self.bits = int(bits)
        growing = all(a[0] <= b[0] and a[1] <= b[1] for a, b in zip(self.scales, self.scales[1:], strict=False))
        if not self.scales or min(min(scale) for scale in self.scales) < 1 or not growing or bits < 1:
            raise VisionError(
                f"scale pyramid: found scales {self.scales}, bits {bits}, allowed: growing sizes, bits >= 1"
            )
        self.counts = tuple(h * w for h, w in self.scales)
        h, w = self.scales[-1]
        self._down = tuple((area_matrix(h, a), area_matrix(w, b)) for a, b in self.scales)
        self._up = tuple((linear_matrix(a, h), linear_matrix(b, w)) for a, b in self.scales)

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w) of the latent grid."""
        return self.scales[-1]

    @property
    def tokens(self) -> int:
        """P, tokens of one frame over all scales."""
        return sum(self.counts)

    def down(self, latents: Any, k: int) -> Any:
        """D_k: [..., h, w, C] -> [..., h_k, w_k, C] by area."""
        return latents if self.scales[k] == self.grid else _resample(latents, *self._down[k])

    def up(self, values: Any, k: int) -> Any:
        """U_k: [..., h_k, w_k, C] -> [..., h, w, C], linear."""
        return values if self.scales[k] == self.grid else _resample(values, *self._up[k])

    def codes(self, bits: Any, dtype: Any = np.float32) -> Any:
        """0/1 -> -+1 / sqrt(C), unit vectors."""
        return (bits.astype(dtype) * 2 - 1) * (1 / math.sqrt(self.bits))

    def accumulate(self, acc: Any, bits_k: Any, k: int) -> Any:
        """acc + U_k(code(bits_k)); acc [..., h, w, C], bits_k [..., h_k, w_k, C]. Start from zeros for each frame."""
        return acc + self.up(self.codes(bits_k, acc.dtype), k)

    def next_input(self, acc: Any, k: int) -> Any:
        """Input features [..., h_k, w_k, C] of scale k, given the accumulation of all scales before it."""
        return self.down(acc, k)

    def summary(self, acc: Any) -> Any:
        """The SS token: the whole accumulation on the first grid, [..., h_1, w_1, C]."""
        return self.down(acc, 0)

    def quantize(self, latents: Any) -> list[Any]:
        """Bits of every scale: [..., h, w, C] -> int8 [..., h_k, w_k, C]. A residual of exactly 0 gives bit 0."""
        return self._encode(latents, None)[0]

    def dequantize(self, bits: Sequence[Any]) -> Any:
        """Sum of the codes of all scales, float32 [..., h, w, C]."""
        acc = self.up(self.codes(bits[0]), 0)
        for k in range(1, len(self.scales)):
            acc = self.accumulate(acc, bits[k], k)
        return acc

    def flatten(self, values: Sequence[Any]) -> Any:
        """Per scale [..., h_k, w_k, C] -> [..., P, C]."""
        flat = [v.reshape(*v.shape[:-3], n, v.shape[-1]) for v, n in zip(values, self.counts, strict=True)]
        return _namespace(flat[0]).concatenate(flat, axis=-2)

    def split(self, flat: Any) -> list[Any]:
        """[..., P, C] -> per scale [..., h_k, w_k, C]."""
        return _split(flat, self.scales)

    def teacher_forcing(
        self,
        latents: Any,
        flips: SelfCorrectionConfig | Sequence[Any] | None = None,
        rng: np.random.Generator | None = None,
    ) -> TeacherForcing:
        """Targets and inputs of next-scale prediction for t frames.

        Flipped bits feed the accumulation, hence all later inputs and the summary; the target of a scale is the
        unflipped bits of the residual against that accumulation (Infinity's bitwise self-correction). The last scale
        is never flipped.

        Args:
          latents: [t, h, w, C] before quantisation.
          flips: None; a `SelfCorrectionConfig`, drawn with `rng`; or bool per scale but the last [t, h_k, w_k, C]
            (an entry for the last scale is refused).
          rng: Needed with a `SelfCorrectionConfig`.

        Raises:
          VisionError: A grid, channel count or number of flips that does not fit.
        """
        if isinstance(flips, SelfCorrectionConfig):
            if rng is None:
                raise VisionError("argument 'rng': found None, allowed: a numpy Generator when flips are drawn")
            flips = self.sample_flips(latents.shape[0], flips, rng)
        if flips is not None and len(flips) != len(self.scales) - 1:
            raise VisionError(
                f"argument 'flips': found {len(flips)}, allowed: {len(self.scales) - 1}, all but the last"
            )
        bits, inputs, acc = self._encode(latents, flips)
        frames = latents.shape[0]
        summary = self.summary(acc).reshape(frames, self.counts[0], self.bits)
        return TeacherForcing(self.flatten(bits), self.flatten(inputs), summary, acc)

    def forcing_of_bits(self, bits: Any) -> TeacherForcing:
        """What next-scale prediction learns from already quantised frames, bits int8 [t, P, C]."""
        acc = _namespace(bits).zeros((bits.shape[0], *self.grid, self.bits), np.float32)
        inputs = []
        for k, grid in enumerate(self.split(bits)):
            inputs.append(self.next_input(acc, k))
            acc = self.accumulate(acc, grid, k)
        summary = self.summary(acc).reshape(bits.shape[0], self.counts[0], self.bits)
        return TeacherForcing(bits, self.flatten(inputs), summary, acc)

    def sample_flips(self, frames: int, config: SelfCorrectionConfig, rng: np.random.Generator) -> list[np.ndarray]:
        """Bits to flip, bool [t, h_k, w_k, C] for every scale but the last (VideoAR eq. 8).

        p of frame y ~ U(flip_min + frame_delta y, flip_max + frame_delta y), the first scale of a later frame
        ~ U(last p of the frame before, flip_max + frame_delta y).
        """
        probability = flip_probabilities(frames, len(self.scales) - 1, config, rng)
        if len(self.scales) == 1:
            return []
        counts = self.counts[:-1]
        flips = rng.random((frames, sum(counts), self.bits), np.float32) < np.repeat(probability, counts, 1)[..., None]
        return _split(flips, self.scales[:-1])

    def _encode(self, latents: Any, flips: Sequence[Any] | None) -> tuple[list[Any], list[Any], Any]:
        """Target bits and inputs of every scale, and the final accumulation."""
        if latents.shape[-3:] != (*self.grid, self.bits):
            raise VisionError(f"latents: found shape {tuple(latents.shape)}, allowed: (..., {self.grid}, {self.bits})")
        xp = _namespace(latents)
        latents = _at_least_float32(latents)
        acc = xp.zeros_like(latents)
        bits, inputs = [], []
        for k in range(len(self.scales)):
            inputs.append(self.next_input(acc, k))
            target = (self.down(latents, k) - inputs[k]) > 0
            bits.append(target.astype(np.int8))
            sent = target if flips is None or k == len(self.scales) - 1 else target ^ flips[k]
            acc = self.accumulate(acc, sent, k)
        return bits, inputs, acc


def flip_probabilities(frames: int, scales: int, config: SelfCorrectionConfig, rng: np.random.Generator) -> np.ndarray:
    """p of every frame and scale, float32 [t, scales]; see `ScalePyramid.sample_flips`."""
    uniform = rng.random((frames, scales)).tolist()  # few numbers: plain Python beats numpy here
    rows: list[list[float]] = []
    for y, row in enumerate(uniform):
        lower, upper = (min(max(p + config.frame_delta * y, 0.0), 1.0) for p in (config.flip_min, config.flip_max))
        starts = [rows[-1][-1] if y and k == 0 else lower for k in range(scales)]
        rows.append([start + (upper - start) * u for start, u in zip(starts, row, strict=True)])
    return np.array(rows, np.float32).reshape(frames, scales)


def _split(flat: Any, scales: Sequence[tuple[int, int]]) -> list[Any]:
    parts, start = [], 0
    for h, w in scales:
        part = flat[..., start : start + h * w, :]
        parts.append(part.reshape(*flat.shape[:-2], h, w, flat.shape[-1]))
        start += h * w
    return parts


def _resample(values: Any, rows: np.ndarray, columns: np.ndarray) -> Any:
    """Applies [h', h] and [w', w] to the grid axes of [..., h, w, C]."""
    *lead, h, w, channels = values.shape
    if isinstance(values, np.ndarray):
        out = np.matmul(rows, values.reshape(*lead, h, w * channels))
        return np.matmul(columns, out.reshape(*lead, rows.shape[0], w, channels))
    import jax
    import jax.numpy as jnp

    # Full precision: a rounded residual would change bits between tokenizer and decode loop.
    highest = jax.lax.Precision.HIGHEST
    out = jnp.matmul(rows.astype(values.dtype), values.reshape(*lead, h, w * channels), precision=highest)
    out = out.reshape(*lead, rows.shape[0], w, channels)
    return jnp.matmul(columns.astype(values.dtype), out, precision=highest)
