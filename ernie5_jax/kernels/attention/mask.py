"""From column bounds, segments and row indices to the pairs, and blocks of pairs, that attend (decisions section 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_FAR = 2**30


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
    check_bounds(bounds, k_segment, causal)
    return allowed_pairs(
        q_rows[:, :, None],
        q_segment[:, :, None],
        k_rows[:, None, :],
        k_segment[:, None, :],
        tuple(bounds[:, None, :, i] for i in range(bounds.shape[-1])),
        causal,
    )


def check_bounds(bounds: jax.Array, k_segment: jax.Array, causal: bool) -> None:
    """Raises a `ValueError` unless bounds are int32 [B, Sk, n] and (causal, n) is in the table of `attention_mask`."""
    if bounds.ndim != 3 or bounds.shape[:2] != k_segment.shape or bounds.dtype != jnp.int32:
        raise ValueError(
            f"bounds: found {bounds.dtype}{list(bounds.shape)}, allowed: int32 [B, Sk, n] with [B, Sk] = "
            f"{list(k_segment.shape)}"
        )
    n = bounds.shape[-1]
    if (causal, n) not in ((True, 1), (True, 2), (False, 2), (False, 4)):
        raise ValueError(f"bounds: found n = {n} with causal = {causal}, allowed: n = 1, 2 causal; n = 2, 4 otherwise")


def allowed_pairs(
    q_rows: jax.Array,
    q_segment: jax.Array,
    k_rows: jax.Array,
    k_segment: jax.Array,
    bounds: tuple[jax.Array, ...],
    causal: bool,
) -> jax.Array:
    """`attention_mask` of arguments that broadcast against each other, one array per bound."""
    b, n = bounds, len(bounds)
    if causal and n == 1:
        masked = q_rows >= b[0]
    elif causal:
        masked = (q_rows >= b[0]) & (q_rows < b[1])
    elif n == 2:
        masked = (q_rows >= b[0]) | (q_rows < b[1])
    else:
        masked = ((q_rows >= b[0]) & (q_rows < b[1])) | ((q_rows >= b[2]) & (q_rows < b[3]))
    if causal:
        masked |= q_rows < k_rows
    return (q_segment == k_segment) & (q_segment != 0) & ~masked


def needed_blocks(
    q_rows: jax.Array,
    q_segment: jax.Array,
    k_rows: jax.Array,
    k_segment: jax.Array,
    bounds: jax.Array,
    causal: bool,
) -> jax.Array:
    """bool [B, nq, nk]: blocks that may hold a pair which attends; False is certain.

    Args:
      q_rows, q_segment: int32 [B, nq, Qb].
      k_rows, k_segment: int32 [B, nk, Kb].
      bounds: int32 [B, nk, Kb, n].
      causal: See `attention_mask`.
    """

    def ends(x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(real, x, _FAR).min(-1), jnp.where(real, x, -_FAR).max(-1)

    q_real, k_real = q_segment != 0, k_segment != 0
    first, last = (x[:, :, None] for x in ends(q_rows, q_real))
    q_low, q_high = (x[:, :, None] for x in ends(q_segment, q_real))
    k_low, k_high = (x[:, None] for x in ends(k_segment, k_real))
    needed = (q_low <= k_high) & (k_low <= q_high)
    low, high = zip(*(ends(bounds[..., i], k_real) for i in range(bounds.shape[-1])), strict=True)
    low, high = [x[:, None] for x in low], [x[:, None] for x in high]
    if causal:
        needed &= ends(k_rows, k_real)[0][:, None] <= last
    if len(low) == 1:
        return needed & (high[0] > first)
    if len(low) == 2 and not causal:
        return needed & (high[0] > first) & (low[1] <= last)
    for i in range(0, len(low), 2):
        needed &= ~((high[i] <= first) & (low[i + 1] > last))  # one range of every column covers all queries
    return needed


def block_visits(needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From bool [B, n, m]: int32 [B, n, m], the needed ones of the m blocks first, and int32 [B, n], how many."""
    order = jnp.argsort(~needed, axis=-1, stable=True).astype(jnp.int32)
    return order, needed.sum(-1, dtype=jnp.int32)
