"""Configurations small enough for unit tests; every width is consistent with the dummy tokenizers."""

from __future__ import annotations

from typing import Any

from ernie5_jax.config import ExperimentConfig, ModelConfig, RouterConfig, SequenceConfig, from_mapping, to_plain


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


def tiny_experiment_config(**sections: Any) -> ExperimentConfig:
    """A whole configuration that fits the dummy tokenizers: 8 px pictures, sound at 1 kHz in frames of 40 samples.

    Args:
      **sections: Sections of `ExperimentConfig` whose fields change, e.g. `sequence={"length": 64}`.
    """
    model = tiny_model_config()
    values: dict[str, Any] = {
        "text": {"vocab_size": model.vocab_size},
        "visual": {"patch_size": 4, "channels": (6,), "bits": 4, "scales": (1, 2), "image_size": 8},
        "audio": {"sample_rate": 1000, "hop_length": 40, "fold": 1, "fft_size": 64, "levels": 3, "bins": 16},
        "model": to_plain(model),
        "sequence": {"length": 96},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return from_mapping(ExperimentConfig, values)


def square_scales(count: int) -> tuple[tuple[int, int], ...]:
    """The pyramid 1, 2, 4, ... of `count` squares."""
    return tuple((2**k, 2**k) for k in range(count))
