"""Grouped-query self-attention with an optional key-value cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.kernels.attention import attention, cached_attention
from ernie5_jax.nn.linear import Linear
from ernie5_jax.nn.rope import apply_rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """What every layer's attention needs to know about the positions, made once per forward.

    Attributes:
      cos, sin: [B, S, H / 2] rotary turns of the queries and new keys.
      q_rows, q_segment: int32 [B, S].
      k_rows, k_segment: int32 [B, Sk]; Sk = S without a cache.
      bounds: int32 [B, Sk, n] column bounds.
    """

    cos: Any
    sin: Any
    q_rows: Any
    q_segment: Any
    k_rows: Any
    k_segment: Any
    bounds: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of a whole stack and the number of one layer in it: written in place, never sliced and put back.

    Attributes:
      keys: [count, B, K, H, M]. values: [count, B, K, M, H].
      number: int32 [].
    """

    keys: Any
    values: Any
    number: Any

    def extended(self, k: jax.Array, v: jax.Array, rows: jax.Array) -> LayerCache:
        """With new keys and values [B, S, K, H] of this layer at rows int32 [B, S]; rows >= M are dropped."""
        sequence = jnp.arange(rows.shape[0])[:, None]
        keys = self.keys.at[self.number, sequence, :, :, rows].set(k.astype(self.keys.dtype), mode="drop")
        values = self.values.at[self.number, sequence, :, rows].set(v.astype(self.values.dtype), mode="drop")
        return dataclasses.replace(self, keys=keys, values=values)

    def of_layer(self) -> tuple[jax.Array, jax.Array]:
        """Keys [B, K, H, M] and values [B, K, M, H] of this layer."""
        keys, values = (jax.lax.dynamic_index_in_dim(x, self.number, 0, False) for x in (self.keys, self.values))
        return keys, values


class Attention(nnx.Module):
    """Pre-normalised input -> attention output, no biases (ERNIE 4.5)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, h, scale = config.hidden_size, config.head_dim, config.init_scale
        self.query = Linear((d, config.num_heads * h), ("embed", "heads"), scale, rngs)
        self.key = Linear((d, config.num_kv_heads * h), ("embed", "kv_heads"), scale, rngs)
        self.value = Linear((d, config.num_kv_heads * h), ("embed", "kv_heads"), scale, rngs)
        self.out = Linear((config.num_heads * h, d), ("heads", "embed"), scale, rngs)
        self.head_dim = h
        self.pairing = config.rope_pairing

    def __call__(
        self, x: jax.Array, context: AttentionContext, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends.

        Args:
          x: [B, S, D].
          context: Positions and mask.
          cache: Of the layer's stack; the new keys and values are written at rows `context.q_rows` (rows >= M are not).

        Returns:
          [B, S, D] and the cache with the new keys and values, or None.
        """
        batch, length, _ = x.shape
        q = self.query(x).reshape(batch, length, -1, self.head_dim)
        k = self.key(x).reshape(batch, length, -1, self.head_dim)
        v = self.value(x).reshape(batch, length, -1, self.head_dim)
        q = apply_rope(q, context.cos, context.sin, self.pairing)
        k = apply_rope(k, context.cos, context.sin, self.pairing)
        where = {
            "bounds": context.bounds,
            "q_segment": context.q_segment,
            "k_segment": context.k_segment,
            "q_rows": context.q_rows,
            "k_rows": context.k_rows,
        }
        if cache is None:
            out = attention(q, k, v, **where)
        else:
            cache = cache.extended(k, v, context.q_rows)
            out = cached_attention(q, *cache.of_layer(), **where)
        return self.out(out.reshape(batch, length, -1)), cache
