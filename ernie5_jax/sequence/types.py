"""Documents (what users bring), encoded spans (what tokenizers make) and batches (what the model reads)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

Modality = Literal["text", "image", "video", "audio"]
Role = Literal["generate", "understand"]


@dataclasses.dataclass(frozen=True)
class Span:
    """A run of one modality.

    Attributes:
      modality: text, image, video or audio.
      role: `generate` spans are learnt, `understand` spans are only read.
      value: str (text); uint8 [H, W, 3] (image); uint8 [T, H, W, 3] (video); float32 [samples] in [-1, 1] (audio);
        or an `EncodedSpan` payload when the span is already tokenised.
    """

    modality: Modality
    role: Role
    value: Any


@dataclasses.dataclass(frozen=True)
class Document:
    """An ordered list of spans. `meta` (labels, source, task) travels along for evaluation, the model never sees it."""

    spans: tuple[Span, ...]
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class EncodedText:
    """Token ids of one text span.

    Attributes:
      ids: int32 [n].
      num_bytes: UTF-8 bytes of the text, for bits per byte.
    """

    ids: np.ndarray
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class EncodedVisual:
    """An image (one latent frame) or video through the visual tokenizer.

    Attributes:
      latents: float [t, h, w, C] before quantisation; read by generate spans.
      features: float [t, h', w', K, D] pre-quantiser features on the merged grid; read by understand spans.
      bits: int8 [t, P, C], scales concatenated coarse to fine; read by generate spans that have no latents (already
        tokenised, so without self-correction).
    """

    latents: np.ndarray | None = None
    features: np.ndarray | None = None
    bits: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class EncodedAudio:
    """Codec frames.

    Attributes:
      codes: int32 [n, Q].
    """

    codes: np.ndarray


@dataclasses.dataclass(frozen=True)
class EncodedSpan:
    modality: Modality
    role: Role
    value: EncodedText | EncodedVisual | EncodedAudio


@dataclasses.dataclass(frozen=True)
class EncodedDocument:
    spans: tuple[EncodedSpan, ...]
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Fixed-capacity list of positions of each row that carry something of one kind.

    Attributes:
      index: int32 [B, N], position in the row; S (one past the end) marks an empty slot.
      values: Arrays [B, N, ...] by name.
      weight: float32 [B, N] ([B, N, Q] for codec targets), 0 in empty slots. For inputs 1 where filled.
    """

    index: Any
    values: dict[str, Any]
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows; every array but `denominators` has a leading row axis B.

    Attributes:
      token: int32 [B, S], text-vocabulary id of text inputs (special tokens included), PAD elsewhere.
      position: float32 [B, S, 3], Uni-RoPE (t, h, w).
      bounds: int32 [B, S, n], per key column [LTS, UTE]: query rows >= LTS or < UTE are masked. Row-local.
      segment: int32 [B, S], document number in the row from 1; 0 = PAD.
      inputs: Slots by name:
        visual: features float32 [B, N, C], scale int32 [B, N] (0 = s_1, also for SS);
        understand: features float32 [B, N, K, D];
        audio: codes int32 [B, N, Q].
      targets: Slots by name:
        text: token int32 [B, N];
        visual: bits int8 [B, N, C], scale int32 [B, N], is_video bool [B, N];
        audio: codes int32 [B, N, Q] (`bins` = EOA at every level);
        mtp (module axis d): index and weight [B, depth, N], token int32 [B, depth, N].
      mtp_token: int32 [B, depth, S], token id at i + d where module d may read it, -1 elsewhere.
      denominators: float32 [] sums over the *global* batch: text, image, video, audio, mtp (weights),
        tokens (non-PAD positions), text_bytes.
    """

    token: Any
    position: Any
    bounds: Any
    segment: Any
    inputs: dict[str, Slots]
    targets: dict[str, Slots]
    mtp_token: Any
    denominators: dict[str, Any]
