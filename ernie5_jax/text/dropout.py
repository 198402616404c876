"""Which merges BPE-dropout drops."""

from __future__ import annotations

import numpy as np


class Gaps:
    """Stream of dropped merges: `left` merges from now the next one is dropped (1: this one)."""

    def __init__(self, key: tuple[int, ...], rate: float):
        # Generator.geometric may change between numpy versions, raw Philox output may not.
        self._bits = np.random.Philox(np.random.SeedSequence(key))
        self._log_keep = np.log1p(-rate) if rate < 1 else -np.inf
        self._drawn: list[int] = []
        self.left = 0
        self.next()

    def next(self) -> None:
        if not self._drawn:
            uniform = ((self._bits.random_raw(64) >> np.uint64(11)) + 1) * 2.0**-53  # in (0, 1]
            self._drawn = np.minimum(np.log(uniform) / self._log_keep, 2.0**60).astype(np.int64).tolist()[::-1]
        self.left = 1 + self._drawn.pop()

    def accept(self) -> bool:
        self.left -= 1
        if self.left:
            return True
        self.next()
        return False


class Drops:
    """Drops the merges whose turns (from 1) are given; after these all pass, or `then` decides."""

    def __init__(self, drops: tuple[int, ...], then: Gaps | None = None):
        self._drops = drops
        self._then = then
        self.turns = 0

    def accept(self, rank: int) -> bool:
        del rank  # all merges are alike
        self.turns += 1
        if self._then is not None and self.turns > self._drops[-1]:
            return self._then.accept()
        return self.turns not in self._drops
