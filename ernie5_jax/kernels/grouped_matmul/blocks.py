"""Portable dropless mixture of experts: sorted rows, loops over the blocks in use, an own backward.

(token, rank) pairs are sorted by expert. Experts are visited in turn, each over as many blocks of rows as it has
tokens, so the time follows the live pairs: dropped ranks (expert index E) sort to the end and are never touched. A
block may run over into the rows of the next expert; those are rewritten when that expert's turn comes, which keeps the
order compact (no padding between experts).
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
    if 2 * pairs <= experts:
        return 1  # decoding: most experts in use have one row
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


def _put(a: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(a, rows.astype(a.dtype), first, 0)


def _visit(start: jax.Array, block: int, expert: Callable[..., Any], init: Any) -> Any:
    """Carry after all experts that have rows. `expert(e, carry, over)` handles one; `over(visit, init)` is the carry of
    `visit(first row of a block, last row of the expert + 1, carry)` over its blocks."""
    empty = start[1:] == start[:-1]
    order = jnp.argsort(empty)  # stable: those with rows, in their order, come first

    def one(i, carry):
        e = order[i]
        first, last = start[e], start[e + 1]

        def over(visit, init):
            count = (last - first + block - 1) // block
            return lax.fori_loop(0, count, lambda i, c: visit(first + i * block, last, c), init)

        return expert(e, carry, over)

    return lax.fori_loop(0, (~empty).sum(), one, init)


def _matrix(weights: jax.Array, e: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(weights, e, 0, False)


def _dot_t(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b.T."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())))


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
    """`first` is the number of expert 0 among the weights, which may hold the experts of other layers too."""
    tokens, k = expert_index.shape
    experts = experts or w_in.shape[0]
    block = block or block_rows(tokens * k, experts)
    order, inverse, start = sort_pairs(expert_index.astype(jnp.int32), experts)
    order = jnp.concatenate([order, jnp.zeros(block, jnp.int32)])  # room for the last block
    token = order // k

    def expert(e, carry, over):
        def matrices():
            return _matrix(w_in, first + e), _matrix(w_out, first + e)

        shared = None if block == 1 else matrices()

        def visit(row, last, carry):
            del last
            # For a single row the slice must stand beside its product: XLA then reads the matrix where it lies.
            into, out_of = shared or matrices()
            hidden = x[_rows(token, row, block)] @ into
            return _put(carry[0], hidden, row), _put(carry[1], swiglu(hidden) @ out_of, row)

        return over(visit, carry)

    empty = [jnp.zeros((tokens * k + block, width), x.dtype) for width in (w_in.shape[2], x.shape[1])]
    hidden, out = _visit(start, block, expert, tuple(empty))
    inverse = inverse.reshape(tokens, k)
    live = inverse < start[experts]
    y = _combine(out, inverse, live, gates.astype(x.dtype))
    return y, (x, gates, w_in, w_out, order, inverse, start, hidden, live)


def _backward(block, residuals, g):
    x, gates, w_in, w_out, order, inverse, start, hidden, live = residuals
    block = block or block_rows(gates.size, w_in.shape[0])
    token, gate_of = order // gates.shape[1], gates.reshape(-1)[order].astype(x.dtype)
    lane, wide = jnp.arange(block), jnp.promote_types(x.dtype, jnp.float32)

    def expert(e, carry, over):
        into, out_of = _matrix(w_in, e), _matrix(w_out, e)

        def visit(row, last, carry):
            drows, dgates, dinto, dout_of = carry
            rows = _rows(token, row, block)
            own = (row + lane < last)[:, None]  # the others are the next expert's
            gate = jnp.where(own, _rows(gate_of, row, block)[:, None], 0)
            act, act_vjp = jax.vjp(swiglu, _rows(hidden, row, block))
            dact = _dot_t(g[rows], out_of)
            dhidden = act_vjp(dact * gate)[0]
            dinto += jnp.matmul(x[rows].T, dhidden, preferred_element_type=wide)
            dout_of += jnp.matmul((act * gate).T, g[rows], preferred_element_type=wide)
            return _put(drows, _dot_t(dhidden, into), row), _put(dgates, (act * dact).sum(1), row), dinto, dout_of

        drows, dgates, dw_in, dw_out = carry
        zeros = (jnp.zeros(into.shape, wide), jnp.zeros(out_of.shape, wide))
        drows, dgates, dinto, dout_of = over(visit, (drows, dgates, *zeros))
        return drows, dgates, _put(dw_in, dinto[None], e), _put(dw_out, dout_of[None], e)

    pairs = order.shape[0]
    init = (
        jnp.zeros((pairs, x.shape[1]), x.dtype),
        jnp.zeros(pairs, x.dtype),
        jnp.zeros_like(w_in),
        jnp.zeros_like(w_out),
    )
    drows, dgates, dw_in, dw_out = _visit(start, block, expert, init)
    dx = _combine(drows, inverse, live, jnp.ones_like(live, x.dtype))
    return dx, jnp.where(live, dgates[inverse], 0).astype(gates.dtype), None, dw_in, dw_out


block_moe.defvjp(_forward, _backward)
