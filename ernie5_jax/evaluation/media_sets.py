"""Pictures, clips and recordings of a set of documents, with their labels."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ernie5_jax.audio.protocol import AudioTokenizer
from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.sequence.types import Document
from ernie5_jax.vision.protocol import VisualTokenizer


@dataclasses.dataclass(frozen=True)
class MediaSet:
    """Media of one modality.

    Attributes:
      values: uint8 [H, W, 3], uint8 [T, H, W, 3] or float32 [samples] each.
      digits: The digit each one shows or says.
      directions: Where it moves; "" where the documents do not say.
    """

    values: list[np.ndarray]
    digits: list[int]
    directions: list[str]

    def __len__(self) -> int:
        return len(self.values)

    def take(self, indices: Sequence[int]) -> MediaSet:
        return MediaSet(
            [self.values[i] for i in indices], [self.digits[i] for i in indices], [self.directions[i] for i in indices]
        )


def collect(documents: Iterable[Document], modality: str) -> MediaSet:
    """Every different picture, clip or recording in `documents` whose digit is known, once each."""
    found = MediaSet([], [], [])
    seen: set[bytes] = set()
    for document in documents:
        if document.meta.get("digit") is None:
            continue
        for span in document.spans:
            if span.modality != modality or not isinstance(span.value, np.ndarray):
                continue
            key = hashlib.sha1(np.ascontiguousarray(span.value).tobytes()).digest()
            if key not in seen:
                seen.add(key)
                found.values.append(span.value)
                found.digits.append(int(document.meta["digit"]))
                found.directions.append(str(document.meta.get("direction") or ""))
    return found


def of_task(documents: Iterable[Document], task: str, *, labelled: bool = False) -> list[Document]:
    """Documents whose `task` is the one named; where `labelled`, only those that say which digit is meant."""
    found = [document for document in documents if document.meta.get("task") == task]
    return [document for document in found if document.meta.get("digit") is not None] if labelled else found


def balanced(documents: Sequence[Document], count: int, keys: Sequence[str] = ("digit",)) -> list[Document]:
    """`count` documents with equally many of every class, in a fixed order; repeats when there are fewer.

    Args:
      documents: To choose from.
      count: How many.
      keys: Meta keys that together name the class.

    Raises:
      EvaluationError: `documents` is empty.
    """
    classes: dict[tuple, list[Document]] = {}
    for document in documents:
        classes.setdefault(tuple(document.meta.get(key) for key in keys), []).append(document)
    if not classes:
        raise EvaluationError("evaluation set: found no document of the task, allowed: at least one")
    ordered = [classes[name] for name in sorted(classes, key=str)]
    return [ordered[i % len(ordered)][(i // len(ordered)) % len(ordered[i % len(ordered)])] for i in range(count)]


def round_trip_pictures(
    tokenizer: VisualTokenizer, pictures: Sequence[np.ndarray], batch: int = 32
) -> list[np.ndarray]:
    """Images uint8 [H, W, 3] or videos uint8 [T, H, W, 3] of one size through quantisation and back."""
    from ernie5_jax.vision import ScalePyramid

    pyramid = ScalePyramid(tokenizer.scales, tokenizer.bits)
    out: list[np.ndarray] = []
    for start in range(0, len(pictures), batch):
        part = np.stack(pictures[start : start + batch])
        videos = part[:, None] if part.ndim == 4 else part
        count = len(videos)
        videos = np.concatenate([videos, np.repeat(videos[-1:], batch - count, 0)])  # one shape, one compilation
        latents = np.asarray(tokenizer.encode(videos)[0])
        accumulated = np.zeros_like(latents)
        for k, bits in enumerate(pyramid.quantize(latents)):
            accumulated = pyramid.accumulate(accumulated, bits, k)
        decoded = np.asarray(tokenizer.decode(np.asarray(accumulated)))[:count]
        out.extend(decoded[:, 0] if part.ndim == 4 else decoded)
    return out


def round_trip_audio(tokenizer: AudioTokenizer, waves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Recordings float32 [samples] through the codec and back; the padding of the last frame stays."""
    return [np.asarray(wave) for wave in tokenizer.decode(tokenizer.encode(list(waves)))]
