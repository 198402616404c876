"""What a run reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ernie5_jax.sequence.types import Batch


@dataclasses.dataclass(frozen=True)
class RunData:
    """Batches and the files that make a checkpoint self-contained.

    Attributes:
      batches: From a step number to the batches of that and all later steps; batch i must be a pure function of i.
      held_out: Batches for the held-out loss, or None.
      files: Tokenizers and whatever else belongs into every checkpoint, by relative path.
      tokenizers: Their fingerprints by modality.
      program: A `step.TrainProgram` where it is compiled beside other work.
    """

    batches: Callable[[int], Iterator[Batch]]
    held_out: Callable[[], Iterable[Batch]] | None = None
    files: dict[str, bytes | Path] = dataclasses.field(default_factory=dict)
    tokenizers: dict[str, str] = dataclasses.field(default_factory=dict)
    program: Future[Any] | None = None


def files_below(folder: Path, prefix: str) -> dict[str, bytes | Path]:
    """All files below `folder`, named `prefix/...`, for `RunData.files`."""
    return {f"{prefix}/{f.relative_to(folder)}": f for f in sorted(folder.rglob("*")) if f.is_file()}
