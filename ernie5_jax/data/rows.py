"""Packed rows by number: row i is a pure function of (seed, i) and the recorded lengths of the documents."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ernie5_jax.config import ExperimentConfig
from ernie5_jax.data.encoding import DROPOUT_RESERVE, EncodedDocuments, Tokenizers
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.mixture import Draw, Mixture, make_groups
from ernie5_jax.sequence import (
    Batch,
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    Row,
    Sizes,
    layout,
    pack,
    plan_rows,
    stack,
)
from ernie5_jax.vision.pyramid import ScalePyramid

CACHE_BYTES = 256 * 2**20
"""Records kept decoded in memory, counted by their encoded size."""
CACHE_ROWS = 20_000
"""Laid-out documents kept in memory where nothing about them is random."""
_LENGTH, _TEXT = Sizes._fields.index("length"), Sizes._fields.index("text_targets")


class Collection:
    """Encoded documents of several sources, numbered through in the order of the sources' names."""

    def __init__(self, sources: Mapping[str, EncodedDocuments]):
        self.sources = {name: sources[name] for name in sorted(sources)}
        self.tasks = {name: source.tasks for name, source in self.sources.items()}
        parts = list(self.sources.values())
        self.sizes = np.concatenate([part.sizes for part in parts])
        self.text_tokens = np.concatenate([part.text_tokens for part in parts])
        self._ends = np.cumsum([len(part) for part in parts])
        self._parts = parts
        self._cache: dict[int, tuple[EncodedDocument, list[str | None]]] = {}
        self._cached_bytes = 0

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, number: int) -> tuple[EncodedDocument, list[str | None]]:
        """Document `number` and the texts of its text spans; decoded once while there is room."""
        found = self._cache.get(number)
        if found is None:
            part = int(np.searchsorted(self._ends, number, side="right"))
            local = number - (int(self._ends[part - 1]) if part else 0)
            found = self._parts[part].read(local)
            size = sum(leaf.nbytes for span in found[0].spans for leaf in _arrays(span))
            if self._cached_bytes + size <= CACHE_BYTES:
                self._cached_bytes += size
                self._cache[number] = found
        return found


def _arrays(span: EncodedSpan) -> list[np.ndarray]:
    return [value for value in vars(span.value).values() if isinstance(value, np.ndarray)]


class RowMaker:
    """Documents -> one packed row."""

    def __init__(self, collection: Collection, config: ExperimentConfig, tokenizers: Tokenizers, *, train: bool):
        for source in collection.sources.values():
            source.check_tokenizers(tokenizers)
        self._collection, self._config, self._text, self._train = collection, config, tokenizers.text, train
        self._pyramid = ScalePyramid(tokenizers.visual.scales, tokenizers.visual.bits)
        self.dropout = config.text.dropout if train else 0.0
        self._fixed: dict[int, Row] = {}

    def row(self, draws: Sequence[Draw]) -> Batch:
        """The draws' documents in one row (no row axis); random parts are functions of (seed, document, epoch)."""
        return pack([self._layout(draw) for draw in draws], self._config.sequence, self._config.model)

    def _layout(self, draw: Draw) -> Row:
        row = self._fixed.get(draw.document)
        if row is None:
            config = self._config
            rng = np.random.default_rng((config.seed, 2, draw.document, draw.epoch)) if self._train else None
            row = layout(
                self.document(draw, rng),
                config.sequence,
                self._pyramid,
                audio_bins=config.audio.bins,
                mtp_depth=config.model.mtp_depth,
                rng=rng,
                train=self._train,
            )
            if len(self._fixed) < CACHE_ROWS and self._is_fixed(draw.document):
                self._fixed[draw.document] = row
        return row

    def _is_fixed(self, number: int) -> bool:
        """Whether nothing random enters the layout: no BPE-dropout, flips, dropped conditions or corrupted media."""
        if not self._train:
            return False  # read once
        spans = self._collection.read(number)[0].spans
        generates = any(span.role == "generate" and span.modality != "text" for span in spans)
        corrupted = any(span.role == "understand" and self._corruption(span.value) for span in spans)
        return not (self.dropout or generates or corrupted)

    def _corruption(self, value: Any) -> float:
        """Largest share of a value that training corrupts where it is understood."""
        if isinstance(value, EncodedAudio):
            return self._config.data.audio_corruption
        return self._config.data.visual_corruption if isinstance(value, EncodedVisual) else 0.0

    def document(self, draw: Draw, rng: np.random.Generator | None) -> EncodedDocument:
        """The document of a draw with its augmentations."""
        document, texts = self._collection.read(draw.document)
        if rng is not None:
            document = self._corrupt(document, rng)
        if self.dropout:
            document = self._drop_merges(document, texts, draw)
        return document

    def _corrupt(self, document: EncodedDocument, rng: np.random.Generator) -> EncodedDocument:
        """Understood media with a share of their cells, drawn from U(0, largest) per span, made useless."""
        spans = []
        for span in document.spans:
            largest = self._corruption(span.value) if span.role == "understand" else 0.0
            if largest:
                span = dataclasses.replace(span, value=self._corrupted(span.value, rng.uniform(0, largest), rng))
            spans.append(span)
        return dataclasses.replace(document, spans=tuple(spans))

    def _corrupted(self, value: Any, share: float, rng: np.random.Generator) -> EncodedAudio | EncodedVisual:
        if isinstance(value, EncodedAudio):
            wrong = rng.random(value.codes.shape) < share
            noise = rng.integers(0, self._config.audio.bins, value.codes.shape, dtype=value.codes.dtype)
            return EncodedAudio(np.where(wrong, noise, value.codes))
        lost = rng.random(value.features.shape[:3]) < share
        return dataclasses.replace(value, features=np.where(lost[..., None, None], 0, value.features))

    def _drop_merges(self, document: EncodedDocument, texts: Sequence[str | None], draw: Draw) -> EncodedDocument:
        """Text encoded anew with BPE-dropout, unless it became longer than its reserve."""
        spans, tokens = [], 0
        for number, (span, text) in enumerate(zip(document.spans, texts, strict=True)):
            if text is not None and isinstance(span.value, EncodedText):
                key = (self._config.seed, draw.document, draw.epoch, number)
                ids = self._text.encode_dropout(text, key, self.dropout)
                tokens += len(ids)
                span = dataclasses.replace(span, value=EncodedText(ids, span.value.num_bytes))
            elif isinstance(span.value, EncodedText):
                tokens += len(span.value.ids)
            spans.append(span)
        if tokens > reserved_tokens(self._collection.text_tokens[draw.document]):
            return document
        return EncodedDocument(tuple(spans), document.meta)


