"""The one function from column bounds, segments and row indices to an attention mask (decisions section 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attention_mask(
    *,
    q_rows: jax.Array,
    k_rows: jax.Array,
    bounds: jax.Array,
    q_segment: jax.Array,
    k_segment: jax.Array,
    causal: bool = False,
) -> jax.Array:
    """Which query may attend to which key (FlashMask semantics, arXiv 2410.01359).

    `bounds` lists, per key column, half-open ranges of *query rows* that are masked:

    ====== === ==========================================
    causal  n  masked rows of column j
    ====== === ==========================================
    True    1  row >= b0 (and row < j)
    True    2  b0 <= row < b1 (and row < j)
    False   2  row >= b0 (LTS) or row < b1 (UTE)
    False   4  b0 <= row < b1 or b2 <= row < b3
    ====== === ==========================================

    Args:
      q_rows: int32 [B, Sq], row index of each query.
      k_rows: int32 [B, Sk], row index of each key.
      bounds: int32 [B, Sk, n].
      q_segment: int32 [B, Sq], document number, 0 = PAD.
      k_segment: int32 [B, Sk].
      causal: Whether rows above the diagonal are masked besides.

    Returns:
      bool [B, Sq, Sk], True = attend. PAD neither attends nor is attended.

    Raises:
      ValueError: (causal, n) is not in the table, or bounds are not int32 [B, Sk, n].
    """
    n = bounds.shape[-1]
    if bounds.ndim != 3 or bounds.shape[:2] != k_segment.shape or bounds.dtype != jnp.int32:
        raise ValueError(
            f"bounds: found {bounds.dtype}{list(bounds.shape)}, allowed: int32 [B, Sk, n] with [B, Sk] = "
            f"{list(k_segment.shape)}"
        )
    if (causal, n) not in ((True, 1), (True, 2), (False, 2), (False, 4)):
        raise ValueError(f"bounds: found n = {n} with causal = {causal}, allowed: n = 1, 2 causal; n = 2, 4 otherwise")
    row = q_rows[:, :, None]
    b = [bounds[:, None, :, i] for i in range(n)]
    if causal and n == 1:
        masked = row >= b[0]
    elif causal:
        masked = (row >= b[0]) & (row < b[1])
    elif n == 2:
        masked = (row >= b[0]) | (row < b[1])
    else:
        masked = ((row >= b[0]) & (row < b[1])) | ((row >= b[2]) & (row < b[3]))
    if causal:
        masked |= row < k_rows[:, None, :]
    same = (q_segment[:, :, None] == k_segment[:, None, :]) & (q_segment != 0)[:, :, None]
    return same & ~masked
