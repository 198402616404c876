"""Positions and slots a document needs, counted without building its row."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ernie5_jax.config import SequenceConfig
from ernie5_jax.sequence.errors import SequenceError
from ernie5_jax.sequence.positions import Scales
from ernie5_jax.sequence.types import EncodedAudio, EncodedDocument, EncodedSpan, EncodedText, EncodedVisual


class Sizes(NamedTuple):
    """What one document takes of a row; field names are `length` and the slot capacities of `SequenceConfig`."""

    length: int = 0
    text_targets: int = 0
    visual_inputs: int = 0
    visual_targets: int = 0
    understand_inputs: int = 0
    audio_inputs: int = 0
    audio_targets: int = 0


def row_capacity(config: SequenceConfig) -> Sizes:
    """What a row offers."""
    return Sizes(config.length, *(config.capacity(name) for name in Sizes._fields[1:]))


def span_name(number: int, span: EncodedSpan) -> str:
    """`span 2 (image, generate)`, counted from 0, for messages."""
    return f"span {number} ({span.modality}, {span.role})"


def visual_grid(number: int, span: EncodedSpan) -> tuple[int, int, int]:
    """(frames, h, w) of what the span needs: latents to generate, features to understand.

    Raises:
      SequenceError: The array is missing, has the wrong rank, no frames, or an image has several frames.
    """
    value = span.value
    name = "latents" if span.role == "generate" else "features"
    if name == "latents" and isinstance(value, EncodedVisual) and value.latents is None and value.bits is not None:
        name = "bits"
    array = getattr(value, name) if isinstance(value, EncodedVisual) else None
    axes = {"latents": "[t, h, w, C]", "features": "[t, h, w, K, D]", "bits": "[t, P, C]"}[name]
    if array is None or array.ndim != axes.count(",") + 1 or 0 in array.shape:
        found = "nothing" if array is None else f"shape {list(array.shape)}"
        raise SequenceError(f"{span_name(number, span)}: found {found}, allowed: {name} {axes}, none of them 0")
    frames, height, width = array.shape[:3] if name != "bits" else (len(array), 1, 1)
    if span.modality == "image" and frames != 1:
        raise SequenceError(f"{span_name(number, span)}: found {frames} latent frames, allowed: 1")
    return frames, height, width


def document_size(document: EncodedDocument, scales: Scales, *, text_reserve: float = 1.0) -> Sizes:
    """Counts positions and slots of `layout(document, ...)`; text and audio need only the shapes of their arrays.

    Args:
      document: The encoded document.
      scales: Scale pyramid of generated images and videos.
      text_reserve: Room kept for text whose length varies (BPE-dropout: 1.15): ceil(text_reserve * tokens).

    Raises:
      SequenceError: A span without content, or of the wrong kind.
    """
    cells = sum(h * w for h, w in scales)
    text = special = 0  # ordinary text tokens; special tokens that are text targets
    other = untargeted = 0  # positions that are not text; specials that are no text target
    visual = understand = audio_in = audio_out = 0
    for number, span in enumerate(document.spans):
        if span.modality == "text":
            if not isinstance(span.value, EncodedText):
                raise SequenceError(
                    f"{span_name(number, span)}: found {type(span.value).__name__}, allowed: EncodedText"
                )
            text += len(span.value.ids)
            continue
        generate = span.role == "generate"
        special += 1 if generate else 2  # BOx (and SEP); EOI, EOV below
        if span.modality == "audio":
            if not isinstance(span.value, EncodedAudio) or span.value.codes.ndim != 2 or not len(span.value.codes):
                raise SequenceError(f"{span_name(number, span)}: found no frames, allowed: codes [n >= 1, Q]")
            frames = len(span.value.codes)
            untargeted += 1  # EOA is a target of the codec heads only
            other += frames
            audio_in += frames
            audio_out += frames + 1 if generate else 0
            continue
        frames, height, width = visual_grid(number, span)
        special += 1
        size = frames * cells if generate else frames * height * width
        other += size
        visual += size if generate else 0
        understand += 0 if generate else size
    text = math.ceil(text_reserve * text) if text_reserve != 1.0 else text
    targets = text + special + 1  # and EOS
    return Sizes(targets + 1 + untargeted + other, targets, visual, visual, understand, audio_in, audio_out)


def check_fits(size: Sizes, capacity: Sizes, name: str = "document") -> None:
    """Raises a `SequenceError` naming the first capacity that `size` overflows; nothing is ever cut."""
    for key, found, allowed in zip(Sizes._fields, size, capacity, strict=True):
        if found > allowed:
            what = "positions" if key == "length" else key
            raise SequenceError(f"{name}: needs {found} {what}, allowed: config key 'sequence.{key}' = {allowed}")


def sizes_array(sizes: list[Sizes]) -> np.ndarray:
    """int64 [documents, 7], the form `plan_rows` reads and records keep."""
    return np.asarray(sizes, np.int64).reshape(-1, len(Sizes._fields))
