"""AdamW with decoupled decay, clipping and an average of the parameters, on pure trees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ernie5_jax.config import OptimizerConfig
from ernie5_jax.nn import LAYERS

Tree = Any


def decay_labels(axes: Tree) -> Tree:
    """True where weight decay applies: matrices. Told by logical axes, because stacking adds one to every shape.

    Args:
      axes: Tuple of logical axis names per parameter.
    """
    return jax.tree.map(
        lambda names: sum(n != LAYERS for n in names) >= 2, axes, is_leaf=lambda n: isinstance(n, tuple)
    )


def init_optimizer(params: Tree) -> dict[str, Tree]:
    """First and second moments, zeros."""
    return {"mu": jax.tree.map(jnp.zeros_like, params), "nu": jax.tree.map(jnp.zeros_like, params)}


def global_norm(tree: Tree) -> jax.Array:
    """Euclidean norm of all leaves together, float32."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(tree)), jnp.zeros(())))


def adamw_update(
    params: Tree,
    grads: Tree,
    opt_state: dict[str, Tree],
    *,
    step: jax.Array,
    rate: jax.Array,
    norm: jax.Array,
    accepted: jax.Array,
    labels: Tree,
    config: OptimizerConfig,
) -> tuple[Tree, dict[str, Tree]]:
    """One step: p -= rate * (m_hat / (sqrt(v_hat) + eps) + decay * p), decay on matrices only.

    Args:
      step: int32 [], steps taken before this one.
      rate: Learning rate.
      norm: `global_norm(grads)`; gradients longer than `clip_norm` are shortened to it.
      accepted: bool []; where False nothing changes.
      labels: `decay_labels` of the parameters.
    """
    b1, b2 = config.beta1, config.beta2
    count = (step + 1).astype(jnp.float32)
    correct1, correct2 = 1 - b1**count, 1 - b2**count
    clip = jnp.minimum(1, config.clip_norm / jnp.maximum(norm, 1e-16)) if config.clip_norm else jnp.ones(())

    def one(p, g, m, v, matrix):
        g = g.astype(p.dtype) * clip.astype(p.dtype)
        m = jnp.where(accepted, b1 * m + (1 - b1) * g, m).astype(p.dtype)
        v = jnp.where(accepted, b2 * v + (1 - b2) * g * g, v).astype(p.dtype)
        # Read anew below: XLA would compute them twice and copy the old ones to be able to.
        m, v = jax.lax.optimization_barrier((m, v))
        change = (m / correct1) / (jnp.sqrt(v / correct2) + config.eps)
        if matrix and config.weight_decay:
            change = change + config.weight_decay * p
        return jnp.where(accepted, p - rate * change, p).astype(p.dtype), m, v

    results = jax.tree.map(one, params, grads, opt_state["mu"], opt_state["nu"], labels)
    outer = jax.tree.structure(params)
    new, mu, nu = jax.tree.transpose(outer, jax.tree.structure((0, 0, 0)), results)
    return new, {"mu": mu, "nu": nu}


def average(ema: Tree, params: Tree, step: jax.Array, decay: float) -> Tree:
    """Exponential moving average after step number `step` (from 0); short at first: min(decay, (1 + t) / (10 + t))."""
    t = step.astype(jnp.float32)
    d = jnp.minimum(decay, (1 + t) / (10 + t))
    return jax.tree.map(lambda e, p: (d * e + (1 - d) * p).astype(e.dtype), ema, params)
