"""Portable dropless mixture of experts: sorted rows, loops over the blocks in use, an own backward.

(token, rank) pairs are sorted by expert. Every product visits the experts in turn, each over as many blocks of rows as
it has tokens, so the time follows the live pairs: dropped ranks (expert index E) sort to the end and are never touched.
A block may run over into the rows of the next expert; those are rewritten when that expert's turn comes, which keeps
the order compact (no padding between experts). Between the products everything is done for all rows at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ernie5_jax.kernels.grouped_matmul.reference import swiglu

LARGEST_BLOCK = 64


def block_rows(pairs: int, experts: int) -> int:
    """Rows that are multiplied at a time: about as many as an expert has, so that few tokens cost little."""
    share = -(-pairs // experts)
    return min(LARGEST_BLOCK, max(8, 1 << (share - 1).bit_length()))


def sort_pairs(expert_index: jax.Array, experts: int):
    """Sorted order of the flat pairs, its inverse, and the first row of each expert ([E + 1])."""
    flat = expert_index.reshape(-1)
    pairs = flat.shape[0]
    if (experts + 1) * pairs > 2**31:
        raise ValueError(
            f"expert_index: found {pairs} (token, rank) pairs for {experts} experts, allowed: "
            f"at most {2**31 // (experts + 1)} on one device"
        )
    # One integer sort: the pair's number rides in the low part of the key (stable for free).
    key = lax.sort(flat * pairs + jnp.arange(pairs, dtype=jnp.int32))
    order = key % pairs
    start = jnp.searchsorted(key, jnp.arange(experts + 1, dtype=jnp.int32) * pairs).astype(jnp.int32)
    inverse = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    return order, inverse, start


def _rows(a: jax.Array, first: jax.Array, count: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(a, first, count, 0)


def _visit_blocks(start: jax.Array, block: int, visit: Callable[..., Any], init: Any) -> Any:
    """Carry of `visit(expert, first row of a block, last row of the expert + 1, carry)` over all blocks in use."""

    def expert(e, carry):
        first, last = start[e], start[e + 1]
        blocks = (last - first + block - 1) // block
        return lax.fori_loop(0, blocks, lambda i, c: visit(e, first + i * block, last, c), carry)

    return lax.fori_loop(0, start.shape[0] - 1, expert, init)


def _dot(rows: jax.Array, weights: jax.Array, start: jax.Array, block: int, first: Any = 0) -> jax.Array:
    """Every row times its expert's matrix: [P, I], [E, I, O] -> [P, O]; rows past `start[E]` hold anything.

    `first` is the number of expert 0 among `weights`, which may hold the experts of other layers too.
    """

    def visit(e, row, last, out):
        del last
        product = _rows(rows, row, block) @ lax.dynamic_index_in_dim(weights, first + e, 0, False)
        return lax.dynamic_update_slice_in_dim(out, product, row, 0)

    return _visit_blocks(start, block, visit, jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype))


def _outer(a: jax.Array, b: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """Sum of a's rows times b's rows by expert: [P, I], [P, O] -> [E, I, O]."""
    lane = jnp.arange(block)

    def visit(e, row, last, out):
        own = jnp.where((row + lane < last)[:, None], _rows(a, row, block), 0)
        total = lax.dynamic_index_in_dim(out, e, 0, False) + own.T @ _rows(b, row, block)
        return lax.dynamic_update_index_in_dim(out, total, e, 0)

    return _visit_blocks(start, block, visit, jnp.zeros((start.shape[0] - 1, a.shape[1], b.shape[1]), a.dtype))


def _combine(rows: jax.Array, index: jax.Array, live: jax.Array, weight: jax.Array) -> jax.Array:
    """Sum over the ranks of weight * rows[index]: [P, D], [T, k] each -> [T, D].

    One rank at a time: XLA fuses gathers into a sum of terms, but not into a reduction.
    """
    terms = [jnp.where(live[:, r, None], weight[:, r, None] * rows[index[:, r]], 0) for r in range(index.shape[1])]
    return functools.reduce(jnp.add, terms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def block_moe(x, gates, expert_index, w_in, w_out, block: int | None = None):
    """See `moe_ffn`; `block` rows are multiplied at a time (None: see `block_rows`)."""
    return _forward(x, gates, expert_index, w_in, w_out, block)[0]


def block_forward(x, gates, expert_index, w_in, w_out, layer):
    """See `stacked_moe_ffn`."""
    experts = w_in.shape[1]
    w_in, w_out = (w.reshape(-1, *w.shape[2:]) for w in (w_in, w_out))
    return _forward(x, gates, expert_index, w_in, w_out, None, experts, layer * experts)[0]


def _forward(x, gates, expert_index, w_in, w_out, block, experts=None, first=0):
    tokens, k = expert_index.shape
    experts = experts or w_in.shape[0]
    block = block or block_rows(tokens * k, experts)
    order, inverse, start = sort_pairs(expert_index.astype(jnp.int32), experts)
    order = jnp.concatenate([order, jnp.zeros(block, jnp.int32)])  # room for the last block
    hidden = _dot(x[order // k], w_in, start, block, first)
    out = _dot(swiglu(hidden), w_out, start, block, first)
    inverse = inverse.reshape(tokens, k)
    live = inverse < start[experts]
    y = _combine(out, inverse, live, gates.astype(x.dtype))
    return y, (x, gates, w_in, w_out, order, inverse, start, hidden, live)


def _backward(block, residuals, g):
    x, gates, w_in, w_out, order, inverse, start, hidden, live = residuals
    k = gates.shape[1]
    block = block or block_rows(gates.size, w_in.shape[0])
    token = order // k
    used = jnp.arange(order.shape[0]) < start[-1]
    gate = jnp.where(used, gates.reshape(-1)[order], 0).astype(x.dtype)[:, None]
    rows, g_rows = x[token], g[token]
    act, act_vjp = jax.vjp(swiglu, hidden)
    dact = _dot(g_rows, w_out.swapaxes(1, 2), start, block)
    dgate = (act * dact).sum(1)
    dhidden = act_vjp(dact * gate)[0]
    drows = _dot(dhidden, w_in.swapaxes(1, 2), start, block)
    dx = _combine(drows, inverse, live, jnp.ones_like(live, x.dtype))
    dgate = jnp.where(live, dgate[inverse], 0).astype(gates.dtype)
    return dx, dgate, None, _outer(rows, dhidden, start, block), _outer(act * gate, g_rows, start, block)


block_moe.defvjp(_forward, _backward)
