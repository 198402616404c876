"""What the rest of the library expects of a text tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np


class TextTokenizer(Protocol):
    """Text <-> ids. Special tokens have the fixed ids of `special_tokens`."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] ids of `text`, without BOS or EOS; never a special token."""
        ...

    def encode_dropout(self, text: str, key: tuple[int, ...], rate: float) -> np.ndarray:
        """BPE-dropout encoding, a pure function of (text, key, rate); `key` is e.g. (seed, document, epoch)."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids`; special tokens are skipped."""
        ...

    def fingerprint(self) -> str:
        """Short hash of everything that decides the encoding."""
        ...

    def save(self, folder: Path) -> None: ...
