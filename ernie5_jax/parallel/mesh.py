"""The device mesh."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

from ernie5_jax.config import ConfigError, ParallelConfig

DATA_AXIS = "data"


def make_mesh(config: ParallelConfig) -> Mesh:
    """A mesh with the single automatic axis "data" over the first `config.data` devices (0 = all).

    Raises:
      ConfigError: More devices are asked for than there are.
    """
    devices = jax.devices()
    size = config.data or len(devices)
    if size > len(devices):
        raise ConfigError(f"config key 'parallel.data': found {size}, allowed: 0 ... {len(devices)} (devices present)")
    return jax.make_mesh((size,), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices[:size])


def has_data_axis() -> bool:
    """Whether a mesh with several devices along the data axis is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return DATA_AXIS in mesh.axis_names and mesh.shape[DATA_AXIS] > 1


def divided_by_hand() -> bool:
    """Whether a `shard_map` has divided the data axis: arrays are those of one device."""
    return DATA_AXIS in jax.sharding.get_abstract_mesh().manual_axes


def data_devices() -> int:
    """Devices that rows are still to be divided over: 1 without a mesh, or where a `shard_map` divided them."""
    return jax.sharding.get_abstract_mesh().shape[DATA_AXIS] if has_data_axis() and not divided_by_hand() else 1
