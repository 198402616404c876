"""Configurations small enough for unit tests; every width is consistent with the dummy tokenizers."""

from __future__ import annotations

from typing import Any

from ernie5_jax.config import ModelConfig, RouterConfig, SequenceConfig


def tiny_model_config(**overrides: Any) -> ModelConfig:
    """A model of a few thousand parameters with every part: two MoE layers, two codec layers, one MTP block.

    Args:
      **overrides: Fields of `ModelConfig` to change.
    """
    values: dict[str, Any] = {
        "hidden_size": 32,
        "num_moe_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dense_width": 48,
        "expert_width": 16,
        "shared_expert_width": 16,
        "router": RouterConfig(num_experts=8, top_k=2),
        "vocab_size": 352,
        "visual_bits": 4,
        "visual_scales": 2,
        "vision_feature_dim": 6,
        "audio_levels": 3,
        "audio_bins": 16,
    }
    return ModelConfig(**{**values, **overrides})


def tiny_sequence_config(length: int = 64, **overrides: Any) -> SequenceConfig:
    """Rows of `length` positions, capacities as large as the row."""
    return SequenceConfig(length=length, **overrides)


def square_scales(count: int) -> tuple[tuple[int, int], ...]:
    """The pyramid 1, 2, 4, ... of `count` squares."""
    return tuple((2**k, 2**k) for k in range(count))
