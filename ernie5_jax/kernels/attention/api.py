"""Attention under column bounds and segments."""

from __future__ import annotations

import jax

from ernie5_jax.kernels.attention.blockwise import blockwise_attention
from ernie5_jax.kernels.attention.mask import attention_mask, check_bounds
from ernie5_jax.kernels.attention.reference import dense_attention
from ernie5_jax.kernels.attention.xla import xla_attention

_MASKED = {"dense": dense_attention, "xla": xla_attention}
IMPLEMENTATIONS = (*_MASKED, "blockwise")

_LARGEST_WHOLE = 256**2
"""Pairs of queries and keys of a sequence up to which "xla" is as fast as going block by block."""


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
        the length and skips blocks that are masked whole. None chooses one of the last two by size.

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
    where = {
        "bounds": bounds, "q_segment": q_segment, "k_segment": k_segment, "q_rows": q_rows, "k_rows": k_rows,
        "causal": causal,
    }  # fmt: skip
    whole = q.shape[1] * k.shape[1] <= _LARGEST_WHOLE
    name = implementation or ("xla" if whole else "blockwise")
    if name == "blockwise":
        return blockwise_attention(q, k, v, **where)
    return _MASKED[name](q, k, v, attention_mask(**where))
