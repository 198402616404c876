"""Data parallelism by hand: every device works on its own rows, and results are summed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ernie5_jax.parallel.mesh import DATA_AXIS, data_devices
from ernie5_jax.parallel.sharding import current_rules

Function = Callable[[Any, Any], Any]


def sum_over_devices(function: Function, whole: Any, rows: Any, sums: Any) -> Function:
    """Runs `function(whole, rows)` on each device's rows and adds up what it returns, in one reduction at the end.

    The automatic partitioner would reduce every weight gradient where it arises, layer by layer. On two CPU devices
    that took the same time; here the program of a device has no communication but the sum, and the exchange of tokens
    where experts are split.

    Args:
      function: (whole, rows) -> tree of sums over rows.
      whole: Tree (or prefix of one) of `PartitionSpec` for the first argument.
      rows: The same for the second, how rows are split.
      sums: The same for the result; what is split there belongs to one device and is not added up.

    Returns:
      A function of the same arguments; `function` itself where there is one device, or where parameters are split along
      another axis than experts.
    """
    if data_devices() == 1 or current_rules().split_parameter_axes - {"experts"}:
        return function

    def local(everything: Any, part: Any) -> Any:
        return jax.tree.map(
            lambda spec, found: found if DATA_AXIS in spec else jax.lax.psum(found, DATA_AXIS),
            sums,
            function(everything, part),
            is_leaf=lambda s: isinstance(s, PartitionSpec),
        )

    return jax.shard_map(local, in_specs=(whole, rows), out_specs=sums, check_vma=False)


def sum_over_tokens(function: Callable[..., jax.Array], num_token_args: int) -> Callable[..., jax.Array]:
    """Sum of `function` over each device's own tokens.

    Args:
      function: Takes `num_token_args` arrays with a leading token axis, for which rows of zeros count nothing, then
        whole ones; returns a scalar.
      num_token_args: How many arguments are split over the data axis.

    Returns:
      A function of the same arguments; `function` itself where tokens are already those of one device.
    """
    devices = data_devices()
    if devices == 1:
        return function
    tokens, whole = PartitionSpec(DATA_AXIS), PartitionSpec()

    def local(*args):
        padded = [jnp.pad(a, ((0, -a.shape[0] % devices), *((0, 0),) * (a.ndim - 1))) for a in args[:num_token_args]]
        specs = (*(tokens for _ in padded), *(whole for _ in args[num_token_args:]))
        parts = jax.shard_map(lambda *a: function(*a)[None], in_specs=specs, out_specs=tokens, check_vma=False)
        return parts(*padded, *args[num_token_args:]).sum()

    return local
