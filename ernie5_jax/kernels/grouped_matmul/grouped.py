"""Dropless mixture of experts through one grouped product: `lax.ragged_dot`, or the megablox kernel on TPUs.

(token, rank) pairs are sorted by expert, so that every expert's rows are one group. Dropped ranks (expert index E) sort
to the end and belong to no group; what a product leaves in their rows is never read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ernie5_jax.kernels.grouped_matmul.blocks import sort_pairs
from ernie5_jax.kernels.grouped_matmul.reference import swiglu

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""rows [P, I], matrices [E, I, O], int32 sizes [E] of consecutive groups -> [P, O]."""

_TILE = 128


def grouped_moe(x, gates, expert_index, w_in, w_out, product: Product):
    """See `moe_ffn`."""
    tokens, k = expert_index.shape
    order, inverse, start = sort_pairs(expert_index.astype(jnp.int32), w_in.shape[0])
    sizes, used = start[1:] - start[:-1], (jnp.arange(tokens * k) < start[-1])[:, None]

    def multiply(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.where(used, product(jnp.where(used, rows, 0), weights, sizes), 0)

    out = multiply(swiglu(multiply(x[order // k], w_in)), w_out)
    inverse = inverse.reshape(tokens, k)
    live = inverse < start[-1]
    return jnp.einsum("tkd,tk->td", out[inverse], jnp.where(live, gates, 0).astype(x.dtype))


def ragged_product(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """`lax.ragged_dot`."""
    return lax.ragged_dot(rows, weights, sizes)


def megablox_product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool = False) -> jax.Array:
    """The grouped matrix product that comes with JAX's Pallas for TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    count = rows.shape[0]
    rows = jnp.pad(rows, ((0, -count % _TILE), (0, 0)))
    tiling = (_TILE, *(min(512, -(-size // _TILE) * _TILE) for size in weights.shape[1:]))
    out = gmm(rows, weights, sizes, rows.dtype, tiling, interpret=interpret)
    return out[:count]


ragged_moe = functools.partial(grouped_moe, product=ragged_product)
megablox_moe = functools.partial(grouped_moe, product=megablox_product)
