"""Metrics on disk: JSON lines that survive kills, and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ernie5_jax.files import unwritable, write_file

FILE = "metrics.jsonl"
PROCESS_FIELDS = ("tokens_per_second", "step_seconds", "elapsed_seconds", "mfu", "compilations")
"""Fields about time and process: not part of the promise that a resumed run repeats an uninterrupted one."""


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Complete records of a run, in order; [] if there are none."""
    path = Path(workdir) / FILE
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break  # the line that a killed process was writing
    return records


class MetricsLog:
    """Writes one record per logged step.

    Args:
      workdir: Run folder.
      step: Step the run starts from; records of later steps are removed first.
      tensorboard: Whether `workdir/tensorboard` is written too.
    """

    def __init__(self, workdir: Path, step: int, tensorboard: bool):
        path = Path(workdir) / FILE
        kept = [record for record in read_metrics(workdir) if record["step"] <= step]
        write_file(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a")
        self._board = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(Path(workdir) / "tensorboard"), purge_step=step + 1, flush_secs=10)

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record`, which has a "step"; it is on disk (of this machine) when the call returns."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self._file.name, error) from None
        if self._board is None:
            return
        for name, value in record.items():
            for number, item in enumerate(value if isinstance(value, list) else [value]):
                tag = f"{name}/{number}" if isinstance(value, list) else name
                if isinstance(item, int | float):
                    self._board.add_scalar(tag, item, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
