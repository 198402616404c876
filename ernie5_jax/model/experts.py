"""Mixture-of-experts feed-forward layer: router, dispatch and experts, transport."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig, RouterConfig
from ernie5_jax.kernels.grouped_matmul import moe_ffn, stacked_moe_ffn
from ernie5_jax.model.router import Router
from ernie5_jax.nn import SwiGLU, normal
from ernie5_jax.parallel import over_devices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStats:
    """What one layer's router did; layers are stacked in front by the backbone.

    Attributes:
      counts: float32 [E], (token, rank) pairs of non-PAD tokens sent to each expert.
      eligible_counts: float32 [E], the same over rows in which all experts were enabled (the loads of the bias rule).
      z_loss_sum: [] sum of logsumexp(router_logits)^2 over routed tokens.
      tokens: [] routed tokens.
      expert_index: int32 [B, S, k] on request, else None.
    """

    counts: Any
    eligible_counts: Any
    z_loss_sum: Any
    tokens: Any
    expert_index: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingControl:
    """Per-layer arguments of the router that are not hidden states.

    Attributes:
      bias: [E] selection bias.
      active: bool [B, S], tokens that are routed (not PAD, and their row runs this layer).
      experts: bool [R, E] or None.
      top_k: int32 [R] or None.
      override: int32 [B, S, k] or None, choices to replay.
      stack: (w_in [L, E, D, 2F], w_out [L, E, F, D], int32 [] number of this layer) while decoding, or None.
    """

    bias: Any
    active: Any
    experts: Any = None
    top_k: Any = None
    override: Any = None
    stack: Any = None


def pad_stats(stats: RouterStats, experts: int, num_experts: int, top_k: int) -> RouterStats:
    """Statistics of layers with `experts` experts in the shapes of `num_experts` and `top_k`."""
    index = stats.expert_index
    if index is not None:
        index = jnp.where(index == experts, num_experts, index)
        ranks = [(0, 0)] * (index.ndim - 1) + [(0, top_k - index.shape[-1])]
        index = jnp.pad(index, ranks, constant_values=num_experts)
    missing = [(0, 0)] * (stats.counts.ndim - 1) + [(0, num_experts - experts)]
    counts, eligible = jnp.pad(stats.counts, missing), jnp.pad(stats.eligible_counts, missing)
    return dataclasses.replace(stats, counts=counts, eligible_counts=eligible, expert_index=index)


def zero_stats(num_experts: int, index: jax.Array | None, dtype) -> RouterStats:
    """Stats of a layer that did not run."""
    zeros = jnp.zeros(num_experts, jnp.float32)
    z_loss = jnp.zeros((), jnp.promote_types(dtype, jnp.float32))
    unused = None if index is None else jnp.full_like(index, num_experts)
    return RouterStats(zeros, zeros, z_loss, jnp.zeros((), jnp.float32), unused)


class SparseFFN(nnx.Module):
    """Routed experts and an optional shared expert."""

    def __init__(self, config: ModelConfig, router: RouterConfig, rngs: nnx.Rngs):
        d, f, e = config.hidden_size, config.expert_width, router.num_experts
        scale = config.init_scale
        self.router = Router(d, router, scale, rngs)
        self.w_in = normal(rngs, (e, d, 2 * f), ("experts", "embed", "expert_mlp"), scale)
        self.w_out = normal(rngs, (e, f, d), ("experts", "expert_mlp", "embed"), scale)
        shared = config.shared_expert_width
        self.shared = SwiGLU(d, shared, scale, rngs) if shared else None

    def __call__(self, x: jax.Array, control: RoutingControl, *, return_index: bool) -> tuple[jax.Array, RouterStats]:
        """x [B, S, D] -> output [B, S, D] and statistics. No token is dropped."""
        batch, length, width = x.shape
        num_experts = self.router.config.num_experts
        routing = self.router(
            x,
            control.bias,
            experts=None if control.experts is None else control.experts[:, None],
            top_k=None if control.top_k is None else control.top_k[:, None],
            override=control.override,
        )
        index = jnp.where(control.active[..., None], routing.expert_index, num_experts)
        gates = routing.gates.astype(jnp.promote_types(x.dtype, jnp.float32))
        tokens = (
            x.reshape(batch * length, width),
            gates.reshape(batch * length, -1),
            index.reshape(batch * length, -1),
        )
        if control.stack is not None:
            flat = stacked_moe_ffn(*tokens, *control.stack)
        else:
            weights = (self.w_in[...].astype(x.dtype), self.w_out[...].astype(x.dtype))
            flat = over_devices(moe_ffn)(*tokens, *weights)
        out = flat.reshape(x.shape)
        if self.shared is not None:
            out = out + self.shared(x)
        return out, self._stats(routing.log_z, index, control, return_index)

    def _stats(self, log_z, index, control: RoutingControl, return_index: bool) -> RouterStats:
        num_experts = self.router.config.num_experts
        per_row = jax.vmap(lambda i: jnp.zeros(num_experts, jnp.float32).at[i.reshape(-1)].add(1, mode="drop"))(index)
        if control.experts is None:
            eligible = per_row.sum(0)
        else:
            eligible = jnp.where(control.experts.all(-1)[:, None], per_row, 0).sum(0)
        return RouterStats(
            counts=per_row.sum(0),
            eligible_counts=eligible,
            z_loss_sum=jnp.where(control.active, jnp.square(log_z), 0).sum(),
            tokens=control.active.sum().astype(jnp.float32),
            expert_index=index if return_index else None,
        )
