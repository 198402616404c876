"""Batches in the order of steps, prepared ahead by grain; the position is one number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ernie5_jax.data.errors import DataError
from ernie5_jax.data.tfds_source import with_flags_parsed
from ernie5_jax.sequence import Batch

STEPS = 2**40
"""More steps than any run has; grain wants a length."""


class BatchSource(Protocol):
    """`RowSource` or `HeldOutRows`."""

    def batch(self, step: int, rows: int) -> Batch: ...


class Loader(Iterator[Batch]):
    """Iterator of host batches. `step` is its whole state: the step whose batch comes next.

    Example:
      loader = make_loader(rows, batch_rows=20)
      loader.seek(restored_step)
      batch = next(loader)
    """

    def __init__(self, source: BatchSource, batch_rows: int, *, step: int = 0, prefetch: int = 2):
        self._source, self._batch_rows, self._prefetch = source, batch_rows, prefetch
        self.seek(step)

    def seek(self, step: int) -> None:
        """Lets the batch of `step` come next."""
        if step < 0:
            raise DataError(f"step: found {step}, allowed: >= 0")
        with_flags_parsed()
        import grain

        self.step = step
        steps = grain.MapDataset.range(step, STEPS).map(lambda n: self._source.batch(int(n), self._batch_rows))
        # One thread: more would fight for the interpreter, and it is faster than a step.
        options = grain.ReadOptions(num_threads=min(1, self._prefetch), prefetch_buffer_size=self._prefetch)
        self._iterator = iter(steps.to_iter_dataset(options))

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self.step += 1
        return batch

    def close(self) -> None:
        """Stops preparing batches."""
        close = getattr(self._iterator, "close", None)
        if close:
            close()


def make_loader(source: BatchSource, batch_rows: int, *, step: int = 0, prefetch: int = 2) -> Loader:
    """A `Loader` of global batches.

    Args:
      source: Where rows come from.
      batch_rows: Rows of one optimiser step, all micro-batches together; denominators are over all of them.
      step: First step.
      prefetch: Batches prepared ahead by a thread; 0 prepares them when asked.
    """
    return Loader(source, batch_rows, step=step, prefetch=prefetch)
