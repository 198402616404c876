"""The unified multimodal sparse model."""

from ernie5_jax.model.cache import KVCache, empty_cache
from ernie5_jax.model.elastic_mask import ElasticMask, check_mask, fixed_layers, full_mask
from ernie5_jax.model.experts import RouterStats
from ernie5_jax.model.functional import Params, init_params, logical_axes, make_apply, present_experts
from ernie5_jax.model.router import Routing, choose_experts
from ernie5_jax.model.unified_model import ModelOutput, UnifiedModel

__all__ = [
    "ElasticMask",
    "KVCache",
    "ModelOutput",
    "Params",
    "RouterStats",
    "Routing",
    "UnifiedModel",
    "check_mask",
    "choose_experts",
    "empty_cache",
    "fixed_layers",
    "full_mask",
    "init_params",
    "logical_axes",
    "make_apply",
    "present_experts",
]
