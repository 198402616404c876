"""Data parallelism over whole parameters: every device works on its own rows, and all results are summed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ernie5_jax.parallel.mesh import DATA_AXIS, data_devices
from ernie5_jax.parallel.sharding import current_rules

Sums = Any


def sum_over_devices(function: Callable[[Any, Any], Sums], rows: Any) -> Callable[[Any, Any], Sums]:
    """Runs `function(whole, rows)` on each device's rows and adds up what it returns, in one reduction at the end.

    The automatic partitioner would reduce every weight gradient where it arises, layer by layer. On two CPU devices
    that took the same time; here the program of a device has no communication but the sum.

    Args:
      function: (whole, rows) -> tree of sums over rows.
      rows: Tree of `PartitionSpec`, how the second argument is split.

    Returns:
      A function of the same arguments; `function` itself where there is one device or parameters are split.
    """
    if data_devices() == 1 or current_rules().splits_parameters:
        return function

    def local(whole: Any, part: Any) -> Sums:
        return jax.lax.psum(function(whole, part), DATA_AXIS)

    return jax.shard_map(local, in_specs=(PartitionSpec(), rows), out_specs=PartitionSpec(), check_vma=False)
