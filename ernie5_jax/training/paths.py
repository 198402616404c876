"""Where checkpoints lie."""

from __future__ import annotations

from pathlib import Path

from ernie5_jax.training.errors import CheckpointError

FOLDER = "checkpoints"


def find_checkpoint(path: str | Path) -> Path:
    """The step folder that `path` means: a run folder, its `checkpoints/` (the newest one), or a step folder itself.

    Raises:
      CheckpointError: There is none.
    """
    path = Path(path)
    if (path / "files" / "config.json").is_file() and (path / "state").is_dir():
        return path
    for folder in (path / FOLDER, path):
        steps = [int(f.name) for f in folder.glob("*") if f.name.isdecimal()] if folder.is_dir() else []
        if steps:
            return folder / str(max(steps))
    raise CheckpointError(f"checkpoint '{path}': none found, allowed: a run folder or one of its checkpoints/<step>")
