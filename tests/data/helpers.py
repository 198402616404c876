"""A small experiment whose tokenizers need no training."""

from ernie5_jax.config import ExperimentConfig, from_mapping
from ernie5_jax.data import Tokenizers
from ernie5_jax.testing import DummyAudioTokenizer, DummyTextTokenizer, DummyVisualTokenizer


def small_config(**sections) -> ExperimentConfig:
    """Pictures of 8 px in scales 1, 2 with 4 bits, sound at 1 kHz in frames of 40 samples, byte-level text."""
    values = {
        "text": {"vocab_size": 352},
        "visual": {"patch_size": 4, "channels": (6,), "bits": 4, "scales": (1, 2), "image_size": 8},
        "audio": {"sample_rate": 1000, "hop_length": 40, "fold": 1, "fft_size": 64, "levels": 3, "bins": 16},
        "model": {
            "vocab_size": 352,
            "visual_bits": 4,
            "visual_scales": 2,
            "vision_feature_dim": 6,
            "audio_levels": 3,
            "audio_bins": 16,
        },
        "sequence": {"length": 96},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return from_mapping(ExperimentConfig, values)


def small_tokenizers() -> Tokenizers:
    return Tokenizers(DummyTextTokenizer(), DummyVisualTokenizer(), DummyAudioTokenizer())
