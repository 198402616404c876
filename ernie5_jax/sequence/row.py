"""One document laid out on its own: what `layout` makes and `pack` joins."""

from __future__ import annotations

import dataclasses

import numpy as np

from ernie5_jax.sequence.types import Slots


@dataclasses.dataclass(frozen=True)
class Row:
    """One document, unpacked; numpy, without row axis. Shapes with S' = positions of the document.

    Attributes:
      token: int32 [S'], text-vocabulary id of text inputs, PAD elsewhere.
      is_text: bool [S'], whether the input is a text-vocabulary token.
      position: float32 [S', 3].
      bounds: int32 [S', n], row-local.
      inputs, targets: `Slots` as in `Batch` but [N', ...] of the kinds that occur; `text` targets always.
        No `mtp` here, see below.
      mtp: One `Slots` (index, values["token"], weight; all [N']) per MTP module.
      mtp_token: int32 [depth, S'].
      text_bytes: UTF-8 bytes of the text that is learnt.
    """

    token: np.ndarray
    is_text: np.ndarray
    position: np.ndarray
    bounds: np.ndarray
    inputs: dict[str, Slots]
    targets: dict[str, Slots]
    mtp: tuple[Slots, ...]
    mtp_token: np.ndarray
    text_bytes: float

    @property
    def length(self) -> int:
        return len(self.token)

    @property
    def segment(self) -> np.ndarray:
        """int32 [S'], all 1."""
        return np.ones(self.length, np.int32)
