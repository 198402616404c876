"""From slots to hidden vectors: the only place, with heads and codec feedback, that knows modalities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.nn import Linear, RMSNorm, normal
from ernie5_jax.sequence.types import Batch


class Embedding(nnx.Module):
    """Text table, visual projection with scale embeddings, `vision_input` of understood patches, codec tables."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, scale = config.hidden_size, config.init_scale
        self.text = normal(rngs, (config.vocab_size, d), ("vocab", "embed"), scale)
        self.visual = Linear((config.visual_bits, d), ("bits", "embed"), scale, rngs)
        self.visual_scale = normal(rngs, (config.visual_scales, d), ("scales", "embed"), scale)
        # Encoder features have a scale of their own; text and patches must start alike for the layers above.
        self.vision_norm = RMSNorm(config.vision_feature_dim, config.norm_eps)
        self.vision_input = Linear((config.vision_feature_dim, d), ("features", "embed"), scale, rngs)
        levels, codes = config.audio_levels, config.audio_bins + 1
        if levels:
            self.codec = normal(rngs, (levels, codes, d), ("levels", "codes", "embed"), scale)

    def tokens(self, token: jax.Array) -> jax.Array:
        """Text embeddings [..., D] of ids [...]."""
        return self.text[...][token]

    def codes(self, level: int, code: jax.Array) -> jax.Array:
        """Feedback vectors [..., D] of codes [...] of one codec level; row `bins` is EOA."""
        return self.codec[...][level][code]

    def __call__(self, batch: Batch) -> jax.Array:
        """Input vectors [B, S, D] of all positions."""
        hidden = self.tokens(batch.token)
        rows = jnp.arange(batch.token.shape[0])[:, None]
        for name, slots in sorted(batch.inputs.items()):
            vectors = getattr(self, f"_{name}_vectors")(slots.values)
            hidden = hidden.at[rows, slots.index].set(vectors.astype(hidden.dtype), mode="drop")
        return hidden

    def _visual_vectors(self, values: dict[str, jax.Array]) -> jax.Array:
        features = values["features"].astype(self.text[...].dtype)
        return self.visual(features) + self.visual_scale[...][values["scale"]]

    def _understand_vectors(self, values: dict[str, jax.Array]) -> jax.Array:
        features = values["features"].astype(self.text[...].dtype)
        return self.vision_input(self.vision_norm(features).reshape(*features.shape[:2], -1))

    def _audio_vectors(self, values: dict[str, jax.Array]) -> jax.Array:
        codes = values["codes"]
        return sum((self.codes(level, codes[..., level]) for level in range(codes.shape[-1])), jnp.zeros(()))
