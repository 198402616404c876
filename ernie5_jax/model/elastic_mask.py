"""Which part of the model runs: a traced argument, so that one compilation serves every submodel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ElasticMask:
    """A submodel per row (decisions section 3).

    R = 1 means one submodel for the whole batch: skipped layers then cost nothing. R = B gives every row its own;
    depth saves no time in that case.

    Attributes:
      layers: bool [R, L], layers that run. The first layer and codec layers must be on.
      experts: bool [R, L, E], experts that may be chosen.
      top_k: int32 [R, L], experts per token.
    """

    layers: Any
    experts: Any
    top_k: Any


def full_mask(config: ModelConfig, rows: int = 1) -> ElasticMask:
    """The mask of the whole model."""
    layers, experts = config.num_layers, config.router.num_experts
    return ElasticMask(
        layers=jnp.ones((rows, layers), bool),
        experts=jnp.ones((rows, layers, experts), bool),
        top_k=jnp.full((rows, layers), config.router.top_k, jnp.int32),
    )


def fixed_layers(config: ModelConfig) -> np.ndarray:
    """bool [L]: layers that always run, the first one and the codec layers (decisions section 3)."""
    fixed = np.zeros(config.num_layers, bool)
    fixed[0] = True
    fixed[config.num_layers - config.num_codec_layers :] = True
    return fixed


def check_mask(mask: ElasticMask, config: ModelConfig) -> None:
    """Checks a concrete mask.

    Raises:
      ValueError: Names the field, layer and value that do not fit.
    """
    layers, experts = config.num_layers, config.router.num_experts
    rows = np.shape(mask.layers)[0]
    shapes = {"layers": (rows, layers), "experts": (rows, layers, experts), "top_k": (rows, layers)}
    for name, shape in shapes.items():
        found = np.shape(getattr(mask, name))
        if found != shape:
            raise ValueError(f"elastic mask {name}: found shape {list(found)}, allowed: {list(shape)}")
    live, top_k = np.asarray(mask.layers), np.asarray(mask.top_k)
    enabled = np.asarray(mask.experts).sum(-1)
    for layer in np.flatnonzero(fixed_layers(config)):
        if not live[:, layer].all():
            raise ValueError(f"elastic mask layers: layer {layer} is off, allowed: first and codec layers always run")
    if (top_k < 1).any() or (top_k > config.router.top_k).any():
        found = f"{top_k.min()} ... {top_k.max()}"
        raise ValueError(f"elastic mask top_k: found {found}, allowed: 1 ... {config.router.top_k}")
    if (enabled < top_k).any():
        raise ValueError(
            f"elastic mask experts: a layer has {enabled.min()} experts, allowed: at least its top_k = {top_k.max()}"
        )
