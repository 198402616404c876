"""The model as pure functions over a nested dict of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.model.unified_model import ModelOutput, UnifiedModel
from ernie5_jax.nn import logical_axes as module_axes

Params = dict[str, Any]


def num_routed_layers(config: ModelConfig) -> int:
    """L_routed, layers that have a router."""
    return config.num_moe_layers + config.num_codec_layers


def init_params(config: ModelConfig, seed: int | jax.Array = 0) -> tuple[Params, jax.Array]:
    """Fresh parameters (pure nested dict, float32) and the router bias, zeros [L_routed, E]. Traceable."""
    # rbg: many small threefry draws would cost more compile time than the model itself.
    model = UnifiedModel(config, nnx.Rngs(params=jax.random.key(seed, impl="rbg")))
    bias = jnp.zeros((num_routed_layers(config), config.router.num_experts), jnp.float32)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), bias


def logical_axes(config: ModelConfig) -> Params:
    """Tuple of logical axis names of every parameter, in the structure of `init_params`."""
    return module_axes(nnx.eval_shape(lambda: UnifiedModel(config, nnx.Rngs(params=0))))


def make_apply(config: ModelConfig) -> Callable[..., ModelOutput]:
    """`apply(params, router_bias, batch, mask=None, **kwargs)`, a pure function; see `UnifiedModel.__call__`."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: UnifiedModel(config, nnx.Rngs(params=0))))

    def apply(params: Params, router_bias: jax.Array, batch, mask=None, **kwargs) -> ModelOutput:
        state = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(batch, router_bias, mask, **kwargs)

    return apply
