"""Which document comes next: a pure function of (seed, global index)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ernie5_jax.config import DataConfig
from ernie5_jax.data.documents import infer_task
from ernie5_jax.data.errors import DataError
from ernie5_jax.sequence import Document

BLOCK = 1024
"""Documents (about) of one block of the stream; a block is packed on its own."""


class Draw(NamedTuple):
    """One document of the stream.

    Attributes:
      document: Its number among all documents.
      epoch: How often its group was gone through before.
    """

    document: int
    epoch: int


class Mixture:
    """An endless stream of documents with fixed shares per group (source and task), each reshuffled every epoch."""

    def __init__(self, groups: Sequence[np.ndarray], weights: Sequence[float], seed: int):
        """
        Args:
          groups: Document numbers of each group, none empty.
          weights: Share of each group, in any unit; at least one is positive.
          seed: Of all shuffling.
        """
        total = float(sum(weights))
        self._groups = [np.asarray(group, np.int64) for group in groups]
        self._shares = [weight / total for weight in weights]
        self._seed = seed
        self._order = functools.lru_cache(maxsize=4 * len(groups))(self._shuffled)

    def block(self, number: int) -> list[Draw]:
        """Documents of block `number`, in random order; every group has its share of every block, rounded."""
        draws = []
        for group, share in enumerate(self._shares):
            start, stop = (int(share * BLOCK * n) for n in (number, number + 1))
            draws += [self._draw(group, k) for k in range(start, stop)]
        order = np.random.default_rng((self._seed, 1, number)).permutation(len(draws))
        return [draws[i] for i in order]

    def _draw(self, group: int, occurrence: int) -> Draw:
        epoch, position = divmod(occurrence, len(self._groups[group]))
        return Draw(int(self._order(group, epoch)[position]), epoch)

    def _shuffled(self, group: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, 0, group, epoch)).permutation(self._groups[group])


def check_tasks(sources: Iterable[Iterable[Document]], config: DataConfig) -> None:
    """Raises a `DataError` for a task of `task_weights` that no document has; reads no further than it must."""
    missing = {task for task, weight in config.task_weights.items() if weight > 0}
    known: set[str] = set()
    for document in itertools.chain.from_iterable(sources if missing else ()):
        task = document.meta.get("task") or infer_task(document)
        known.add(task)
        missing.discard(task)
        if not missing:
            return
    for task in sorted(missing):
        raise _no_document(task, known)


def _no_document(task: str, known: Iterable[str]) -> DataError:
    return DataError(
        f"config key 'data.task_weights.{task}': found no document, allowed: {', '.join(sorted(known))}, or 0"
    )


def make_groups(
    tasks: Mapping[str, np.ndarray], config: DataConfig
) -> tuple[list[np.ndarray], list[float], list[tuple[str, str]]]:
    """Groups of documents and their weights.

    With `task_weights` a task has its share whatever the sizes (tasks that are not listed are left out), divided among
    sources by source weight times number of documents. Without, a source has its share, its documents as they come.

    Args:
      tasks: Task of every document of every source, in the order in which documents are numbered.
      config: Weights.

    Returns:
      Document numbers, weight and (source, task) of every group of positive weight.

    Raises:
      DataError: A task of `task_weights` that no document has, or nothing left.
    """
    counts: dict[tuple[str, str], np.ndarray] = {}
    start = 0
    for source, names in tasks.items():
        for task in sorted(set(names.tolist())):
            counts[source, task] = start + np.flatnonzero(names == task)
        start += len(names)
    known = sorted({task for _, task in counts})
    for task, weight in config.task_weights.items():
        if weight > 0 and task not in known:
            raise _no_document(task, known)
    weights = {key: _weight(key, counts, config) for key in counts}
    names = [key for key, weight in weights.items() if weight > 0]
    if not names:
        raise DataError(f"config key 'data.task_weights': found nothing to train on, allowed: {', '.join(known)}")
    return [counts[name] for name in names], [weights[name] for name in names], names


def _weight(key: tuple[str, str], counts: Mapping[tuple[str, str], np.ndarray], config: DataConfig) -> float:
    source_weight = {source: config.sources[source].weight if source in config.sources else 1.0 for source, _ in counts}
    source, task = key
    if not config.task_weights:
        total = sum(len(numbers) for (other, _), numbers in counts.items() if other == source)
        return source_weight[source] * len(counts[key]) / total
    shares = {other: source_weight[other] * len(counts[other, task]) for other, name in counts if name == task}
    total = sum(shares.values())
    return config.task_weights.get(task, 0.0) * shares[source] / total if total else 0.0
