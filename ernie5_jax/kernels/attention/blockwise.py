"""Attention block by block in plain XLA, with its own backward: memory linear in the length, masked blocks skipped.

Per block of queries a loop visits the blocks of keys that any of its pairs may need, with an online softmax
(FlashAttention, arXiv 2205.14135; FlashMask, arXiv 2410.01359). Scores are held transposed, [keys, queries of a group]:
no product then contracts over the rows of its left factor, which XLA:CPU does slowly. Rows, segments and bounds come as
arrays, not as counters plus an offset: the mask of a block then vectorises.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ernie5_jax.kernels.attention.mask import allowed_pairs, block_visits, needed_blocks

_FLOOR = -1e30
"""Score of a masked pair; finite, so that fully masked queries stay free of NaN."""
_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Pairs:
    """What decides whether a pair may attend, cut into blocks.

    Attributes:
      q_rows, q_segment: int32 [B, nq, G Qb], repeated for the heads of a group.
      k_rows, k_segment: int32 [B, nk, Kb]. bounds: int32 [B, nk, Kb, n].
      order: int32 [B, nq, nk], blocks of keys, those to visit first. count: int32 [B, nq], how many.
      causal: See `attention_mask`.
    """

    q_rows: Any
    q_segment: Any
    k_rows: Any
    k_segment: Any
    bounds: Any
    order: Any
    count: Any
    causal: bool = dataclasses.field(metadata={"static": True})

    def allowed(self, b: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """bool [Kb, G Qb] of query block i and key block j."""
        return allowed_pairs(
            _pick(self.q_rows, b, i)[None],
            _pick(self.q_segment, b, i)[None],
            _pick(self.k_rows, b, j)[:, None],
            _pick(self.k_segment, b, j)[:, None],
            tuple(_pick(self.bounds[..., n], b, j)[:, None] for n in range(self.bounds.shape[-1])),
            self.causal,
        )


def blockwise_attention(
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
    block: int = _BLOCK,
) -> jax.Array:
    """`attention`, arguments and result as there; `block` queries and keys are looked at together."""
    queries, keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q_block, k_block = min(block, _round_up(queries, 8)), min(block, _round_up(keys, 8))

    def blocks(x: jax.Array, size: int) -> jax.Array:
        """[B, S, ...] -> [B, blocks, size, ...]; what is added belongs to no document."""
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], -1, size, *x.shape[2:])

    q_rows, q_segment = blocks(q_rows, q_block), blocks(q_segment, q_block)
    k_rows, k_segment, bounds = blocks(k_rows, k_block), blocks(k_segment, k_block), blocks(bounds, k_block)
    order, count = block_visits(needed_blocks(q_rows, q_segment, k_rows, k_segment, bounds, causal))
    pairs = _Pairs(
        q_rows=jnp.tile(q_rows, groups),
        q_segment=jnp.tile(q_segment, groups),
        k_rows=k_rows,
        k_segment=k_segment,
        bounds=bounds,
        order=order,
        count=count,
        causal=causal,
    )
    out = _attend(blocks(q, q_block), blocks(k, k_block), blocks(v, k_block), pairs)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :queries]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pick(x: jax.Array, b: jax.Array, i: jax.Array) -> jax.Array:
    """x[b, i]."""
    return lax.dynamic_slice(x, _at(x, b, i), (1, 1, *x.shape[2:])).reshape(x.shape[2:])


def _put(x: jax.Array, value: jax.Array, b: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, value[None, None].astype(x.dtype), _at(x, b, i))


def _at(x: jax.Array, b: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
    """Indices of one type: loop counters are int64 under x64, block numbers never."""
    return tuple(jnp.asarray(n, jnp.int32) for n in (b, i, *(0,) * (x.ndim - 2)))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[K, m, c] x [K, c, n] -> [K, m, n], summed in float32 or better."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), preferred_element_type=wide)


def _by_head(x: jax.Array, key_heads: int) -> tuple[jax.Array, jax.Array]:
    """Queries [B, nq, Qb, N, H] as rows [B, nq, K, G Qb, H] and as columns [B, nq, K, H, G Qb]."""
    batch, count, size, heads, width = x.shape
    x = x.reshape(batch, count, size, key_heads, heads // key_heads, width).transpose(0, 1, 3, 4, 2, 5)
    rows = x.reshape(batch, count, key_heads, -1, width)
    return rows, rows.swapaxes(-1, -2)


def _from_columns(x: jax.Array, size: int) -> jax.Array:
    """[B, nq, K, H, G Qb] -> [B, nq, Qb, N, H]."""
    batch, count, key_heads, width, _ = x.shape
    x = x.reshape(batch, count, key_heads, width, -1, size).transpose(0, 1, 5, 2, 4, 3)
    return x.reshape(batch, count, size, -1, width)


def _visit(pairs: _Pairs, visit: Any, init: Any) -> Any:
    """Carry of `visit(b, i, carry)` over all blocks of queries."""
    batch, count = pairs.count.shape
    return lax.fori_loop(0, batch * count, lambda n, carry: visit(n // count, n % count, carry), init)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, pairs: _Pairs) -> jax.Array:
    """Blocks [B, nq, Qb, N, H] over [B, nk, Kb, K, H] -> [B, nq, Qb, N, H]."""
    return _forward(q, k, v, pairs)[0]


def _forward(q, k, v, pairs: _Pairs):
    key_heads, size = k.shape[3], q.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    columns = _by_head(q * q.shape[-1] ** -0.5, key_heads)[1]
    k_rows, v_columns = k.swapaxes(2, 3), v.transpose(0, 1, 3, 4, 2)
    shape = columns.shape
    line = (key_heads, 1, shape[-1])

    def queries(b, i, carry):
        out, log_sum = carry
        q_block = _pick(columns, b, i)

        def keys(t, carry):
            largest, total, weighted = carry
            j = pairs.order[b, i, t]
            allowed = pairs.allowed(b, i, j)
            scores = jnp.where(allowed, _dot(_pick(k_rows, b, j), q_block), _FLOOR)
            larger = jnp.maximum(largest, scores.max(1, keepdims=True))
            weights = jnp.where(allowed, jnp.exp(scores - larger), 0)
            shrink = jnp.exp(largest - larger)
            total = total * shrink + weights.sum(1, keepdims=True)
            weighted = weighted * shrink + _dot(_pick(v_columns, b, j), weights.astype(v.dtype))
            return larger, total, weighted

        start = (jnp.full(line, _FLOOR, wide), jnp.zeros(line, wide), jnp.zeros(shape[2:], wide))
        largest, total, weighted = lax.fori_loop(0, pairs.count[b, i], keys, start)
        total = jnp.where(total == 0, 1, total)
        return _put(out, weighted / total, b, i), _put(log_sum, largest + jnp.log(total), b, i)

    init = (jnp.zeros(shape, v.dtype), jnp.zeros((*shape[:2], *line), wide))
    out, log_sum = _visit(pairs, queries, init)
    return _from_columns(out, size), (q, k, v, pairs, out, log_sum)


def _backward(residuals, g):
    q, k, v, pairs, out, log_sum = residuals
    key_heads, size, scale = k.shape[3], q.shape[2], q.shape[-1] ** -0.5
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_rows, q_columns = _by_head(q * scale, key_heads)
    g_rows, g_columns = _by_head(g, key_heads)
    k_rows, v_rows, k_columns = k.swapaxes(2, 3), v.swapaxes(2, 3), k.transpose(0, 1, 3, 4, 2)
    # Sums of weights * dweights over keys, from the output.
    mean = (g_columns * out).astype(wide).sum(3, keepdims=True)

    def queries(b, i, carry):
        dq, dk, dv = carry
        of_block = (q_rows, q_columns, g_rows, g_columns, log_sum, mean)
        q_row, q_column, g_row, g_column, total, average = (_pick(x, b, i) for x in of_block)

        def keys(t, carry):
            dq, dk, dv = carry
            j = pairs.order[b, i, t]
            scores = _dot(_pick(k_rows, b, j), q_column)
            weights = jnp.where(pairs.allowed(b, i, j), jnp.exp(scores - total), 0)
            dscores = (weights * (_dot(_pick(v_rows, b, j), g_column) - average)).astype(k.dtype)
            dv = _put(dv, _pick(dv, b, j) + _dot(weights.astype(v.dtype), g_row), b, j)
            dk = _put(dk, _pick(dk, b, j) + _dot(dscores, q_row), b, j)
            return dq + _dot(_pick(k_columns, b, j), dscores), dk, dv

        start = jnp.zeros(q_column.shape, wide)
        found, dk, dv = lax.fori_loop(0, pairs.count[b, i], keys, (start, dk, dv))
        return _put(dq, found * scale, b, i), dk, dv

    zeros = functools.partial(jnp.zeros_like, dtype=wide)
    dq, dk, dv = _visit(pairs, queries, (jnp.zeros(q_columns.shape, q.dtype), zeros(k_rows), zeros(v_rows)))
    return _from_columns(dq, size), dk.swapaxes(2, 3).astype(k.dtype), dv.swapaxes(2, 3).astype(v.dtype), None


_attend.defvjp(_forward, _backward)
