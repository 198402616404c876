"""The plain formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] in float32 or better: [..., V], int [...] -> [...]."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(logits, labels[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def dense_cross_entropy(hidden: jax.Array, labels: jax.Array, weight: jax.Array, kernel: jax.Array) -> jax.Array:
    """See `linear_cross_entropy`; all logits at once. The oracle."""
    loss = cross_entropy(jnp.where((weight > 0)[:, None], hidden, 0) @ kernel, labels)
    return jnp.where(weight > 0, weight * loss, 0).sum()
