"""Which submodel a step trains (ERNIE 5.0 section 3.3; decisions section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie5_jax.config import ElasticSamplingConfig, ModelConfig
from ernie5_jax.model.elastic_mask import ElasticMask


def sample_mask(key: jax.Array, model: ModelConfig, config: ElasticSamplingConfig) -> ElasticMask:
    """Draws one submodel for a whole micro-batch (R = 1). Traceable.

    Depth, width and sparsity are drawn independently. With probability 1 - full_* an axis is reduced:
      depth: n ~ U{min_layers ... L - 1} layers, the first and the codec layers always among them;
      width: m ~ U{min_experts ... E - 1} experts, the same m in all layers, a different subset in each;
      sparsity: k ~ U{min_top_k ... top_k - 1}; never more than m.

    Args:
      key: PRNG key.
      model: Sizes.
      config: Probabilities and lower ends.

    Returns:
      The mask, R = 1.
    """
    layers, experts, top_k = model.num_layers, model.router.num_experts, model.router.top_k
    keys = jax.random.split(key, 5)
    number = jnp.arange(layers)
    fixed = (number == 0) | (number >= layers - model.num_codec_layers)
    least = max(config.min_layers, 1 + min(model.num_codec_layers, layers - 1))
    live = _size(keys[0], config.full_depth, least, layers)
    order = jnp.where(fixed, -1.0, jax.random.uniform(keys[1], (layers,)))
    width = _size(keys[2], config.full_width, config.min_experts, experts)
    lottery = jax.random.uniform(keys[3], (layers, experts))
    k = _size(keys[4], config.full_top_k, config.min_top_k, top_k)
    return ElasticMask(
        layers=(_rank(order) < live)[None],
        experts=(_rank(lottery) < width)[None],
        top_k=jnp.full((1, layers), jnp.minimum(k, width), jnp.int32),
    )


def step_masks(
    seed: jax.Array | int, step: jax.Array | int, count: int, model: ModelConfig, config: ElasticSamplingConfig
) -> ElasticMask:
    """Masks of all micro-batches of a step, leading axis [count]; a pure function of (seed, step, micro-batch)."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(_STREAM), seed), step)
    return jax.vmap(lambda i: sample_mask(jax.random.fold_in(key, i), model, config))(jnp.arange(count))


_STREAM = 0x656C  # apart from the keys of parameter initialisation


def _size(key: jax.Array, full_probability: float, least: int, full: int) -> jax.Array:
    """`full` with the given probability, else uniform in {least ... full - 1}; `full` where that is empty."""
    if least >= full or full_probability >= 1:
        return jnp.asarray(full, jnp.int32)
    choose, draw = jax.random.split(key)
    reduced = jax.random.randint(draw, (), least, full, jnp.int32)
    return jnp.where(jax.random.uniform(choose) < full_probability, full, reduced).astype(jnp.int32)


def _rank(x: jax.Array) -> jax.Array:
    """Rank of every entry along the last axis, 0 = smallest."""
    return jnp.argsort(jnp.argsort(x, axis=-1), axis=-1)
