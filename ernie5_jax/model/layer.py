"""One pre-norm decoder layer (ERNIE 4.5 block): attention, then a dense or sparse feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx

from ernie5_jax.config import ModelConfig, RouterConfig
from ernie5_jax.model.experts import RouterStats, RoutingControl, SparseFFN
from ernie5_jax.nn import Attention, AttentionContext, LayerCache, RMSNorm, SwiGLU


class DecoderLayer(nnx.Module):
    """h += Attention(RMSNorm(h)); h += FFN(RMSNorm(h)).

    Args:
      router: Of a sparse layer; None makes it dense.
    """

    def __init__(self, config: ModelConfig, router: RouterConfig | None, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if router is None:
            self.ffn = SwiGLU(config.hidden_size, config.dense_width, config.init_scale, rngs)
        else:
            self.ffn = SparseFFN(config, router, rngs)

    def __call__(
        self,
        hidden: jax.Array,
        context: AttentionContext,
        control: RoutingControl | None = None,
        cache: LayerCache | None = None,
        *,
        return_index: bool = False,
    ) -> tuple[jax.Array, RouterStats | None, LayerCache | None]:
        """hidden [B, S, D] -> (hidden, router statistics of a sparse layer, cache)."""
        attended, cache = self.attention(self.attention_norm(hidden), context, cache)
        hidden = hidden + attended
        normed = self.ffn_norm(hidden)
        if isinstance(self.ffn, SwiGLU):
            return hidden + self.ffn(normed), None, cache
        assert control is not None, "a sparse layer needs its routing control"
        out, stats = self.ffn(normed, control, return_index=return_index)
        return hidden + out, stats, cache
