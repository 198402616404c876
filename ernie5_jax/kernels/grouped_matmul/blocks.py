"""Portable dropless mixture of experts: sorted rows, a loop over the blocks in use, an own backward.

(token, rank) pairs are sorted by expert. Experts are visited in turn, each over as many blocks of rows as it has
tokens, so the time follows the live pairs: dropped ranks (expert index E) sort to the end and are never touched.
A block may run over into the rows of the next expert; those are rewritten when that expert's turn comes, which keeps
the order compact (no padding between experts).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ernie5_jax.kernels.grouped_matmul.reference import swiglu

BLOCK = 64


def _sort_pairs(expert_index: jax.Array, experts: int):
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
    return lax.dynamic_update_slice_in_dim(a, rows, first, 0)


def _combine(rows: jax.Array, index: jax.Array, live: jax.Array, weight: jax.Array) -> jax.Array:
    """Sum over the ranks of weight * rows[index]: [P, D], [T, k] each -> [T, D].

    One rank at a time: XLA fuses gathers into a sum of terms, but not into a reduction.
    """
    terms = [
        jnp.where(live[:, r, None], weight[:, r, None] * rows[index[:, r]], 0) for r in range(index.shape[1])
    ]
    return functools.reduce(jnp.add, terms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def block_moe(x, gates, expert_index, w_in, w_out, block: int = BLOCK):
    """See `moe_ffn`; `block` rows are multiplied at a time."""
    return _forward(x, gates, expert_index, w_in, w_out, block)[0]


def _forward(x, gates, expert_index, w_in, w_out, block):
    tokens, width = x.shape
    k = expert_index.shape[1]
    experts, _, hidden_width = w_in.shape
    pairs = tokens * k
    order, inverse, start = _sort_pairs(expert_index.astype(jnp.int32), experts)
    order = jnp.concatenate([order, jnp.zeros(block, jnp.int32)])
    token = order // k

    def expert(e, carry):
        first, last = start[e], start[e + 1]
        w_in_e = lax.dynamic_index_in_dim(w_in, e, 0, False)
        w_out_e = lax.dynamic_index_in_dim(w_out, e, 0, False)

        def one_block(i, carry):
            out, hidden = carry
            row = first + i * block
            h = x[_rows(token, row, block)] @ w_in_e
            return _put(out, swiglu(h) @ w_out_e, row), _put(hidden, h, row)

        return lax.fori_loop(0, (last - first + block - 1) // block, one_block, carry)

    init = (jnp.zeros((pairs + block, width), x.dtype), jnp.zeros((pairs + block, hidden_width), x.dtype))
    out, hidden = lax.fori_loop(0, experts, expert, init)
    live = (inverse < start[experts]).reshape(tokens, k)
    y = _combine(out, inverse.reshape(tokens, k), live, gates.astype(x.dtype))
    return y, (x, gates, w_in, w_out, order, token, inverse, start, hidden, live)


def _backward(block, residuals, g):
    x, gates, w_in, w_out, order, token, inverse, start, hidden, live = residuals
    tokens, width = x.shape
    k = gates.shape[1]
    experts = w_in.shape[0]
    pairs = tokens * k
    gate = gates.reshape(-1)[order].astype(x.dtype)
    lane = jnp.arange(block)

    def expert(e, carry):
        dx, dgate, dw_in, dw_out = carry
        first, last = start[e], start[e + 1]
        w_in_e = lax.dynamic_index_in_dim(w_in, e, 0, False)
        w_out_e = lax.dynamic_index_in_dim(w_out, e, 0, False)

        def one_block(i, carry):
            dx, dgate, acc_in, acc_out = carry
            row = first + i * block
            t = _rows(token, row, block)
            xb, gb, h = x[t], g[t], _rows(hidden, row, block)
            weight = jnp.where(row + lane < last, _rows(gate, row, block), 0)[:, None]
            act, act_vjp = jax.vjp(swiglu, h)
            dact = gb @ w_out_e.T
            dgate_b = (act * dact).sum(1)
            dh = act_vjp(dact * weight)[0]
            # Contracting over rows is slow on CPU unless the left side is transposed first.
            acc_out = acc_out + lax.optimization_barrier((act * weight).T) @ gb
            acc_in = acc_in + lax.optimization_barrier(xb.T) @ dh
            return _put(dx, dh @ w_in_e.T, row), _put(dgate, dgate_b, row), acc_in, acc_out

        zeros = (jnp.zeros(w_in.shape[1:], x.dtype), jnp.zeros(w_out.shape[1:], x.dtype))
        dx, dgate, acc_in, acc_out = lax.fori_loop(
            0, (last - first + block - 1) // block, one_block, (dx, dgate, *zeros)
        )
        return (
            dx,
            dgate,
            lax.dynamic_update_index_in_dim(dw_in, acc_in, e, 0),
            lax.dynamic_update_index_in_dim(dw_out, acc_out, e, 0),
        )

    init = (
        jnp.zeros((pairs + block, width), x.dtype),
        jnp.zeros(pairs + block, x.dtype),
        jnp.zeros_like(w_in),
        jnp.zeros_like(w_out),
    )
    dx, dgate, dw_in, dw_out = lax.fori_loop(0, experts, expert, init)
    back = inverse.reshape(tokens, k)
    dx = _combine(dx, back, live, jnp.ones_like(live, x.dtype))
    dgate = jnp.where(live, dgate[back], 0).astype(gates.dtype)
    return dx, dgate, None, dw_in, dw_out


block_moe.defvjp(_forward, _backward)
