"""Tiny dummy configs, documents, batches and tokenizers for tests, ours and users' own."""

from ernie5_jax.testing.configs import square_scales, tiny_experiment_config, tiny_model_config, tiny_sequence_config
from ernie5_jax.testing.documents import (
    KINDS,
    Kind,
    dummy_batch,
    dummy_rows,
    random_document,
    random_encoded_document,
    random_encoded_span,
)
from ernie5_jax.testing.tokenizers import DummyAudioTokenizer, DummyTextTokenizer, DummyVisualTokenizer

__all__ = [
    "KINDS",
    "DummyAudioTokenizer",
    "DummyTextTokenizer",
    "DummyVisualTokenizer",
    "Kind",
    "dummy_batch",
    "dummy_rows",
    "random_document",
    "random_encoded_document",
    "random_encoded_span",
    "square_scales",
    "tiny_experiment_config",
    "tiny_model_config",
    "tiny_sequence_config",
]
