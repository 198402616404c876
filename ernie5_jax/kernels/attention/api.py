"""Attention under column bounds and segments."""

from __future__ import annotations

import jax

from ernie5_jax.kernels.attention.mask import attention_mask
from ernie5_jax.kernels.attention.reference import dense_attention
from ernie5_jax.kernels.attention.xla import xla_attention

IMPLEMENTATIONS = {"dense": dense_attention, "xla": xla_attention}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bounds: jax.Array,
    q_segment: jax.Array,
    k_segment: jax.Array,
    q_rows: jax.Array,
    k_rows: jax.Array,
    causal: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention; see `attention_mask` for what the arguments mean.

    Args:
      q: [B, Sq, N, H]. k, v: [B, Sk, K, H].
      implementation: "xla" (also None) or "dense", the plain formula.

    Returns:
      [B, Sq, N, H], 0 in rows that may attend to nothing.

    Raises:
      ValueError: Unknown backend, or K does not divide N.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation: found {implementation!r}, allowed: None, {', '.join(IMPLEMENTATIONS)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k: found {k.shape[2]} key-value heads, allowed: a divisor of {q.shape[2]} query heads")
    mask = attention_mask(
        q_rows=q_rows, k_rows=k_rows, bounds=bounds, q_segment=q_segment, k_segment=k_segment, causal=causal
    )
    return IMPLEMENTATIONS[implementation or "xla"](q, k, v, mask)
