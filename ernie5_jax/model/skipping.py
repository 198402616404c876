"""A layer that a traced flag may skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Layer = Callable[[Any, Any], Any]


def run_if(flag: jax.Array, run: Layer, skip: Layer, given: Any, fixed: Any) -> Any:
    """`lax.cond(flag, run, skip, given, fixed)`, differentiable in `given` by reverse mode.

    The transpose of `lax.cond` keeps every residual of its branches as an output, the weights among them: in a loop
    over layers that stacks a second copy of all parameters. Here residuals that were handed in are read where they lie.

    Args:
      flag: bool [].
      run, skip: (given, fixed) -> result; trees of equal shapes.
      given: Tree of float arrays.
      fixed: Tree of arrays that get no gradient.
    """

    @jax.custom_vjp
    def call(flag, given, fixed):
        return jax.lax.cond(flag, run, skip, given, fixed)

    pull = {True: _Pullback(run), False: _Pullback(skip)}

    def forward(flag, given, fixed):
        shapes = {taken: jax.eval_shape(p.forward, given, fixed)[1] for taken, p in pull.items()}

        def branch(taken):
            def go(given, fixed):
                out, kept = pull[taken].forward(given, fixed)
                return out, {taken: kept, not taken: _zeros(shapes[not taken])}

            return go

        out, kept = jax.lax.cond(flag, branch(True), branch(False), given, fixed)
        return out, (flag, given, fixed, kept)

    def backward(residuals, cotangent):
        flag, given, fixed, kept = residuals

        def branch(taken):
            return lambda: pull[taken].backward(kept[taken], given, fixed, cotangent)

        return None, jax.lax.cond(flag, branch(True), branch(False)), None

    call.defvjp(forward, backward)
    return call(flag, given, fixed)


class _Pullback:
    """The two halves of `jax.vjp` of a branch, and which of its residuals are arguments."""

    def __init__(self, function: Layer):
        self._function = function

    def forward(self, given: Any, fixed: Any) -> tuple[Any, list[jax.Array]]:
        """The value, and residuals that were not handed in."""
        out, pull = jax.vjp(lambda g: self._function(g, fixed), given)
        leaves, self._tree = jax.tree.flatten(pull)
        numbers = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((given, fixed)))}
        self._argument = [numbers.get(id(leaf)) for leaf in leaves]
        return out, [leaf for leaf, number in zip(leaves, self._argument, strict=True) if number is None]

    def backward(self, kept: list[jax.Array], given: Any, fixed: Any, cotangent: Any) -> Any:
        arguments, rest = jax.tree.leaves((given, fixed)), iter(kept)
        leaves = [next(rest) if number is None else arguments[number] for number in self._argument]
        (gradient,) = jax.tree.unflatten(self._tree, leaves)(cotangent)
        return gradient


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
