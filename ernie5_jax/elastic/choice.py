"""Which layers and experts a smaller model keeps."""

from __future__ import annotations

import numpy as np

from ernie5_jax.config import ModelConfig
from ernie5_jax.errors import UserError
from ernie5_jax.model.elastic_mask import ElasticMask, fixed_layers


def evenly(total: int, count: int) -> np.ndarray:
    """bool [total] with `count` entries on, evenly spaced: entry floor((i + 1/2) total / count) for every i."""
    chosen = np.zeros(total, bool)
    chosen[((np.arange(count) + 0.5) * total / max(count, 1)).astype(int)] = True
    return chosen


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """bool, shape of `scores`: the `count` largest along the last axis; of equal ones the first."""
    order = np.argsort(-np.asarray(scores, np.float64), axis=-1, kind="stable")
    return np.argsort(order, axis=-1) < count


def keep_layers(model: ModelConfig, count: int, scores: np.ndarray | None) -> np.ndarray:
    """bool [L]: `count` layers, the fixed ones among them.

    Args:
      model: Sizes.
      count: At least as many as there are fixed layers.
      scores: [L], of which the largest stay; None spaces the layers evenly.
    """
    fixed = fixed_layers(model)
    free = np.flatnonzero(~fixed)
    room = count - int(fixed.sum())
    kept = fixed.copy()
    kept[free] = evenly(len(free), room) if scores is None else largest(np.asarray(scores)[free], room)
    return kept


class ElasticError(UserError):
    """A submodel that the model does not have."""


def submodel_mask(
    model: ModelConfig,
    layers: int,
    experts: int,
    top_k: int,
    *,
    layer_scores: np.ndarray | None = None,
    expert_scores: np.ndarray | None = None,
) -> ElasticMask:
    """A mask with equally many experts and one top-k in every layer (R = 1).

    Args:
      model: Sizes.
      layers, experts, top_k: Of the submodel.
      layer_scores: [L], of which the largest stay; None spaces the layers evenly.
      expert_scores: [L, E], of which the largest stay; None keeps the first ones.

    Raises:
      ElasticError: A size that the model does not have.
    """
    fixed, router = int(fixed_layers(model).sum()), model.router
    for name, found, least, most in (
        ("layers", layers, fixed, model.num_layers),
        ("experts", experts, 1, router.num_experts),
        ("top_k", top_k, 1, min(router.top_k, experts)),
    ):
        if not least <= found <= most:
            why = " (the first and the codec layers always run)" if name == "layers" else ""
            raise ElasticError(f"submodel {name}: found {found}, allowed: {least} ... {most}{why}")
    shape = (model.num_layers, router.num_experts)
    scores = np.broadcast_to(-np.arange(shape[1]), shape) if expert_scores is None else expert_scores
    return ElasticMask(
        layers=keep_layers(model, layers, layer_scores)[None],
        experts=largest(scores, experts)[None],
        top_k=np.full((1, shape[0]), top_k, np.int32),
    )
