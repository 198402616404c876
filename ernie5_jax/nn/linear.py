"""Dense matmuls and the SwiGLU feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx
from jax import lax

from ernie5_jax.kernels.grouped_matmul import swiglu
from ernie5_jax.nn.parameters import normal


@jax.custom_vjp
def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., I] @ w [I, O] -> [..., O]; the one entry of every dense matmul.

    The backward transposes x before the weight gradient: XLA:CPU runs a dot that contracts over the rows of its left
    operand at a third of the speed; elsewhere the copy is fused away.
    """
    return x @ w


def _dot_forward(x, w):
    return x @ w, (x, w)


def _dot_backward(residuals, g):
    x, w = residuals
    rows, grad = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return g @ w.T, lax.optimization_barrier(rows.T) @ grad


dot.defvjp(_dot_forward, _dot_backward)


class Linear(nnx.Module):
    """x @ kernel without bias, kernel [in, out]."""

    def __init__(self, shape: tuple[int, int], axes: tuple[str, str], scale: float, rngs: nnx.Rngs):
        self.kernel = normal(rngs, shape, axes, scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        return dot(x, self.kernel[...].astype(x.dtype))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), no biases (ERNIE 4.5)."""

    def __init__(self, hidden_size: int, width: int, scale: float, rngs: nnx.Rngs):
        self.w_in = Linear((hidden_size, 2 * width), ("embed", "mlp"), scale, rngs)
        self.w_out = Linear((width, hidden_size), ("mlp", "embed"), scale, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w_out(swiglu(self.w_in(x)))
