"""Where the tokens and the experts of a sparse layer meet."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ernie5_jax.parallel.mesh import DATA_AXIS, divided_by_hand, has_data_axis
from ernie5_jax.parallel.sharding import current_rules

SparseLayer = Callable[..., jax.Array]
"""x [T, D], gates [T, k], expert_index int32 [T, k], then weights with a leading axis of experts -> [T, D]."""


def over_devices(layer: SparseLayer) -> SparseLayer:
    """Runs a sparse layer on the devices of the data axis as the current rules say.

    Where every device has all experts it computes its own tokens; `shard_map` sums weight gradients in its transpose
    (under automatic partitioning a loop over experts would gather every token). Where experts are split, every device
    gathers all tokens, computes those that chose its experts, and the outputs are summed and scattered: weights, their
    gradients and their optimiser state exist once.
    """
    if not has_data_axis():
        return layer
    split = current_rules().experts == DATA_AXIS
    local = _with_exchange(layer) if split else layer
    if divided_by_hand():
        return local
    tokens = PartitionSpec(DATA_AXIS)
    experts = tokens if split else PartitionSpec()

    def divided(x, gates, index, *weights):
        specs = (tokens, tokens, tokens, *(experts for _ in weights))
        return jax.shard_map(local, in_specs=specs, out_specs=tokens, check_vma=False)(x, gates, index, *weights)

    return divided


def _with_exchange(layer: SparseLayer) -> SparseLayer:
    def local(x, gates, index, *weights):
        x, gates, index = (lax.all_gather(a, DATA_AXIS, tiled=True) for a in (x, gates, index))
        here = weights[0].shape[0]
        own = index - lax.axis_index(DATA_AXIS) * here
        own = jnp.where((own >= 0) & (own < here), own, here)
        return lax.psum_scatter(layer(x, gates, own, *weights), DATA_AXIS, tiled=True)

    return local


def on_any_device(flag: jax.Array) -> jax.Array:
    """`flag`; true everywhere if on any device, where devices exchange tokens and so must all take the same branch."""
    if divided_by_hand() and current_rules().experts == DATA_AXIS:
        return lax.pmax(flag.astype(jnp.int32), DATA_AXIS) > 0
    return flag
