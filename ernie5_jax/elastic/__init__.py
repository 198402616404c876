"""Elastic training: which submodel runs, and how it becomes a model of its own."""

from ernie5_jax.elastic.choice import ElasticError, evenly, keep_layers, largest, submodel_mask
from ernie5_jax.elastic.extraction import extract_submodel
from ernie5_jax.elastic.sampling import sample_mask, step_masks

__all__ = [
    "ElasticError",
    "evenly",
    "extract_submodel",
    "keep_layers",
    "largest",
    "sample_mask",
    "step_masks",
    "submodel_mask",
]
