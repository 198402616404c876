"""The model as pure functions over a nested dict of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.model.unified_model import ModelOutput, UnifiedModel
from ernie5_jax.nn import logical_axes as module_axes

Params = dict[str, Any]


def init_params(config: ModelConfig, seed: int | jax.Array = 0) -> tuple[Params, jax.Array]:
    """Fresh parameters (pure nested dict, float32) and the router bias, zeros [L_routed, E]. Traceable.

    E is the largest number of experts; the bias of experts that a layer does not have is never used.
    """
    # rbg: many small threefry draws would cost more compile time than the model itself.
    model = UnifiedModel(config, nnx.Rngs(params=jax.random.key(seed, impl="rbg")))
    bias = jnp.zeros((config.num_routed_layers, config.router.num_experts), jnp.float32)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), bias


def present_experts(config: ModelConfig) -> np.ndarray:
    """bool [L_routed, E]: experts that a layer has."""
    return np.arange(config.router.num_experts) < np.array(config.layer_experts)[:, None]


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
