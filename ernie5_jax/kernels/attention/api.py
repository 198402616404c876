"""Attention under column bounds and segments."""

from __future__ import annotations

from typing import Any

import jax

from ernie5_jax.kernels.attention.blockwise import blockwise_attention
from ernie5_jax.kernels.attention.decode import decode_attention
from ernie5_jax.kernels.attention.mask import attention_mask, check_bounds
from ernie5_jax.kernels.attention.pallas_tpu import pallas_attention
from ernie5_jax.kernels.attention.reference import dense_attention
from ernie5_jax.kernels.attention.xla import xla_attention

_MASKED = {"dense": dense_attention, "xla": xla_attention}
_LINEAR = {"blockwise": blockwise_attention, "pallas": pallas_attention}
IMPLEMENTATIONS = (*_MASKED, *_LINEAR)

_LARGEST_WHOLE = 256**2
"""Pairs of queries and keys of a sequence up to which "xla" is taken; where the two cross was not measured."""


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
      implementation: "dense" is the plain formula; "xla" holds all scores at once; "blockwise" needs memory linear in
        the length and skips blocks that are masked whole; "pallas" is that for TPUs. None takes "xla" for short
        sequences, else "pallas" on TPUs and "blockwise" elsewhere, decided when the program is lowered.

    Returns:
      [B, Sq, N, H], 0 in rows that may attend to nothing.

    Raises:
      ValueError: Unknown backend, or K does not divide N.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation: found {implementation!r}, allowed: None, {', '.join(IMPLEMENTATIONS)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k: found {k.shape[2]} key-value heads, allowed: a divisor of {q.shape[2]} query heads")
    check_bounds(bounds, k_segment, causal)
    where: dict[str, Any] = {
        "bounds": bounds, "q_segment": q_segment, "k_segment": k_segment, "q_rows": q_rows, "k_rows": k_rows,
        "causal": causal,
    }  # fmt: skip
    if implementation in _LINEAR:
        return _LINEAR[implementation](q, k, v, **where)
    if implementation or q.shape[1] * k.shape[1] <= _LARGEST_WHOLE:
        return _MASKED[implementation or "xla"](q, k, v, attention_mask(**where))
    causal = where.pop("causal")
    blockwise, pallas = (lambda q, k, v, w, f=f: f(q, k, v, **w, causal=causal) for f in _LINEAR.values())
    return jax.lax.platform_dependent(q, k, v, where, tpu=pallas, default=blockwise)


def cached_attention(q: jax.Array, keys: jax.Array, values: jax.Array, **where: Any) -> jax.Array:
    """`attention` over keys and values as a cache holds them: what few queries read is not transposed first.

    Args:
      q: [B, Sq, N, H].
      keys: [B, K, H, M]. values: [B, K, M, H].
      where: Bounds, segments and rows, as for `attention`.

    Returns:
      [B, Sq, N, H].

    Raises:
      ValueError: Bounds of another shape or type.
    """
    if q.shape[1] * values.shape[2] > _LARGEST_WHOLE:
        return attention(q, keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2), **where)
    check_bounds(where["bounds"], where["k_segment"], where.get("causal", False))
    return decode_attention(q, keys, values, attention_mask(**where))
