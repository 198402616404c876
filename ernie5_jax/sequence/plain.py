"""Rows of ready-made text tokens, for plain causal language modelling."""

from __future__ import annotations

import numpy as np

from ernie5_jax.sequence.layout import UNBOUNDED
from ernie5_jax.sequence.positions import text_position
from ernie5_jax.sequence.types import Batch, Slots


def token_rows(token: np.ndarray, segment: np.ndarray | None = None) -> Batch:
    """A batch in which every position predicts the token after it, without special tokens or prompts.

    Args:
      token: int32 [B, S].
      segment: int32 [B, S], documents of each row, numbered from 1 and each in one piece, 0 = PAD; None makes every row
        one.

    Returns:
      A `Batch` of numpy arrays. The last position of a document predicts nothing.
    """
    token = np.asarray(token, np.int32)
    size, length = token.shape
    segment = np.ones((size, length), np.int32) if segment is None else np.asarray(segment, np.int32)
    row = np.broadcast_to(np.arange(length, dtype=np.int32), (size, length))
    starts = np.where(np.diff(segment, axis=1, prepend=-1) != 0, row, 0)
    index = row - np.maximum.accumulate(starts, axis=1)
    weight = ((segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] > 0)).astype(np.float32)
    targets = {"text": Slots(row[:, :-1].copy(), {"token": token[:, 1:].copy()}, weight)}
    none = np.float32(0)
    return Batch(
        token=token,
        position=text_position(index.astype(np.float32)),
        bounds=np.stack([np.full_like(row, UNBOUNDED), row], axis=-1),
        segment=segment,
        inputs={},
        targets=targets,
        mtp_token=np.zeros((size, 0, length), np.int32),
        denominators={
            "text": weight.sum(),
            "image": none,
            "video": none,
            "audio": none,
            "mtp": none,
            "tokens": np.float32(segment.astype(bool).sum()),
            "text_bytes": none,
        },
    )
