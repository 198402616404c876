"""Mesh, sharding rules and where expert computation runs."""

from ernie5_jax.parallel.data import sum_over_devices
from ernie5_jax.parallel.expert import on_local_tokens
from ernie5_jax.parallel.mesh import DATA_AXIS, make_mesh
from ernie5_jax.parallel.sharding import (
    PRESETS,
    ShardingError,
    ShardingRules,
    constrain,
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
    "make_mesh",
    "on_local_tokens",
    "path_name",
    "preset",
    "sum_over_devices",
    "tree_shardings",
    "use_rules",
]
