"""Attention of a few queries over a cache, in plain XLA: both products read keys and values the way they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie5_jax.kernels.attention.reference import masked_softmax


def decode_attention(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """See `cached_attention`; mask: bool [B, Sq, M], True = attend."""
    batch, length, heads, width = q.shape
    key_heads = keys.shape[1]
    q = (q * width**-0.5).reshape(batch, length, key_heads, heads // key_heads, width).transpose(0, 2, 3, 1, 4)
    scores = q.reshape(batch, key_heads, -1, width) @ keys.astype(q.dtype)
    scores = scores.reshape(*q.shape[:4], -1).astype(jnp.promote_types(q.dtype, jnp.float32))
    weights = masked_softmax(scores, mask[:, None, None]).astype(values.dtype)
    out = weights.reshape(batch, key_heads, -1, weights.shape[-1]) @ values
    return out.reshape(q.shape).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width).astype(q.dtype)
