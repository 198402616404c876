"""Root-mean-square normalisation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.nn.parameters import constant


def at_least_float32(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 when it already is (decisions section 6, precision)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32 or better."""

    def __init__(self, width: int, eps: float):
        self.scale = constant((width,), ("norm",), 1.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return _normalise(x, self.scale[...], self.eps)


@functools.partial(jax.checkpoint, static_argnums=2, prevent_cse=False)  # of three arrays only x is kept
def _normalise(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    y = at_least_float32(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)
