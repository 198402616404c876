"""Next-codec prediction inside the top layers (ERNIE 5.0 section 2.3.2; DnD-Transformer).

After a codec layer its levels are read in turn: head n reads the residual stream at codec-target positions, then the
embedding of the chosen code is added there, before head n + 1 or the next layer.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.model.embedding import Embedding
from ernie5_jax.model.heads import CodecHead, gather_slots
from ernie5_jax.nn import select_module, stack_modules

ChooseCode = Callable[[int, jax.Array], jax.Array]
"""(level, logits [B, N, bins + 1]) -> codes int32 [B, N]: teacher forcing in training, sampling in generation."""


class CodecHeads(nnx.Module):
    """Heads of all Q levels."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.heads = stack_modules(lambda r: CodecHead(config, r), config.audio_levels, rngs)
        self.levels = config.audio_levels
        self.levels_per_layer = config.levels_per_codec_layer

    def __call__(
        self, layer: int, hidden: jax.Array, index: jax.Array, embedding: Embedding, choose: ChooseCode
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Reads the levels of codec layer number `layer`.

        Args:
          layer: 0 is the first codec layer.
          hidden: [B, S, D] after that layer.
          index: int32 [B, N], positions whose target is a codec frame or EOA.
          embedding: Owner of the feedback tables.
          choose: Which code to feed back.

        Returns:
          hidden with the feedback added, logits [B, N, levels, bins + 1], codes int32 [B, N, levels].
        """
        rows = jnp.arange(hidden.shape[0])[:, None]
        first = layer * self.levels_per_layer
        logits, codes = [], []
        at_slots = gather_slots(hidden, index)
        feedback = jnp.zeros_like(at_slots)
        for level in range(first, min(first + self.levels_per_layer, self.levels)):
            logits.append(select_module(self.heads, level)(at_slots + feedback))
            codes.append(choose(level, logits[-1]))
            if level < self.levels - 1:
                feedback = feedback + embedding.codes(level, codes[-1]).astype(hidden.dtype)
        hidden = hidden.at[rows, index].add(feedback, mode="drop")
        return hidden, jnp.stack(logits, axis=2), jnp.stack(codes, axis=2)
