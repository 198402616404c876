"""Which submodel a step trains (ERNIE 5.0 section 3.3; decisions section 3)."""

from __future__ import annotations

import numpy as np

from ernie5_jax.config import ElasticSamplingConfig, ModelConfig
from ernie5_jax.model.elastic_mask import ElasticMask

_STREAM = 3  # apart from other draws of the same seed


def sample_mask(rng: np.random.Generator, model: ModelConfig, config: ElasticSamplingConfig) -> ElasticMask:
    """Draws one submodel for a whole micro-batch (R = 1).

    Depth, width and sparsity are drawn independently. With probability 1 - full_* an axis is reduced:
      depth: n ~ U{min_layers ... L - 1} layers, the first and the codec layers always among them;
      width: m ~ U{min_experts ... E - 1} experts, the same m in all layers, a different subset in each;
      sparsity: k ~ U{min_top_k ... top_k - 1}; never more than m.

    Args:
      rng: Source of all draws.
      model: Sizes.
      config: Probabilities and lower ends.

    Returns:
      The mask, numpy: on the host, because generators of random numbers take long to compile.
    """
    layers, experts = model.num_layers, model.router.num_experts
    fixed = np.zeros(layers, bool)
    fixed[0] = True
    fixed[layers - model.num_codec_layers :] = True
    live = _size(rng, config.full_depth, max(config.min_layers, int(fixed.sum())), layers)
    width = _size(rng, config.full_width, config.min_experts, experts)
    top_k = _size(rng, config.full_top_k, config.min_top_k, model.router.top_k)
    order = np.where(fixed, -1.0, rng.random(layers))
    lottery = rng.random((layers, experts))
    return ElasticMask(
        layers=(_rank(order) < live)[None],
        experts=(_rank(lottery) < width)[None],
        top_k=np.full((1, layers), min(top_k, width), np.int32),
    )


def step_masks(seed: int, step: int, count: int, model: ModelConfig, config: ElasticSamplingConfig) -> ElasticMask:
    """Masks of all micro-batches of a step, leading axis [count]; a pure function of (seed, step, micro-batch).

    Args:
      seed: Of the run.
      step: Optimiser steps taken before this one.
      count: Micro-batches.
      model: Sizes.
      config: Probabilities and lower ends.
    """
    masks = [sample_mask(np.random.default_rng((seed, _STREAM, step, i)), model, config) for i in range(count)]
    return ElasticMask(
        layers=np.stack([mask.layers for mask in masks]),
        experts=np.stack([mask.experts for mask in masks]),
        top_k=np.stack([mask.top_k for mask in masks]),
    )


def _size(rng: np.random.Generator, full_probability: float, least: int, full: int) -> int:
    """`full` with the given probability, else uniform in {least ... full - 1}; `full` where that is empty."""
    keep = rng.random() < full_probability
    reduced = int(rng.integers(min(least, full - 1), full)) if full > 1 else full
    return full if keep or least >= full else reduced


def _rank(x: np.ndarray) -> np.ndarray:
    """Rank of every entry along the last axis, 0 = smallest."""
    return x.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")
