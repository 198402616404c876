"""Keys and values of the positions already seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ernie5_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """State of generation; a pytree.

    Attributes:
      keys, values: One array [count, B, M, K, H] per stack.
      bounds: int32 [B, M, n] of each cached key.
      segment: int32 [B, M], 0 where nothing has been written.
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    bounds: Any
    segment: Any

    @property
    def capacity(self) -> int:
        """M, rows of the cache."""
        return self.segment.shape[1]


def empty_cache(config: ModelConfig, batch: int, capacity: int, *, bounds: int = 2, dtype=jnp.float32) -> KVCache:
    """A cache for `batch` sequences of up to `capacity` positions."""
    shapes = [(stack.count, batch, capacity, config.num_kv_heads, config.head_dim) for stack in config.stacks]
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        values=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        bounds=jnp.zeros((batch, capacity, bounds), jnp.int32),
        segment=jnp.zeros((batch, capacity), jnp.int32),
    )
