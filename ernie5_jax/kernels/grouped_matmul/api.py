"""Sparse feed-forward layer: each token through its chosen experts."""

from __future__ import annotations

import jax

from ernie5_jax.kernels.grouped_matmul.blocks import block_forward, block_moe
from ernie5_jax.kernels.grouped_matmul.grouped import megablox_moe, ragged_moe
from ernie5_jax.kernels.grouped_matmul.reference import dense_moe

_BACKENDS = {"dense": dense_moe, "blocks": block_moe, "ragged": ragged_moe, "megablox": megablox_moe}


def stacked_moe_ffn(
    x: jax.Array, gates: jax.Array, expert_index: jax.Array, w_in: jax.Array, w_out: jax.Array, layer: jax.Array
) -> jax.Array:
    """`moe_ffn` with the weights of one layer out of a stack, for decoding: only those of chosen experts are read.

    Slicing the layer out first would copy all of its experts for a handful of tokens. Has no gradient.

    Args:
      x, gates, expert_index: As in `moe_ffn`.
      w_in: [L, E, D, 2F]. w_out: [L, E, F, D].
      layer: int32 [], which one.
    """
    return block_forward(x, gates, expert_index, w_in, w_out, layer)


def moe_ffn(
    x: jax.Array,
    gates: jax.Array,
    expert_index: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """y_t = sum_r gates[t, r] * SwiGLU_{expert_index[t, r]}(x_t), no token dropped.

    Args:
      x: [T, D].
      gates: [T, k].
      expert_index: int32 [T, k]; the value E means that this rank is not used.
      w_in: [E, D, 2F], gate half first. w_out: [E, F, D].
      implementation: "dense" (oracle), "blocks" (loops over the rows in use), "ragged" (`lax.ragged_dot`) or
        "megablox" (TPUs only). None takes "blocks" where CPUs are the default, else "ragged".

    Returns:
      [T, D].

    Raises:
      ValueError: Unknown backend.
    """
    if implementation not in (None, *_BACKENDS):
        raise ValueError(f"implementation: found {implementation!r}, allowed: None, {', '.join(_BACKENDS)}")
    name = implementation or ("blocks" if jax.default_backend() == "cpu" else "ragged")
    return _BACKENDS[name](x, gates, expert_index, w_in, w_out)
