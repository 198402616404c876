"""Folders of records: ArrayRecord shards, each written under a temporary name and renamed, with a state file.

A folder that is not finished resumes: shards that are there are kept, the rest is made. `state.json` says of what the
shards are made; another source in the same folder starts anew.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ernie5_jax.data.documents import DocumentSource, short_hash
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.records import pack_document, unpack_document
from ernie5_jax.files import make_folder, unwritable, write_json
from ernie5_jax.sequence import Document

FORMAT = 1
"""Version of the record format; a folder of another one is made anew."""
_STATE = "state.json"


def write_record_shards(
    folder: Path,
    identity: dict[str, Any],
    count: int,
    records: Callable[[int, int], Sequence[bytes]],
    *,
    shard_size: int = 1024,
    workers: int = 1,
    progress: bool = True,
    description: str = "",
) -> list[Path]:
    """Makes the missing shards of a folder.

    Args:
      folder: Where; made if missing.
      identity: What the shards are made of, JSON-able; shards of another identity are removed first.
      count: Items of the source.
      records: Records of items start ... stop - 1; need not be one per item. Called from threads.
      shard_size: Items per shard.
      workers: Shards that are made at a time; more than one pays where `records` waits for JAX.
      progress: Whether to show a bar.
      description: Its text.

    Returns:
      Paths of all shards in order.
    """
    make_folder(folder)
    state = {"format": FORMAT, "identity": identity, "count": count, "shard_size": shard_size, "complete": False}
    old = read_state(folder)
    if old is None or {**old, "complete": False} != state:
        for path in [folder / _STATE, *_shard_files(folder)]:
            path.unlink(missing_ok=True)
        write_json(folder / _STATE, state, indent=1, sort_keys=True)
    for path in folder.glob("*.tmp"):
        path.unlink()
    shards = -(-count // shard_size)
    paths = [folder / f"records-{i:05d}-of-{shards:05d}.array_record" for i in range(shards)]

    def make(i: int) -> int:
        start, stop = i * shard_size, min(count, (i + 1) * shard_size)
        if not paths[i].exists():
            _write_shard(paths[i], records(start, stop))
        return stop - start

    bar = tqdm(total=count, desc=description, unit=" documents", disable=not progress, leave=False)
    with bar, ThreadPoolExecutor(workers) as pool:
        for made in pool.map(make, range(shards)):
            bar.update(made)
    write_json(folder / _STATE, {**state, "complete": True}, indent=1, sort_keys=True)
    return paths


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state file of a folder of shards, None where there is none (or a damaged one)."""
    try:
        state = json.loads((folder / _STATE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return state if isinstance(state, dict) and {"format", "identity", "count", "shard_size"} <= set(state) else None


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raises a `DataError` that names `path` for what array_record says of a damaged file."""
    try:
        yield
    except RuntimeError as error:
        raise DataError(
            f"file '{path}': damaged ({str(error).partition(';')[0]}), allowed: an intact one; delete its folder and "
            "it is prepared anew"
        ) from error


class RecordShards:
    """Random access to the records of a finished folder."""

    def __init__(self, folder: Path | str):
        """Raises a `DataError` naming the folder when it holds no finished shards."""
        self.folder = Path(folder)
        state = read_state(self.folder)
        if state is None or not state.get("complete"):
            found = "no prepared data" if state is None else "data whose preparation was not finished"
            raise DataError(f"folder '{folder}': found {found}, allowed: a folder written by experiments.prepare_data")
        if state["format"] != FORMAT:
            raise DataError(f"folder '{folder}': found record format {state['format']}, allowed: {FORMAT}")
        self.identity: dict[str, Any] = state["identity"]
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        paths = _shard_files(self.folder)
        if len(paths) != -(-state["count"] // state["shard_size"]):
            raise DataError(f"folder '{folder}': found {len(paths)} shards, some are missing; prepare it again")
        self._paths, self._shards = paths, list[Any]()
        for path in paths:
            with _whole(path):
                self._shards.append(ArrayRecordDataSource([str(path)]))
        self._ends: list[int] = []
        for shard in self._shards:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(shard))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def record(self, index: int) -> bytes:
        """Bytes of record `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect.bisect_right(self._ends, index)
        with _whole(self._paths[shard]):
            return self._shards[shard][index - (self._ends[shard - 1] if shard else 0)]

    def fingerprint(self) -> str:
        return short_hash([self.identity, len(self)])


class DocumentShards(RecordShards):
    """Random access to the documents of a folder that `write_shards` finished."""

    def __init__(self, folder: Path | str):
        super().__init__(folder)
        if "sample_rate" not in self.identity:
            raise DataError(f"folder '{folder}': found encoded documents, allowed: prepared ones, not yet tokenised")

    def __getitem__(self, index: int) -> Document:
        return unpack_document(self.record(index))

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    @property
    def sample_rate(self) -> int:
        """Hz of all audio."""
        return self.identity["sample_rate"]


def write_shards(
    source: DocumentSource,
    folder: Path | str,
    sample_rate: int,
    *,
    shard_size: int = 1024,
    progress: bool = True,
    description: str = "preparing",
) -> DocumentShards:
    """Writes (or goes on writing) the documents of a source; see `write_record_shards`.

    Args:
      source: Documents whose pictures have their final size and whose audio is `sample_rate` Hz.
      folder: Where to.
      sample_rate: Hz.
      shard_size: Documents per shard.
      progress: Whether to show a bar.
      description: Its text.
    """
    folder = Path(folder)
    identity = {"source": source.fingerprint(), "sample_rate": sample_rate}

    def records(start: int, stop: int) -> list[bytes]:
        return [pack_document(source[i], sample_rate) for i in range(start, stop)]

    write_record_shards(
        folder, identity, len(source), records, shard_size=shard_size, progress=progress, description=description
    )
    return DocumentShards(folder)


def read_shards(folder: Path | str) -> DocumentShards:
    """Opens a folder of documents; raises a `DataError` when it is not finished."""
    return DocumentShards(folder)


def _shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("records-*-of-*.array_record"))


def _write_shard(path: Path, records: Sequence[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    temporary = path.with_name(path.name + ".tmp")
    try:
        writer = ArrayRecordWriter(str(temporary), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
    except RuntimeError as error:  # a full disk, a folder that is not writable
        temporary.unlink(missing_ok=True)
        raise unwritable(path, OSError(str(error).partition(";")[0])) from None
    os.replace(temporary, path)
