"""The merge loop of byte-pair encoding, with a say over every single merge."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Rules = dict[tuple[int, int], tuple[int, int]]
"""(left, right) -> (rank, merged symbol); the lowest rank is applied first, among equals the leftmost."""


def merge(symbols: Sequence[int], rules: Rules, accept: Callable[[int], bool]) -> list[int]:
    """Applies merges to one word until none is left or all that are left were dropped.

    Args:
      symbols: Symbols of the word.
      rules: Known merges.
      accept: Called with the rank of the merge whose turn it is; False drops it until another one was applied.

    Returns:
      The merged symbols.

    Source: Provilkov et al. 2020, algorithm 1; order of application and retries as in the `tokenizers` library.
    """
    values = list(symbols)
    size = len(values)
    before = list(range(-1, size - 1))
    after = list(range(1, size + 1))
    heap: list[tuple[int, int, int, int, int]] = []

    def offer(at: int, other: int) -> None:
        rule = rules.get((values[at], values[other]))
        if rule is not None:
            heapq.heappush(heap, (rule[0], at, values[at], values[other], rule[1]))

    for i in range(size - 1):
        offer(i, i + 1)
    dropped = []
    while heap:
        entry = heapq.heappop(heap)
        rank, at, left, right, merged = entry
        other = after[at]
        if values[at] != left or other >= size or values[other] != right:
            continue  # one of the two was merged otherwise
        if not accept(rank):
            dropped.append(entry)
            continue
        values[at], values[other] = merged, -1
        after[at] = after[other]
        if after[at] < size:
            before[after[at]] = at
            offer(at, after[at])
        if before[at] >= 0:
            offer(before[at], at)
        for entry in dropped:
            heapq.heappush(heap, entry)
        dropped.clear()
    return [value for value in values if value >= 0]
