"""Output heads; each runs on the target slots of its kind only."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.kernels.cross_entropy import linear_cross_entropy
from ernie5_jax.nn import Linear, RMSNorm, at_least_float32, dot
from ernie5_jax.parallel import sum_over_tokens


def gather_slots(hidden: jax.Array, index: jax.Array) -> jax.Array:
    """Hidden vectors [B, N, D] at positions `index` [B, N] of [B, S, D]; empty slots read the last position."""
    return jnp.take_along_axis(hidden, jnp.minimum(index, hidden.shape[1] - 1)[..., None], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Readout:
    """What a text head reads, and its matrix: a loss does not need all logits at once.

    Attributes:
      hidden: [..., D], normalised.
      kernel: [D, V].
    """

    hidden: Any
    kernel: Any

    @property
    def logits(self) -> jax.Array:
        """[..., V] in float32 or better."""
        return at_least_float32(dot(self.hidden, self.kernel))

    def cross_entropy(self, labels: jax.Array, weight: jax.Array) -> jax.Array:
        """Sum of weight times -log p(label), [] in float32 or better: int [...], float [...]."""
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return sum_over_tokens(linear_cross_entropy, 3)(hidden, labels.reshape(-1), weight.reshape(-1), self.kernel)


class BitHead(nnx.Module):
    """One logit per bit, p(bit = 1) = sigmoid(logit): Infinity's bitwise classifier as C two-way decisions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.out = Linear((config.hidden_size, config.visual_bits), ("embed", "bits"), config.init_scale, rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[B, N, D] -> logits [B, N, C] in float32 or better."""
        return at_least_float32(self.out(self.norm(hidden)))


class CodecHead(nnx.Module):
    """Logits of one codec level, EOA (class `bins`) included: norm and linear of its own."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.out = Linear((config.hidden_size, config.audio_bins + 1), ("embed", "codes"), config.init_scale, rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[B, N, D] -> logits [B, N, bins + 1] in float32 or better."""
        return at_least_float32(self.out(self.norm(hidden)))
