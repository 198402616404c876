"""Whether a document fits a row before any tokenizer exists: media have known sizes, text at least one token a span."""

from __future__ import annotations

import numpy as np

from ernie5_jax.config import ExperimentConfig
from ernie5_jax.sequence import (
    Document,
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    Sizes,
    Span,
    check_fits,
    document_size,
    row_capacity,
)


def least_size(document: Document, config: ExperimentConfig) -> Sizes:
    """Lower bound of the positions and slots that `document` takes once it is tokenised."""
    spans = tuple(EncodedSpan(span.modality, span.role, _outline(span, config)) for span in document.spans)
    scales = tuple((side, side) for side in config.visual.scales)
    return document_size(EncodedDocument(spans), scales)


def check_capacity(document: Document, config: ExperimentConfig) -> None:
    """Raises a `SequenceError` naming the capacity of `config.sequence` that the document certainly overflows."""
    check_fits(least_size(document, config), row_capacity(config.sequence))


def _outline(span: Span, config: ExperimentConfig) -> EncodedText | EncodedVisual | EncodedAudio:
    """A value of the right shape that takes no memory."""
    value = span.value
    if isinstance(value, EncodedText | EncodedVisual | EncodedAudio):
        return value
    if span.modality == "text":
        return EncodedText(_nothing(1), 0)
    if span.modality == "audio":
        frames = -(-len(value) // config.audio.samples_per_frame)
        return EncodedAudio(_nothing(frames, config.audio.levels))
    frames = 1 + (len(value) - 1) // config.visual.temporal_stride if span.modality == "video" else 1
    grid = config.visual.scales[-1]
    if span.role == "generate":
        return EncodedVisual(latents=_nothing(frames, grid, grid, config.visual.bits))
    return EncodedVisual(features=_nothing(frames, grid, grid, 1, config.visual.feature_dim))


def _nothing(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.float32(0), shape)
