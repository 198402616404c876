"""Layout of one document: groups -> positions, bounds, slots, targets (decisions section 1).

BOS, then the spans, then EOS. A generated image or video is BOx, per frame the blocks of scales 2 ... K and SS, EOx;
an understood one is BOx, one bidirectional group of patches per frame, EOx SEP; audio is BOA, frames, EOA, and SEP
when understood.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ernie5_jax.config import SequenceConfig
from ernie5_jax.sequence.builder import RowBuilder
from ernie5_jax.sequence.errors import SequenceError
from ernie5_jax.sequence.row import Row
from ernie5_jax.sequence.sizes import check_fits, document_size, row_capacity
from ernie5_jax.sequence.types import EncodedDocument, Modality
from ernie5_jax.text.special_tokens import BEGIN, EOS

if TYPE_CHECKING:
    from ernie5_jax.vision.pyramid import ScalePyramid

UNBOUNDED = 2**30
"""LTS of a prompt's columns: the document's end is not known yet, every later row may look back."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Prefix of a document that a generator continues.

    Attributes:
      row: All positions up to and including BOx (or the last position before a text answer); LTS is `UNBOUNDED`.
      index: Running index of what comes next: offset of a visual span, index of the next text token or audio frame.
      request: Modality to generate.
    """

    row: Row
    index: int
    request: Modality


def layout(
    document: EncodedDocument,
    config: SequenceConfig,
    pyramid: ScalePyramid,
    *,
    audio_bins: int,
    mtp_depth: int,
    rng: np.random.Generator | None = None,
    train: bool = False,
) -> Row:
    """Lays one document out.

    Args:
      document: Encoded spans of any kinds in any order.
      config: Capacities, loss weights, condition dropout and self-correction.
      pyramid: Scale pyramid of generated images and videos.
      audio_bins: Codes per codec level; `audio_bins` itself is EOA in the targets.
      mtp_depth: MTP modules.
      rng: All draws of a training layout, in document order. Ignored unless `train`.
      train: Whether condition dropout and self-correction are on.

    Returns:
      The row, not padded.

    Raises:
      SequenceError: A span without content or of the wrong shape, a document that overflows a capacity, or `train`
        without `rng`.
    """
    if train and rng is None:
        raise SequenceError("rng: found None, allowed: a numpy Generator when train=True")
    size = document_size(document, pyramid.scales)
    check_fits(size, row_capacity(config))
    rng = rng if train else None
    drop = rng is not None and rng.random() < config.condition_dropout
    builder = RowBuilder(size.length, config, pyramid, audio_bins, rng)
    builder.add_document(document, conditions=_condition_spans(document) if drop else 0)
    builder.add_special(EOS, 1.0)
    return builder.finish(mtp_depth, builder.row)


def layout_prompt(
    document: EncodedDocument,
    request: Modality,
    config: SequenceConfig,
    pyramid: ScalePyramid,
    *,
    audio_bins: int,
    mtp_depth: int = 0,
    drop_condition: bool = False,
) -> Prompt:
    """Lays out the spans so far and opens a span of modality `request`.

    Args:
      document: The spans before the request; may be empty.
      request: What to generate next. "text" adds no token: the last position predicts the first one.
      config, pyramid, audio_bins, mtp_depth: As in `layout`.
      drop_condition: Whether every text token becomes NULL (the unconditional half of guidance); length stays.

    Returns:
      The prefix, equal to the same rows of a training layout but for LTS and the weight of BOx.

    Raises:
      SequenceError: As `layout`.
    """
    size = document_size(document, pyramid.scales)
    check_fits(size, row_capacity(config), "prompt")
    opening = request != "text"
    if request not in ("text", *BEGIN):
        raise SequenceError(f"request: found {request!r}, allowed: text, image, video, audio")
    builder = RowBuilder(size.length - 1 + opening, config, pyramid, audio_bins, None)
    builder.add_document(document, conditions=len(document.spans) if drop_condition else 0)
    if opening:
        builder.add_special(BEGIN[request], 1.0)
    return Prompt(builder.finish(mtp_depth, UNBOUNDED), builder.row + builder.shift, request)


def _condition_spans(document: EncodedDocument) -> int:
    """How many spans stand before the last generated media span: their text is its condition."""
    media = [i for i, span in enumerate(document.spans) if span.modality != "text" and span.role == "generate"]
    return media[-1] if media else 0
