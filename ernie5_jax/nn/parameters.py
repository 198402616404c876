"""Parameters with logical axis names, and stacks of equal layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

LAYERS = "layers"
"""Logical axis of the leading dimension of stacked parameters."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], scale: float) -> nnx.Param:
    """A Param drawn from N(0, scale^2) whose dimensions carry the logical names `axes`."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def constant(shape: tuple[int, ...], axes: tuple[str, ...], value: float) -> nnx.Param:
    """A Param filled with `value`."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


def logical_axes(module: nnx.Module) -> dict[str, Any]:
    """Pure dict like `nnx.to_pure_dict(nnx.state(module))` with a tuple of axis names per parameter.

    Axes gained by stacking come first and are named "layers".
    """
    state = nnx.state(module, nnx.Param)

    def names(variable: nnx.Variable) -> tuple[str, ...]:
        axes = tuple(variable.get_metadata()["axes"])
        return (LAYERS,) * (variable.get_value().ndim - len(axes)) + axes

    return nnx.to_pure_dict(jax.tree.map(names, state, is_leaf=lambda v: isinstance(v, nnx.Variable)))


def stack_modules(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """`count` modules of one kind as a single module whose parameters have a leading axis [count].

    Run them with `lax.scan` over the parameters, or pick one with `select_module`.
    """
    keys = jax.random.split(rngs.params(), count)
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(params=key))))(keys)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    return nnx.merge(graph, state)


def select_module(stacked: nnx.Module, index: int) -> Any:
    """Module number `index` of a stack."""
    graph, state = nnx.split(stacked)
    return nnx.merge(graph, jax.tree.map(lambda a: a[index], state))
