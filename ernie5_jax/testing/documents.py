"""Random documents of any kinds, raw and encoded, and batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ernie5_jax.config import ModelConfig, SequenceConfig
from ernie5_jax.sequence import (
    Batch,
    Document,
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    Modality,
    Role,
    Row,
    SequenceError,
    Span,
    layout,
    pack,
    stack,
)
from ernie5_jax.testing.configs import square_scales, tiny_sequence_config
from ernie5_jax.text.special_tokens import NUM_SPECIAL_TOKENS
from ernie5_jax.vision.pyramid import ScalePyramid

Kind = tuple[Modality, Role]

KINDS: tuple[Kind, ...] = (
    ("text", "generate"),
    ("image", "generate"),
    ("video", "generate"),
    ("audio", "generate"),
    ("text", "understand"),
    ("image", "understand"),
    ("video", "understand"),
    ("audio", "understand"),
)
"""The eight kinds of span."""


def random_document(
    rng: np.random.Generator,
    kinds: Sequence[Kind] = KINDS,
    *,
    max_spans: int = 4,
    image_size: int = 8,
    max_frames: int = 9,
    samples_per_frame: int = 40,
) -> Document:
    """A document of raw media: words, noise pictures, noise videos (T = 1 mod 4) and noise clips.

    Args:
      rng: Source of everything random.
      kinds: Kinds to draw spans from.
      max_spans: 1 ... max_spans spans.
      image_size: Side of pictures, pixels.
      max_frames: Longest video, pixel frames.
      samples_per_frame: Audio is 1 ... 4 times as many samples long, less a few.
    """

    def value(modality: str) -> Any:
        if modality == "text":
            return "".join(rng.choice(list("abc äß語 "), rng.integers(1, 9)).tolist())
        if modality == "audio":
            return rng.uniform(-1, 1, rng.integers(1, 4 * samples_per_frame)).astype(np.float32)
        frames = 1 if modality == "image" else 1 + 4 * int(rng.integers(1, (max_frames - 1) // 4 + 1))
        pixels = rng.integers(0, 256, (frames, image_size, image_size, 3), dtype=np.uint8)
        return pixels[0] if modality == "image" else pixels

    drawn = [kinds[i] for i in rng.integers(0, len(kinds), rng.integers(1, max_spans + 1))]
    return Document(tuple(Span(modality, role, value(modality)) for modality, role in drawn))


def random_encoded_span(
    rng: np.random.Generator, kind: Kind, config: ModelConfig, scales: tuple[tuple[int, int], ...]
) -> EncodedSpan:
    """One span of `kind` with random content of the widths of `config`: a few tokens, frames or patches."""
    modality, role = kind
    if modality == "text":
        ids = rng.integers(NUM_SPECIAL_TOKENS, config.vocab_size, rng.integers(1, 5))
        return EncodedSpan(modality, role, EncodedText(ids.astype(np.int32), len(ids)))
    if modality == "audio":
        codes = rng.integers(0, config.audio_bins, (rng.integers(1, 4), config.audio_levels))
        return EncodedSpan(modality, role, EncodedAudio(codes.astype(np.int32)))
    frames = 1 if modality == "image" else int(rng.integers(1, 4))
    if role == "generate":
        latents = rng.normal(size=(frames, *scales[-1], config.visual_bits)).astype(np.float32)
        return EncodedSpan(modality, role, EncodedVisual(latents=latents))
    shape = (frames, *rng.integers(1, 3, 2), 1, config.vision_feature_dim)
    return EncodedSpan(modality, role, EncodedVisual(features=rng.normal(size=shape).astype(np.float32)))


def random_encoded_document(
    rng: np.random.Generator,
    config: ModelConfig,
    kinds: Sequence[Kind] = KINDS,
    *,
    max_spans: int = 4,
    scales: tuple[tuple[int, int], ...] | None = None,
    first: Kind | None = None,
) -> EncodedDocument:
    """A document of random codes.

    Args:
      rng: Source of everything random.
      config: Vocabulary, bits, levels and widths.
      kinds: Kinds to draw spans from.
      max_spans: 1 ... max_spans spans.
      scales: Scale pyramid; None takes squares 1, 2, 4, ...
      first: Kind of the first span where it must occur.
    """
    scales = scales or square_scales(config.visual_scales)
    drawn = [kinds[i] for i in rng.integers(0, len(kinds), rng.integers(1, max_spans + 1))]
    if first is not None:
        drawn[0] = first
    return EncodedDocument(tuple(random_encoded_span(rng, kind, config, scales) for kind in drawn))


def dummy_rows(
    config: ModelConfig,
    *,
    seed: int = 0,
    rows: int = 2,
    kinds: Sequence[Kind] = KINDS,
    sequence: SequenceConfig | None = None,
    scales: tuple[tuple[int, int], ...] | None = None,
    max_spans: int = 2,
) -> list[list[Row]]:
    """Unpacked documents of each packed row of `dummy_batch`: as many as fit, their first spans of `kinds` in turn."""
    sequence = sequence or tiny_sequence_config()
    rng = np.random.default_rng(seed)
    scales = scales or square_scales(config.visual_scales)
    pyramid = ScalePyramid(scales, config.visual_bits)
    result: list[list[Row]] = [[]]
    number = 0
    while True:
        first = kinds[number % len(kinds)]
        document = random_encoded_document(rng, config, kinds, max_spans=max_spans, scales=scales, first=first)
        row = layout(document, sequence, pyramid, audio_bins=config.audio_bins, mtp_depth=config.mtp_depth)
        try:
            pack([*result[-1], row], sequence, config)
        except SequenceError:
            if len(result) == rows:
                return result
            result.append([])
        result[-1].append(row)
        number += 1


def dummy_batch(
    config: ModelConfig,
    *,
    seed: int = 0,
    rows: int = 2,
    kinds: Sequence[Kind] = KINDS,
    sequence: SequenceConfig | None = None,
    scales: tuple[tuple[int, int], ...] | None = None,
    max_spans: int = 2,
) -> Batch:
    """A packed Batch of random documents of all `kinds`, every field filled as training fills it; numpy.

    Args:
      config: Model whose widths the batch has, e.g. `tiny_model_config()`.
      seed: Everything random.
      rows: B.
      kinds: Kinds of span; documents begin with each in turn.
      sequence: Row length and capacities; None is 64 positions.
      scales: Scale pyramid; None takes squares 1, 2, 4, ...
      max_spans: Spans per document.
    """
    sequence = sequence or tiny_sequence_config()
    documents = dummy_rows(
        config, seed=seed, rows=rows, kinds=kinds, sequence=sequence, scales=scales, max_spans=max_spans
    )
    return stack([pack(row, sequence, config) for row in documents])
