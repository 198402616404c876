"""Attention with all scores in memory, in plain XLA, with its own backward.

Scores are held transposed, [keys, queries]: then no product contracts over the rows of a score matrix, which XLA:CPU
does slowly. Only q, k, v, the output and the log-sum are kept for the backward, which computes the scores again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_FLOOR = -1e30
"""Score of a masked pair; finite, so that fully masked queries stay free of NaN."""


@jax.custom_vjp
def xla_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`dense_attention`, arguments and result as there."""
    return _forward(q, k, v, mask)[0]


def _columns(x: jax.Array, key_heads: int) -> jax.Array:
    """[B, Sq, N, H] -> [B, K, H, G Sq]."""
    batch, length, heads, width = x.shape
    x = x.reshape(batch, length, key_heads, heads // key_heads, width)
    return x.transpose(0, 2, 4, 3, 1).reshape(batch, key_heads, width, -1)


def _from_columns(x: jax.Array, length: int) -> jax.Array:
    """[B, K, H, G Sq] -> [B, Sq, N, H]."""
    batch, key_heads, width, _ = x.shape
    return x.reshape(batch, key_heads, width, -1, length).transpose(0, 4, 1, 3, 2).reshape(batch, length, -1, width)


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores [B, K, Sk, G Sq] in float32 or better, masked pairs at the floor, and the mask in their shape.

    Args:
      q: [B, K, H, G Sq], scaled.
      k: [B, Sk, K, H].
    """
    scores = k.swapaxes(1, 2) @ q
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    allowed = mask.swapaxes(1, 2)[:, None]
    allowed = jnp.concatenate([allowed] * (q.shape[-1] // mask.shape[1]), axis=-1)
    return jnp.where(allowed, scores, _FLOOR), allowed


def _forward(q, k, v, mask):
    length = q.shape[1]
    scores, allowed = _scores(_columns(q * q.shape[-1] ** -0.5, k.shape[2]), k, mask)
    largest = scores.max(2, keepdims=True)
    weights = jnp.where(allowed, jnp.exp(scores - largest), 0)
    total = weights.sum(2, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    out = ((v.transpose(0, 2, 3, 1) @ weights.astype(v.dtype)) / total).astype(v.dtype)
    return _from_columns(out, length), (q, k, v, mask, out, largest + jnp.log(total))


def _backward(residuals, g):
    q, k, v, mask, out, log_sum = residuals
    key_heads, scale, length = k.shape[2], q.shape[-1] ** -0.5, q.shape[1]
    q, g = _columns(q * scale, key_heads), _columns(g, key_heads)
    scores, allowed = _scores(q, k, mask)
    weights = jnp.where(allowed, jnp.exp(scores - log_sum), 0)
    # Sums of weights * dweights over keys, from the output (FlashAttention, arXiv 2205.14135).
    mean = (g * out).astype(scores.dtype).sum(2, keepdims=True)
    dscores = (weights * (v.swapaxes(1, 2) @ g - mean)).astype(k.dtype)
    dv = weights.astype(v.dtype) @ g.swapaxes(2, 3)
    dk = dscores @ q.swapaxes(2, 3)
    dq = (k.transpose(0, 2, 3, 1) * scale) @ dscores
    return _from_columns(dq, length), dk.swapaxes(1, 2), dv.swapaxes(1, 2), None


xla_attention.defvjp(_forward, _backward)
