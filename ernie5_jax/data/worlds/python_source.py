"""The source code of Python's standard library: some ten megabytes of real text that lie wherever this library runs."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

HELD_OUT_EVERY = 20
"""About one module in this many is held out, told by its name."""
_LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


def modules(split: str) -> list[tuple[str, str]]:
    """(path, text) of the modules of a split, by path. What differs between machines is left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if path.name.startswith("_sysconfigdata") or any(part in _LEFT_OUT for part in name.split("/")):
            continue
        held_out = zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0
        if held_out != (split == "test"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            found.append((name, text))
    return found
