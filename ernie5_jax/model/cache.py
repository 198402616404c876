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
      keys: One array [count, B, K, H, M] per stack. values: [count, B, K, M, H]: the products of attention read both as
        they lie.
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
    counts, heads, width = [stack.count for stack in config.stacks], config.num_kv_heads, config.head_dim
    return KVCache(
        keys=tuple(jnp.zeros((count, batch, heads, width, capacity), dtype) for count in counts),
        values=tuple(jnp.zeros((count, batch, heads, capacity, width), dtype) for count in counts),
        bounds=jnp.zeros((batch, capacity, bounds), jnp.int32),
        segment=jnp.zeros((batch, capacity), jnp.int32),
    )