def reserved_tokens(tokens: np.ndarray) -> np.ndarray:
    """Room that the plan keeps for text of `tokens` plain tokens under BPE-dropout."""
    return np.ceil(DROPOUT_RESERVE * tokens).astype(np.int64)


def planned_sizes(collection: Collection, dropout: float) -> np.ndarray:
    """int64 [documents, 7]: sizes with the reserve for BPE-dropout."""
    sizes = collection.sizes.copy()
    if dropout:
        extra = reserved_tokens(collection.text_tokens) - collection.text_tokens
        sizes[:, _LENGTH] += extra
        sizes[:, _TEXT] += extra
    return sizes


class RowSource:
    """Endless random access to training rows: `source[i]` is a function of (seed, i) only.

    The stream of documents is cut into blocks that are packed on their own (`Mixture`). Finding row i plans the blocks
    before it once; plans of recent blocks are kept.
    """

    def __init__(self, sources: Mapping[str, EncodedDocuments], config: ExperimentConfig, tokenizers: Tokenizers):
        """
        Args:
          sources: Encoded training documents by source name (the weights' names in `config.data.sources`).
          config: Seed, weights, sequence and model.
          tokenizers: Those that made the documents.

        Raises:
          DataError: Documents of other tokenizers, or weights that name no document.
        """
        collection = Collection(sources)
        groups, weights, self.groups = make_groups(collection.tasks, config.data)
        self._mixture = Mixture(groups, weights, config.seed)
        self._maker = RowMaker(collection, config, tokenizers, train=True)
        self._sizes = planned_sizes(collection, self._maker.dropout)
        self._config = config
        self._ends: list[int] = []  # rows up to and including each block
        self._plans: dict[int, list[list[Draw]]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> Batch:
        return self._maker.row(self.draws(index))

    def draws(self, index: int) -> list[Draw]:
        """Documents of row `index`, in order."""
        if index < 0:
            raise IndexError(index)
        with self._lock:
            while not self._ends or self._ends[-1] <= index:
                self._ends.append((self._ends[-1] if self._ends else 0) + len(self._plan(len(self._ends))))
            block = int(np.searchsorted(self._ends, index, side="right"))
            return self._plan(block)[index - (self._ends[block - 1] if block else 0)]

    def _plan(self, block: int) -> list[list[Draw]]:
        if block not in self._plans:
            draws = self._mixture.block(block)
            numbers = [draw.document for draw in draws]
            rows = plan_rows(self._sizes[numbers], self._config.sequence)
            if len(self._plans) >= 4:
                self._plans.pop(next(iter(self._plans)))
            self._plans[block] = [[draws[i] for i in row] for row in rows]
        return self._plans[block]

    def batch(self, step: int, rows: int) -> Batch:
        """Rows step * rows ... of a global batch, stacked, with its denominators."""
        return stack([self[step * rows + i] for i in range(rows)])


class HeldOutRows:
    """All documents of some tasks once, in order, packed; nothing is random."""

    def __init__(
        self,
        sources: Mapping[str, EncodedDocuments],
        config: ExperimentConfig,
        tokenizers: Tokenizers,
        tasks: Sequence[str] = (),
    ):
        """
        Args:
          sources: Encoded held-out documents by source name.
          config: Sequence and model.
          tokenizers: Those that made the documents.
          tasks: Which documents; empty = all.

        Raises:
          DataError: No document is left.
        """
        collection = Collection(sources)
        names = np.concatenate(list(collection.tasks.values()))
        numbers = np.flatnonzero(np.isin(names, list(tasks))) if tasks else np.arange(len(names))
        if not len(numbers):
            raise DataError(f"tasks: found no document of {', '.join(tasks)}, allowed: {', '.join(sorted(set(names)))}")
        self._maker = RowMaker(collection, config, tokenizers, train=False)
        self._rows = [
            [Draw(int(numbers[i]), 0) for i in row] for row in plan_rows(collection.sizes[numbers], config.sequence)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        return self._maker.row(self._rows[index])

    def batch(self, step: int, rows: int) -> Batch:
        """Rows step * rows ... stacked; rows past the end are empty (no token, no weight)."""
        numbers = range(step * rows, (step + 1) * rows)
        return stack([self[i] if i < len(self) else self._maker.row([]) for i in numbers])
