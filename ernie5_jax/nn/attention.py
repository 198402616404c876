"""Grouped-query self-attention with an optional key-value cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.kernels.attention import attention
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
        self, x: jax.Array, context: AttentionContext, cache: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Attends.

        Args:
          x: [B, S, D].
          context: Positions and mask.
          cache: Keys and values [B, M, K, H]; the new ones are written at rows `context.q_rows` (rows >= M are not).

        Returns:
          [B, S, D] and the cache with the new keys and values, or None.
        """
        batch, length, _ = x.shape
        q = self.query(x).reshape(batch, length, -1, self.head_dim)
        k = self.key(x).reshape(batch, length, -1, self.head_dim)
        v = self.value(x).reshape(batch, length, -1, self.head_dim)
        q = apply_rope(q, context.cos, context.sin, self.pairing)
        k = apply_rope(k, context.cos, context.sin, self.pairing)
        if cache is not None:
            rows = (jnp.arange(batch)[:, None], context.q_rows)
            k = cache[0].at[rows].set(k.astype(cache[0].dtype), mode="drop")
            v = cache[1].at[rows].set(v.astype(cache[1].dtype), mode="drop")
            cache = (k, v)
        out = attention(
            q,
            k,
            v,
            bounds=context.bounds,
            q_segment=context.q_segment,
            k_segment=context.k_segment,
            q_rows=context.q_rows,
            k_rows=context.k_rows,
        )
        return self.out(out.reshape(batch, length, -1)), cache
