"""JSONL manifests: what users write, checked in full before anything is made of it.

One line is one document:

    {"spans": [{"text": "a red kite", "role": "understand"}, {"image": "kite.png", "role": "generate"}], "meta": {}}

A span has one of the keys text, image, video, audio and a role (`generate` or `understand`; text may leave it out and
is then generated). Paths are relative to the manifest. A span that is already tokenised holds arrays instead:
{"text": {"ids": [...], "num_bytes": n}},
{"image": {"latents": "x.npy"}} or {"image": {"bits": "x.npy"}} (generate), {"image": {"features":
"x.npy"}} (understand), {"audio": {"codes": "x.npy"}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ernie5_jax.config import ExperimentConfig
from ernie5_jax.data import media
from ernie5_jax.data.documents import infer_task, short_hash
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.sizes import check_capacity
from ernie5_jax.sequence import Document, EncodedAudio, EncodedText, EncodedVisual, Span
from ernie5_jax.text.special_tokens import SEP

MODALITIES = ("text", "image", "video", "audio")
ROLES = ("generate", "understand")
_READERS = {"image": media.read_image, "video": media.read_video, "audio": media.read_audio}
_VISUAL_ARRAYS = ("latents", "bits", "features")
_ARRAYS = {"image": _VISUAL_ARRAYS, "video": _VISUAL_ARRAYS, "audio": ("codes",)}
_DTYPES = {"latents": np.float32, "features": np.float32, "bits": np.int8, "codes": np.int32}


class Problem(NamedTuple):
    """One bad line: its number from 1, the part that is wrong, and why."""

    line: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}: {self.why}"


class ManifestError(DataError):
    """A manifest with bad lines; `problems` has them all."""

    def __init__(self, path: Path, problems: list[Problem]):
        self.problems = problems
        lines = "".join(f"\n  {problem}" for problem in problems)
        found = f"{len(problems)} bad line{'s' if len(problems) > 1 else ''}"
        super().__init__(f"manifest '{path}': found {found}, allowed: none{lines}")


class _Bad(Exception):
    """What is wrong with a line, and why."""

    def __init__(self, what: str, why: str):
        self.what, self.why = what, why
        super().__init__(f"{what}: {why}")


class Manifest:
    """Random access to the documents of a manifest. Reading checks a document; `check` does so for all of them."""

    def __init__(self, path: Path | str, config: ExperimentConfig):
        """
        Args:
          path: The .jsonl file.
          config: Formats that media are brought to, and capacities that documents must fit.

        Raises:
          DataError: There is no such file, or it has no lines.
        """
        self.path, self._config = Path(path), config
        self._format = media.MediaFormat.of(config)
        if not self.path.is_file():
            raise DataError(f"manifest '{path}': found no such file, allowed: an existing .jsonl file")
        self._offsets = list(_line_offsets(self.path))
        if not self._offsets:
            raise DataError(f"manifest '{path}': found no lines, allowed: at least one document")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Document:
        try:
            return self._read(index)
        except _Bad as bad:
            raise ManifestError(self.path, [Problem(self._offsets[index][0], bad.what, bad.why)]) from None

    def split(self, index: int) -> str:
        """Split of document `index`, "train" unless its `meta` says otherwise; reads no media."""
        return _parse(self._line(index)).get("meta", {}).get("split", "train")

    def fingerprint(self) -> str:
        stat = self.path.stat()
        return short_hash([str(self.path.resolve()), stat.st_size, stat.st_mtime_ns, vars(self._format)])

    def check(self, progress: bool = True, workers: int = 4) -> list[Problem]:
        """Reads every line and every file; returns all bad lines in order."""
        numbers = range(len(self))
        with ThreadPoolExecutor(workers) as pool:
            found = tqdm(
                pool.map(self._problem, numbers),
                total=len(self),
                desc=f"checking {self.path.name}",
                unit=" documents",
                disable=not progress,
            )
            return [problem for problem in found if problem]

    def _problem(self, index: int) -> Problem | None:
        try:
            self._read(index)
        except _Bad as bad:
            return Problem(self._offsets[index][0], bad.what, bad.why)
        return None

    def _line(self, index: int) -> bytes:
        _, offset, size = self._offsets[index]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def _read(self, index: int) -> Document:
        plain = _parse(self._line(index))
        meta = {"source": f"{self.path.name} line {self._offsets[index][0]}", **plain.get("meta", {})}
        spans = tuple(self._span(i, span) for i, span in enumerate(plain["spans"]))
        document = Document(spans, meta)
        meta.setdefault("task", infer_task(document))
        try:
            check_capacity(document, self._config)
        except ValueError as error:
            raise _Bad("document", str(error)) from None
        return document

    def _span(self, number: int, span: Any) -> Span:
        what = f"span {number}"
        if not isinstance(span, dict):
            raise _Bad(what, f"found {_short(span)}, allowed: an object")
        modality = _only([key for key in span if key in MODALITIES], what, MODALITIES)
        unknown = sorted(set(span) - {modality, "role"})
        if unknown:
            raise _Bad(what, f"found unknown key {unknown[0]!r}, allowed: {modality}, role")
        role = span.get("role", "generate" if modality == "text" else None)
        if role not in ROLES:
            raise _Bad(f"{what} role", f"found {_short(role)}, allowed: {', '.join(ROLES)}")
        value = span[modality]
        if isinstance(value, dict):
            return Span(modality, role, self._arrays(f"{what} {modality}", modality, value))  # type: ignore[arg-type]
        if not isinstance(value, str):
            raise _Bad(f"{what} {modality}", f"found {_short(value)}, allowed: a string")
        if not value:
            allowed = "at least one character" if modality == "text" else "a path"
            raise _Bad(f"{what} {modality}", f"found an empty string, allowed: {allowed}")
        if modality == "text":
            return Span("text", role, value)
        try:
            return Span(modality, role, _READERS[modality](self.path.parent / value, self._format))  # type: ignore[arg-type]
        except (DataError, OSError) as error:
            why = str(error).removeprefix(f"{self.path.parent / value}: ")
            raise _Bad(f"{what} {modality} '{value}'", why) from None

    def _arrays(self, what: str, modality: str, value: dict[str, Any]) -> Any:
        """A tokenised span."""
        if modality == "text":
            ids, num_bytes = value.get("ids"), value.get("num_bytes")
            size = self._config.model.vocab_size
            if set(value) != {"ids", "num_bytes"} or type(num_bytes) is not int or not _are_ids(ids, size):
                allowed = f"ids (a list of integers {SEP + 1} ... {size - 1}), num_bytes"
                raise _Bad(what, f"found {_short(value)}, allowed: {allowed}")
            return EncodedText(np.asarray(ids, np.int32), num_bytes)
        key = _only(list(value), what, _ARRAYS[modality])
        if key not in _ARRAYS[modality] or not isinstance(value[key], str):
            raise _Bad(
                what, f"found {_short(value)}, allowed: {' or '.join(_ARRAYS[modality])} with the path of an .npy"
            )
        try:
            array = np.load(self.path.parent / value[key], allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise _Bad(f"{what} '{value[key]}'", f"found {error}, allowed: an .npy file") from None
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            found = getattr(array, "dtype", "an .npz file")
            raise _Bad(f"{what} '{value[key]}'", f"found {found}, allowed: one array of numbers")
        wrong = _wrong_array(key, array, self._config)
        if wrong:
            raise _Bad(f"{what} '{value[key]}'", wrong)
        kind = EncodedAudio if modality == "audio" else EncodedVisual
        return kind(**{key: array.astype(_DTYPES[key])})


def check_manifest(path: Path | str, config: ExperimentConfig, progress: bool = True) -> Manifest:
    """The manifest, every line and file of which has been read without fault.

    Raises:
      ManifestError: Lists all bad lines: line, what, why.
    """
    manifest = Manifest(path, config)
    problems = manifest.check(progress)
    if problems:
        raise ManifestError(manifest.path, problems)
    return manifest


def _line_offsets(path: Path) -> Iterator[tuple[int, int, int]]:
    """(number from 1, offset, size) of every line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, offset, len(line)
            offset += len(line)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Bad("line", f"found byte {error.start} that is not UTF-8, allowed: UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _Bad("line", f"found text that is not JSON ({error}), allowed: one JSON object") from None
    if not isinstance(plain, dict):
        raise _Bad("line", f"found {_short(plain)}, allowed: an object with spans")
    unknown = sorted(set(plain) - {"spans", "meta"})
    if unknown:
        raise _Bad("document", f"found unknown key {unknown[0]!r}, allowed: spans, meta")
    if not isinstance(plain.get("spans"), list) or not plain["spans"]:
        raise _Bad("spans", f"found {_short(plain.get('spans'))}, allowed: a list of at least one span")
    if not isinstance(plain.get("meta", {}), dict):
        raise _Bad("meta", f"found {_short(plain['meta'])}, allowed: an object")
    meta = plain.get("meta", {})
    split = meta.get("split", "train")
    if split not in ("train", "test"):
        raise _Bad("meta split", f"found {_short(split)}, allowed: train, test")
    texts = [isinstance(span, dict) and isinstance(span.get("text"), str) for span in plain["spans"]]
    if meta.get("split_text", False) and texts != [True]:
        raise _Bad("meta split_text", "found beside other spans, allowed: in a document of one text")
    if not isinstance(meta.get("task", ""), str):
        raise _Bad("meta task", f"found {_short(meta['task'])}, allowed: a string")
    return plain


def _only(keys: list[str], what: str, allowed: tuple[str, ...]) -> str:
    if len(keys) != 1:
        raise _Bad(what, f"found {', '.join(keys) or 'none'} of the keys {', '.join(allowed)}, allowed: exactly one")
    return keys[0]


def _are_ids(ids: Any, size: int) -> bool:
    return isinstance(ids, list) and len(ids) > 0 and all(type(i) is int and SEP < i < size for i in ids)


def _wrong_array(key: str, array: np.ndarray, config: ExperimentConfig) -> str:
    """What is wrong with a tokenised span, "" where nothing is."""
    visual, grid = config.visual, config.visual.scales[-1]
    tail, highest = {
        "codes": ((config.audio.levels,), config.audio.bins - 1),
        "bits": ((sum(side * side for side in visual.scales), visual.bits), 1),
        "latents": ((grid, grid, visual.bits), None),
        "features": ((1, visual.feature_dim), None),
    }[key]
    axes = 5 if key == "features" else 1 + len(tail)  # features are [t, h, w, 1, D] with h, w of their own
    if array.ndim != axes or array.shape[axes - len(tail) :] != tail or not array.size:
        return f"found shape {list(array.shape)}, allowed: {axes} axes that end in {', '.join(map(str, tail))}, none 0"
    low, high = array.min(), array.max()
    if highest is None:
        return "" if np.isfinite(low) and np.isfinite(high) else "found values that are not finite, allowed: numbers"
    return "" if low >= 0 and high <= highest else f"found values {low} ... {high}, allowed: 0 ... {highest}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
