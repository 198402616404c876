"""Mergeable metric states, routing statistics, picture distance. Imports nothing but jax and numpy."""

from ernie5_jax.metrics.image import psnr
from ernie5_jax.metrics.routing import (
    expert_iou,
    max_violation,
    normalized_entropy,
    pairwise_expert_iou,
    top_experts,
)
from ernie5_jax.metrics.states import (
    BitsPerByte,
    Mean,
    MetricState,
    accuracy,
    accuracy_by_index,
    bit_accuracy,
    compute,
    merge,
    to_host,
)

__all__ = [
    "BitsPerByte",
    "Mean",
    "MetricState",
    "accuracy",
    "accuracy_by_index",
    "bit_accuracy",
    "compute",
    "expert_iou",
    "max_violation",
    "merge",
    "normalized_entropy",
    "pairwise_expert_iou",
    "psnr",
    "to_host",
    "top_experts",
]
