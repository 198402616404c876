"""Where the tokens of a sparse layer are computed."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from ernie5_jax.parallel.mesh import DATA_AXIS, data_devices


def on_local_tokens(layer: Callable[..., jax.Array], num_token_args: int) -> Callable[..., jax.Array]:
    """Runs `layer` on each device's own tokens, weights whole on every device.

    Under automatic partitioning a loop over experts would gather every token; `shard_map` keeps tokens where they are
    and sums weight gradients over the data axis in its transpose.

    Args:
      layer: Takes `num_token_args` arrays with a leading token axis, then weights.
      num_token_args: How many arguments are split over the data axis.

    Returns:
      A function of the same arguments; `layer` itself when no mesh with a data axis is set, or tokens are already
      those of one device (inside `sum_over_devices`).
    """
    if data_devices() == 1:
        return layer
    tokens, whole = PartitionSpec(DATA_AXIS), PartitionSpec()

    def local(*args):
        specs = tuple(tokens if i < num_token_args else whole for i in range(len(args)))
        return jax.shard_map(layer, in_specs=specs, out_specs=tokens, check_vma=False)(*args)

    return local
