"""Sources of documents, and the tasks that one captioned example makes."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ernie5_jax.sequence import Document, Span

TASKS = (
    "image_generation",
    "image_caption",
    "video_generation",
    "video_caption",
    "speech_generation",
    "speech_caption",
    "text",
    "interleaved",
)
"""`meta["task"]` of a document: what its `generate` spans ask for. "interleaved" is everything else."""

MEDIUM_TASKS = {
    "image": ("image_generation", "image_caption"),
    "video": ("video_generation", "video_caption"),
    "audio": ("speech_generation", "speech_caption"),
}
"""The two directions of a captioned medium."""

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class DocumentSource(Protocol):
    """Random access to documents; item i is a pure function of i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def fingerprint(self) -> str:
        """Short hash of what decides the documents."""
        ...


class ListSource:
    """Documents held in memory."""

    def __init__(self, documents: Sequence[Document], name: str):
        self._documents, self._name = documents, name

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]

    def __iter__(self) -> Iterator[Document]:
        return iter(self._documents)

    def fingerprint(self) -> str:
        return short_hash([self._name, len(self)])


def short_hash(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def captioned(task: str, value: np.ndarray, caption: str, **meta: Any) -> Document:
    """The document of one captioned medium in the direction of `task`.

    Generation reads the caption (no loss) and learns the medium; captioning reads the medium and learns the caption.
    """
    modality = next(modality for modality, tasks in MEDIUM_TASKS.items() if task in tasks)
    meta = {"task": task, "caption": caption, **meta}
    if task.endswith("_generation"):
        return Document((Span("text", "understand", caption), Span(modality, "generate", value)), meta)  # type: ignore[arg-type]
    return Document((Span(modality, "understand", value), Span("text", "generate", caption)), meta)  # type: ignore[arg-type]


def passage(text: str, **meta: Any) -> Document:
    """A document of prose; `encode_documents` cuts it between words into as many documents as it needs."""
    return Document((Span("text", "generate", text),), {"task": "text", "split_text": True, **meta})


def infer_task(document: Document) -> str:
    """The task of a document that does not name one."""
    kinds = [(span.modality, span.role) for span in document.spans]
    if all(modality == "text" for modality, _ in kinds):
        return "text"
    media = [kind for kind in kinds if kind[0] != "text"]
    if len(media) == 1 and len(kinds) == 2:
        modality, role = media[0]
        if kinds[-1] == media[0] and role == "generate":
            return MEDIUM_TASKS[modality][0]
        if kinds[0] == media[0] and role == "understand" and kinds[1][1] == "generate":
            return MEDIUM_TASKS[modality][1]
    return "interleaved"


class ConcatSource:
    """Several sources one after the other."""

    def __init__(self, sources: Sequence[DocumentSource]):
        self._sources = list(sources)
        self._ends = np.cumsum([len(source) for source in self._sources]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        return self._sources[number][index - (self._ends[number - 1] if number else 0)]

    def fingerprint(self) -> str:
        return short_hash([source.fingerprint() for source in self._sources])
