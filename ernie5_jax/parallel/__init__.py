"""Mesh, sharding rules and where expert computation runs."""

from ernie5_jax.parallel.data import sum_over_devices, sum_over_tokens
from ernie5_jax.parallel.expert import on_any_device, over_devices
from ernie5_jax.parallel.mesh import DATA_AXIS, make_mesh
from ernie5_jax.parallel.sharding import (
    PRESETS,
    ShardingError,
    ShardingRules,
    constrain,
    current_rules,
    path_name,
    preset,
    tree_shardings,
    use_rules,
)

__all__ = [
    "DATA_AXIS",
    "PRESETS",
    "ShardingError",
    "ShardingRules",
    "constrain",
    "current_rules",
    "make_mesh",
    "on_any_device",
    "over_devices",
    "path_name",
    "preset",
    "sum_over_devices",
    "sum_over_tokens",
    "tree_shardings",
    "use_rules",
]
