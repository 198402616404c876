"""Choosing from logits: temperature, top-k, top-p, guidance; keys that depend on counters only."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Traced sampling settings, each a scalar.

    Attributes:
      temperature: Of the modality at hand; 0 is greedy.
      top_k: Most likely choices kept; 0 keeps all.
      top_p: Smallest set of most likely choices with this probability is kept; 1 keeps all.
      guidance: Classifier-free guidance scale g: u + g (c - u).
    """

    temperature: Any
    top_k: Any
    top_p: Any
    guidance: Any


def sampling_params(temperature: float, top_k: int = 0, top_p: float = 1.0, guidance: float = 1.0) -> SamplingParams:
    """`SamplingParams` with explicit types, so that other values do not retrace."""
    return SamplingParams(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(guidance))


def row_keys(seed: int, prompts: jax.Array, samples: jax.Array) -> jax.Array:
    """One key per row: fold_in of (seed, prompt number, sample number)."""
    base = jax.random.key(seed)
    return jax.vmap(lambda p, s: jax.random.fold_in(jax.random.fold_in(base, p), s))(prompts, samples)


def position_keys(keys: jax.Array, position: jax.Array, level: int = 0) -> jax.Array:
    """Keys [B] of the draw at `position` [B] (and codec level)."""
    return jax.vmap(lambda k, p: jax.random.fold_in(jax.random.fold_in(k, p), level))(keys, position)


def filter_logits(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Logits [..., V] with the choices outside top-k and top-p at -inf; temperature is not applied."""
    filters = (params.top_k > 0) | (params.top_p < 1)
    return jax.lax.cond(filters, lambda: _filtered(logits, params), lambda: logits)  # sorting V logits takes a while


def _filtered(logits: jax.Array, params: SamplingParams) -> jax.Array:
    order = jnp.sort(logits, axis=-1)[..., ::-1]
    size = logits.shape[-1]
    kth = jnp.clip(jnp.where(params.top_k > 0, params.top_k, size), 1, size) - 1
    floor_k = jnp.take_along_axis(order, jnp.broadcast_to(kth, (*order.shape[:-1], 1)), axis=-1)
    probs = jax.nn.softmax(order, axis=-1)
    # A choice is kept while the probability before it is below top_p, so the most likely one always is.
    inside = jnp.cumsum(probs, axis=-1) - probs < params.top_p
    floor_p = jnp.min(jnp.where(inside, order, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.maximum(floor_k, floor_p), logits, -jnp.inf)


def sample(keys: jax.Array, logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Draws int32 [B] from logits [B, V] with one key per row."""

    def draw():
        filtered = filter_logits(logits / params.temperature, params)
        return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)

    return jax.lax.cond(params.temperature > 0, draw, lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32))


def sample_bits(keys: jax.Array, logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Draws bits int8 [B, N, C] from one logit per bit, p(1) = sigmoid(logit / temperature)."""
    cool = jnp.maximum(params.temperature, 1e-6)
    uniform = jax.vmap(lambda k: jax.random.uniform(k, logits.shape[1:], logits.dtype))(keys)
    drawn = uniform < jax.nn.sigmoid(logits / cool)
    return jnp.where(params.temperature > 0, drawn, logits > 0).astype(jnp.int8)


def guide(logits: jax.Array, params: SamplingParams, guided: bool) -> jax.Array:
    """Guided logits [B, ...] of [2 B, ...] (conditional rows first); the input itself when not `guided`."""
    if not guided:
        return logits
    conditional, unconditional = jnp.split(logits, 2)
    return unconditional + params.guidance * (conditional - unconditional)


def for_both(values: jax.Array, guided: bool) -> jax.Array:
    """What the conditional rows chose, for the unconditional rows too."""
    return jnp.concatenate([values, values]) if guided else values
