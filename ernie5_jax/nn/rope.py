"""Uni-RoPE: rotary positions over (t, h, w) (ERNIE 5.0 section 2.2.3; frequencies as in ERNIE 4.5 VL)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.nn.norm import at_least_float32


def axis_of_pair(pairs: int) -> np.ndarray:
    """int [pairs], which of (t, h, w) = (0, 1, 2) turns each rotary pair.

    The first 2 * floor(11 * pairs / 32) pairs (the high frequencies) alternate h, w; the rest belong to t. 64 pairs
    give ERNIE 4.5 VL's section [22, 22, 20].
    """
    spatial = 2 * (11 * pairs // 32)
    index = np.arange(pairs)
    return np.where(index < spatial, 1 + index % 2, 0)


def uni_rope(position: jax.Array, head_dim: int, base: float, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every rotary pair.

    Args:
      position: [..., 3] coordinates (t, h, w), fractional ones allowed.
      head_dim: H, even.
      base: Pair i turns by base^(-2 i / H) per unit.
      dtype: At least float32.

    Returns:
      Two arrays [..., H / 2]. With t = h = w they equal 1-D RoPE's.
    """
    pairs = head_dim // 2
    dtype = jnp.promote_types(dtype, jnp.float32)
    frequency = jnp.asarray(float(base) ** (-np.arange(pairs) * 2.0 / head_dim), dtype)
    angle = position[..., axis_of_pair(pairs)].astype(dtype) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, pairing: str = "interleaved") -> jax.Array:
    """Rotates the pairs of x.

    Args:
      x: [B, S, N, H].
      cos, sin: [B, S, H / 2].
      pairing: "interleaved": pair i is (2i, 2i + 1); "half": (i, i + H / 2).
    """
    y = at_least_float32(x)
    cos, sin = cos[:, :, None], sin[:, :, None]
    if pairing == "half":
        a, b = jnp.split(y, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = y[..., 0::2], y[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(y.shape)
    return rotated.astype(x.dtype)
