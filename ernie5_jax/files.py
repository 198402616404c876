"""Files that appear whole or not at all. Everything that is written for good, checkpoints apart, is written here."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ernie5_jax.errors import UserError


class FileError(UserError):
    """A file that cannot be written."""


def write_file(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Writes under a temporary name beside `path`, then renames; makes the folder where it is missing.

    Raises:
      FileError: No room, no permission, a file where a folder must be; what was at `path` before stays.
    """
    path = Path(path)
    # A fixed name: what a killed process left behind is overwritten by the next one.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise unwritable(path, error) from None


def write_json(path: str | os.PathLike[str], value: Any, **options: Any) -> None:
    """`write_file` of `json.dumps(value, **options)` and a newline."""
    write_file(path, json.dumps(value, **options) + "\n")


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Any], *, compress: bool = False) -> None:
    """`write_file` of an .npz archive."""
    # In memory first: a zip file that ran out of disk complains once more when it is collected.
    buffer = io.BytesIO()
    save: Any = np.savez_compressed if compress else np.savez
    save(buffer, **arrays)
    write_file(path, buffer.getvalue())


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Makes a folder and those above it; raises a `FileError` where that is not possible."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None
    return Path(path)


def unwritable(path: str | os.PathLike[str], error: OSError) -> FileError:
    """The error that says why `path` cannot be written."""
    reason = error.strerror or str(error)
    return FileError(f"'{os.fspath(path)}': cannot be written ({reason}), allowed: a place with room and permission")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # e.g. its folder is a file
        return
