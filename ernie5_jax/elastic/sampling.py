"""Which submodel a step trains (ERNIE 5.0 section 3.3; decisions section 3)."""

from __future__ import annotations

import numpy as np

from ernie5_jax.config import ConfigError, ElasticSamplingConfig, ModelConfig
from ernie5_jax.elastic.choice import keep_layers, largest
from ernie5_jax.model.elastic_mask import ElasticMask, fixed_layers

_STREAM = 3  # apart from other draws of the same seed


def sample_mask(rng: np.random.Generator, model: ModelConfig, config: ElasticSamplingConfig) -> ElasticMask:
    """Draws one submodel (R = 1).

    Depth, width and sparsity are drawn independently. With probability 1 - full_* an axis is reduced:
      depth: n ~ U{min_layers ... max_layers} layers, the first and the codec layers always among them;
      width: m ~ U{min_experts ... max_experts} experts, the same m in all layers, at least top_k where min_experts
        is 0, so that no reduced width lowers k;
      sparsity: k ~ U{min_top_k ... max_top_k}; never more than m.

    Args:
      rng: Source of all draws.
      model: Sizes.
      config: Probabilities, ranges, and which layers and experts stay.

    Returns:
      The mask, numpy: on the host, because generators of random numbers take long to compile.

    Raises:
      ConfigError: A range that holds no size of this model.
    """
    layers, experts = model.num_layers, model.router.num_experts
    least_layers = max(config.min_layers, int(fixed_layers(model).sum()))
    least_experts = config.min_experts or model.router.top_k
    depth = _size(rng, "layers", config.full_depth, least_layers, config.max_layers, layers)
    width = _size(rng, "experts", config.full_width, least_experts, config.max_experts, experts)
    top_k = _size(rng, "top_k", config.full_top_k, config.min_top_k, config.max_top_k, model.router.top_k)
    # Drawn whether needed or not: the choice of one axis moves no draw of another.
    layer_lottery, expert_lottery = rng.random(layers), rng.random((layers, experts))
    if config.expert_choice == "nested":
        expert_lottery = np.broadcast_to(-np.arange(experts), (layers, experts))
    return ElasticMask(
        layers=keep_layers(model, depth, None if config.layer_choice == "even" else layer_lottery)[None],
        experts=largest(expert_lottery, width)[None],
        top_k=np.full((1, layers), min(top_k, width), np.int32),
    )


def step_masks(
    seed: int, step: int, count: int, model: ModelConfig, config: ElasticSamplingConfig, rows: int = 1
) -> ElasticMask:
    """Masks of all micro-batches of a step, leading axis [count]; a pure function of (seed, step, number).

    Args:
      seed: Of the run.
      step: Optimiser steps taken before this one.
      count: Micro-batches.
      model: Sizes.
      config: Probabilities, ranges and granularity.
      rows: Of a micro-batch; each has a submodel of its own where `config.granularity` is "row".

    Returns:
      The masks [count, R, ...] with R = 1 or `rows`, numbered through.
    """
    per_micro = rows if config.granularity == "row" else 1
    drawn = [
        sample_mask(np.random.default_rng((seed, _STREAM, step, i)), model, config) for i in range(count * per_micro)
    ]

    def stacked(name: str) -> np.ndarray:
        whole = np.concatenate([getattr(mask, name) for mask in drawn])
        return whole.reshape(count, per_micro, *whole.shape[1:])

    return ElasticMask(layers=stacked("layers"), experts=stacked("experts"), top_k=stacked("top_k"))


def _size(rng: np.random.Generator, axis: str, full_probability: float, least: int, most: int, full: int) -> int:
    """`full` with the given probability, else uniform in {least ... most}; `most` = 0 means `full` - 1, or `full` where
    nothing smaller is possible."""
    if most and full_probability < 1 and least > most:
        raise ConfigError(
            f"config key 'elastic.max_{axis}': found {most}, allowed: 0 or at least {least} for this model (fixed "
            f"layers stay, experts are at least top_k), or elastic.full_* = 1"
        )
    most = min(most or full - 1, full - 1)
    keep = rng.random() < full_probability
    reduced = int(rng.integers(min(least, most), most + 1)) if full > 1 else full
    return full if keep or least > most else reduced
