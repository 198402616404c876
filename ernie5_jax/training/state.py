"""The training state: a pure nested dict of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ernie5_jax.compiling import cpu_optimization
from ernie5_jax.config import ExperimentConfig, ModelConfig
from ernie5_jax.model import init_params, logical_axes
from ernie5_jax.parallel import ShardingRules, tree_shardings
from ernie5_jax.training.objective import MODALITIES
from ernie5_jax.training.optimizer import init_optimizer

TrainState = dict[str, Any]


def init_state(config: ExperimentConfig) -> TrainState:
    """State before the first step; a pure, traceable function of the configuration.

    Keys: step int32 []; params; ema_params (same tree, {} when `optimizer.ema_decay` is 0); opt_state {mu, nu};
    router_bias float32 [L_routed, E]; loss_weight_ema {modality: float32 [], 0 = never observed}; rng uint32 [2].
    """
    return state_from(config, *init_params(config.model, config.seed))


def state_from(config: ExperimentConfig, params: Any, router_bias: Any, step: int = 0) -> TrainState:
    """A state that starts from given parameters: moments are zero, the average is the parameters themselves."""
    return {
        "step": jnp.asarray(step, jnp.int32),
        "params": params,
        "ema_params": jax.tree.map(jnp.copy, params) if config.optimizer.ema_decay else {},
        "opt_state": init_optimizer(params),
        "router_bias": router_bias,
        "loss_weight_ema": {name: jnp.zeros((), jnp.float32) for name in MODALITIES},
        "rng": jax.random.key_data(jax.random.key(config.seed)),
    }


def abstract_state(config: ExperimentConfig) -> TrainState:
    """Shapes and types of `init_state`, nothing is computed."""
    params, router_bias = _abstract_params(config.model)
    return jax.eval_shape(lambda p, b: state_from(config, p, b), params, router_bias)


@functools.lru_cache(maxsize=8)
def _abstract_params(model: ModelConfig) -> Any:
    return jax.eval_shape(lambda: init_params(model))


@functools.lru_cache(maxsize=8)
def parameter_axes(model: ModelConfig) -> Any:
    """`model.logical_axes`, computed once."""
    return logical_axes(model)


def state_shardings(config: ExperimentConfig, mesh: Mesh, rules: ShardingRules) -> TrainState:
    """Sharding of every array of the state: parameters and their moments by the rules, the rest replicated."""
    shapes, axes = abstract_state(config), parameter_axes(config.model)
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: whole, shapes)
    params = tree_shardings(mesh, rules, shapes["params"], axes)
    shardings["params"] = params
    shardings["opt_state"] = {"mu": params, "nu": params}
    if shapes["ema_params"]:
        shardings["ema_params"] = params
    return shardings


def sharded_abstract_state(config: ExperimentConfig, mesh: Mesh, rules: ShardingRules) -> TrainState:
    """`abstract_state` with shardings: what a checkpoint is restored into."""
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        abstract_state(config),
        state_shardings(config, mesh, rules),
    )


def make_state(config: ExperimentConfig, mesh: Mesh, rules: ShardingRules) -> TrainState:
    """`init_state`, every array created where it belongs."""
    return compile_init(config, mesh, rules)()


def compile_init(config: ExperimentConfig, mesh: Mesh, rules: ShardingRules) -> Callable[[], TrainState]:
    """`make_state`, compiled."""
    shardings = state_shardings(config, mesh, rules)
    options = cpu_optimization(0, mesh.devices.flat[0].platform)  # it runs once
    return jax.jit(lambda: init_state(config), out_shardings=shardings, compiler_options=options).lower().compile()


def evaluation_params(state: TrainState) -> Any:
    """Parameters that evaluation and generation use: the average if there is one."""
    return state["ema_params"] or state["params"]
