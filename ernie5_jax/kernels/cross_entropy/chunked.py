"""Readout and loss some rows at a time, gradients made in the forward: the logits of all rows never exist."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

_CHUNK = 512


def linear_cross_entropy(
    hidden: jax.Array, labels: jax.Array, weight: jax.Array, kernel: jax.Array, chunk: int = _CHUNK
) -> jax.Array:
    """sum_t weight_t * -log softmax(hidden_t @ kernel)[label_t], in float32 or better.

    Args:
      hidden: [T, D]; rows of weight 0 may hold anything.
      labels: int [T].
      weight: float [T], >= 0; has no gradient.
      kernel: [D, V].
      chunk: Rows whose logits exist at a time.

    Returns:
      [].
    """
    return _summed(hidden, labels, weight, kernel, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(hidden, labels, weight, kernel, chunk):
    kept, kernel, rows = _chunks(hidden, labels, weight, kernel, chunk)

    def step(total, row):
        x, label, w = row
        return total + _loss(x, label, w, kernel)[0], None

    return lax.scan(step, jnp.zeros((), _wide(kept)), rows)[0]


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _chunks(hidden, labels, weight, kernel, chunk):
    """hidden without the rows that do not count, kernel in its type, and (hidden, labels, weight) cut into chunks."""
    hidden = jnp.where((weight > 0)[:, None], hidden, 0)
    chunk = max(1, min(chunk, hidden.shape[0]))

    def cut(x):
        x = jnp.pad(x, ((0, -x.shape[0] % chunk), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(-1, chunk, *x.shape[1:])

    rows = (cut(hidden), cut(labels.astype(jnp.int32)), cut(weight.astype(_wide(hidden))))
    return hidden, kernel.astype(hidden.dtype), rows


def _loss(hidden, labels, weight, kernel):
    """Loss of a chunk, and softmax times weight as (exponentials, factor of each row)."""
    logits = jnp.matmul(hidden, kernel, preferred_element_type=_wide(hidden))
    largest = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - largest)
    total = powers.sum(-1, keepdims=True)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    loss = (weight * (jnp.log(total) + largest - picked)[:, 0]).sum()
    return loss, powers, weight[:, None] / total


def _forward(hidden, labels, weight, kernel, chunk):
    kept, kernel_used, rows = _chunks(hidden, labels, weight, kernel, chunk)
    # XLA:CPU is slow at products that contract over the rows of their left factor: transposed once, beforehand.
    backward_kernel = lax.optimization_barrier(kernel_used.T)
    columns = lax.optimization_barrier(rows[0].swapaxes(1, 2))

    def step(carry, row):
        (x, label, w), x_columns = row
        total, dkernel = carry
        loss, powers, factor = _loss(x, label, w, kernel_used)
        is_label = jnp.arange(kernel.shape[1]) == label[:, None]
        dlogits = (powers * factor - jnp.where(is_label, w[:, None], 0)).astype(x.dtype)
        dkernel = dkernel + jnp.matmul(x_columns, dlogits, preferred_element_type=dkernel.dtype)
        return (total + loss, dkernel), dlogits @ backward_kernel

    start = (jnp.zeros((), _wide(kept)), jnp.zeros(kernel.shape, _wide(kept)))
    (total, dkernel), dhidden = lax.scan(step, start, (rows, columns))
    dhidden = dhidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return total, (dhidden, dkernel.astype(kernel.dtype))


def _backward(chunk, residuals, g):
    del chunk
    dhidden, dkernel = residuals
    return (dhidden * g).astype(dhidden.dtype), None, None, (dkernel * g).astype(dkernel.dtype)


_summed.defvjp(_forward, _backward)
