"""The shared router: it sees hidden states and nothing else (ERNIE 5.0 section 2.1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import RouterConfig
from ernie5_jax.nn import at_least_float32, normal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Choices of one layer.

    Attributes:
      expert_index: int32 [B, S, k], E where the rank is not used.
      gates: [B, S, k], sum 1 over the used ranks.
      log_z: [B, S], logsumexp of the router logits of live experts.
      probs: [B, S, E], scores before the bias.
    """

    expert_index: Any
    gates: Any
    log_z: Any
    probs: Any


def choose_experts(
    logits: jax.Array,
    bias: jax.Array,
    config: RouterConfig,
    *,
    experts: jax.Array | None = None,
    top_k: jax.Array | None = None,
    override: jax.Array | None = None,
) -> Routing:
    """Biased selection, unbiased gates (arXiv 2408.15664; elastic rules of decisions section 3).

    Args:
      logits: [B, S, E] in float32 or better.
      bias: [E], moves the selection only; no gradient.
      experts: bool broadcastable to [B, S, E], experts that may be chosen; None = all.
      top_k: int32 broadcastable to [B, S], ranks used; None = all `config.top_k`.
      override: int32 [B, S, k] choices to use instead (replayed routing); E = unused rank.

    Returns:
      The `Routing`.
    """
    num_experts, k = config.num_experts, config.top_k
    if experts is not None:
        # Before the softmax, so that z-loss, entropy and scores see the live experts only.
        logits = jnp.where(experts, logits, -jnp.inf)
    probs = jax.nn.softmax(logits, axis=-1) if config.scoring == "softmax" else jax.nn.sigmoid(logits)
    if override is None:
        biased = jax.lax.stop_gradient(probs) + jax.lax.stop_gradient(bias)
        if experts is not None:
            biased = jnp.where(experts, biased, -jnp.inf)
        best, index = jax.lax.top_k(biased, k)
        live = best > -jnp.inf
    else:
        index, live = jnp.minimum(override, num_experts - 1), override < num_experts
    if top_k is not None:
        live &= jnp.arange(k) < top_k[..., None]
    gates = jnp.where(live, jnp.take_along_axis(probs, index, axis=-1), 0)
    gates = gates / jnp.maximum(gates.sum(-1, keepdims=True), config.norm_min)
    index = jnp.where(live, index, num_experts).astype(jnp.int32)
    return Routing(index, gates, jax.nn.logsumexp(logits, axis=-1), probs)


class Router(nnx.Module):
    """Linear scores in float32, no bias term."""

    def __init__(self, hidden_size: int, config: RouterConfig, scale: float, rngs: nnx.Rngs):
        self.kernel = normal(rngs, (hidden_size, config.num_experts), ("embed", "router_experts"), scale)
        self.config = config

    def __call__(self, x: jax.Array, bias: jax.Array, **limits: jax.Array | None) -> Routing:
        """x [B, S, D] -> `Routing`; `limits` as in `choose_experts`."""
        x = at_least_float32(x)
        # Accelerators round the factors of a default float32 product to fewer bits, which would move near ties.
        logits = jnp.matmul(x, self.kernel[...].astype(x.dtype), precision=jax.lax.Precision.HIGHEST)
        return choose_experts(logits, bias, self.config, **limits)
