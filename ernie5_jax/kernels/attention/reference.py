"""Dense attention over an explicit mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention with grouped key-value heads.

    Args:
      q: [B, Sq, N, H]. k, v: [B, Sk, K, H], K divides N.
      mask: bool [B, Sq, Sk], True = attend.

    Returns:
      [B, Sq, N, H]; rows that may attend to nothing are 0.
    """
    batch, sq, heads, width = q.shape
    groups = heads // k.shape[2]
    q = (q * width**-0.5).reshape(batch, sq, k.shape[2], groups, width)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    weights = masked_softmax(scores, mask[:, None, None])
    out = jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(v.dtype), v)
    return out.reshape(batch, sq, heads, width)


def masked_softmax(scores: jax.Array, allowed: jax.Array) -> jax.Array:
    """Softmax over the last axis of the allowed ones; 0 where none is."""
    # A finite floor keeps fully masked rows free of NaN, values and gradients alike.
    scores = jnp.where(allowed, scores, -1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    weights = jnp.where(allowed, weights, 0)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)
