"""Checkpoints: asynchronous, atomic, self-contained. The only module that knows orbax.

A run folder W has `checkpoints/<step>/`, each with `state/` (arrays), `files/` (resolved `config.json`, `run.json`, the
tokenizers) and the held-out loss. A step's folder appears by renaming, so one that exists is complete.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ernie5_jax.training.errors import CheckpointError
from ernie5_jax.training.paths import FOLDER, find_checkpoint

__all__ = ["Checkpoints", "find_checkpoint", "restore_state"]
_TEMPORARY = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of one run; opening it for writing removes what a dead run left half-written.

    Args:
      workdir: Run folder.
      keep: Latest ones that stay; the best by held-out loss stays besides.
      files: Content of `files/` of every checkpoint, by relative path; a `Path` is read when it is saved.
    """

    def __init__(self, workdir: Path, keep: int, files: dict[str, bytes | Path]):
        self._folder = Path(workdir).absolute() / FOLDER
        self._files = files
        self._folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._remove_temporaries()
        _silence_orbax()
        # Typed loosely: orbax annotates policies and metrics with the classes of its older interface.
        training: Any = ocp.training
        policies = training.preservation_policies
        best = policies.BestN(get_metric_fn=lambda m: -m["loss"], n=1, keep_checkpoints_without_metrics=False)
        self._writer: Any = training.Checkpointer(
            self._folder,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        latest = self._writer.latest
        return None if latest is None else latest.step

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the smallest held-out loss, None if none was evaluated."""
        scored = [(c.metrics["loss"], c.step) for c in self._writer.checkpoints if c.metrics]
        return min(scored)[1] if scored else None

    def folder(self, step: int) -> Path:
        """Where step number `step` lies."""
        return self._folder / str(step)

    def save(self, step: int, state: Any, held_out_loss: float | None = None) -> None:
        """Starts to write; returns as soon as the arrays may change.

        Raises:
          CheckpointError: This or the previous checkpoint cannot be written.
        """
        if self.latest == step:
            return
        with self._errors():
            if jax.default_backend() == "cpu":
                # Orbax would read the buffers of CPU arrays in place, and the next step reuses them.
                state = jax.tree.map(np.array, state)
            self._writer.save_checkpointables_async(
                step,
                {"state": state, "files": _Files(self._files)},
                force=True,
                metrics=None if held_out_loss is None else {"loss": held_out_loss},
            )

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of step `step`, laid out as `abstract` says (shapes, types, shardings)."""
        return restore_state(self.folder(step), abstract)

    def wait(self) -> None:
        """Returns when the checkpoint being written is complete. Raises `CheckpointError`."""
        with self._errors():
            self._writer.wait()

    def close(self) -> None:
        with self._errors():
            self._writer.close()

    def _remove_temporaries(self) -> None:
        for rest in self._folder.glob(f"*{_TEMPORARY}*"):
            shutil.rmtree(rest, ignore_errors=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise many kinds
            self._remove_temporaries()
            raise CheckpointError(
                f"checkpoint in '{self._folder}': cannot be written ({_first_line(error)}), "
                "allowed: a folder with room and permission"
            ) from error


class _Files:
    """The part of a checkpoint that is files: orbax calls `save` with a folder that becomes visible at the end."""

    def __init__(self, files: dict[str, bytes | Path]):
        self.files = files

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            root = Path(str(await directory.await_creation()))
            for name, content in self.files.items():
                target = root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            root = Path(str(directory))
            self.files = {str(f.relative_to(root)): f for f in root.rglob("*") if f.is_file()}

        return read()


_STATE_PARTS = ("_METADATA", "manifest.ocdbt", "d")


def restore_state(folder: Path, abstract: Any) -> Any:
    """Arrays of the step folder `folder`; leaves of `abstract` that are `...` are skipped.

    Raises:
      CheckpointError: Not readable, or of other shapes.
    """
    _silence_orbax()
    # Before orbax looks: its threads print tracebacks of their own about what is missing.
    missing = [part for part in _STATE_PARTS if not (Path(folder) / "state" / part).exists()]
    if missing:
        raise CheckpointError(f"checkpoint '{folder}': found no state/{missing[0]}, allowed: an intact one")
    try:
        return ocp.load_checkpointables(str(Path(folder).absolute()), {"state": abstract})["state"]
    except Exception as error:
        raise CheckpointError(
            f"checkpoint '{folder}': cannot be read ({_first_line(error)}), "
            "allowed: an intact one of this configuration"
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


class _DropOrbaxRecords(logging.Filter):
    """Orbax logs the traceback of a failed background write and then raises it: once is enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def _silence_orbax() -> None:
    logger = logging.getLogger("absl")
    if not any(isinstance(f, _DropOrbaxRecords) for f in logger.filters):
        logger.addFilter(_DropOrbaxRecords())
