"""Multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437 section 2.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.model.embedding import Embedding
from ernie5_jax.model.layer import DecoderLayer
from ernie5_jax.nn import AttentionContext, Linear, RMSNorm


class MTPModule(nnx.Module):
    """h' = block(M [RMSNorm(h); RMSNorm(Emb(token))]); one dense block, no bias, outside the elastic mask."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d = config.hidden_size
        self.hidden_norm = RMSNorm(d, config.norm_eps)
        self.token_norm = RMSNorm(d, config.norm_eps)
        self.merge = Linear((2 * d, d), ("embed_pair", "embed"), config.init_scale, rngs)
        self.block = DecoderLayer(config, None, rngs)
        self.out_norm = RMSNorm(d, config.norm_eps)

    def __call__(self, hidden: jax.Array, token: jax.Array, embedding: Embedding, context: AttentionContext):
        """One module.

        Args:
          hidden: [B, S, D] of the main stack or the module before.
          token: int32 [B, S], id at i + d, -1 where it is not text: the embedding half is zero there.

        Returns:
          Hidden vectors for the next module and normalised ones for the text head, [B, S, D] each.
        """
        embedded = self.token_norm(embedding.tokens(jnp.maximum(token, 0)).astype(hidden.dtype))
        embedded = jnp.where((token >= 0)[..., None], embedded, 0)
        merged = self.merge(jnp.concatenate([self.hidden_norm(hidden), embedded], axis=-1))
        hidden, _, _ = self.block(merged, context)
        return hidden, self.out_norm(hidden)
