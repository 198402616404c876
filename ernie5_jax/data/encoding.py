"""Documents through the tokenizers, once: encoded records that training reads, with sizes for planning."""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ernie5_jax.audio.protocol import AudioTokenizer
from ernie5_jax.config import SequenceConfig
from ernie5_jax.data.documents import infer_task
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.records import pack_encoded, packed_values, unpack_encoded, unpack_value
from ernie5_jax.data.shards import DocumentShards, RecordShards, write_record_shards
from ernie5_jax.files import write_arrays
from ernie5_jax.sequence import (
    Document,
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    SequenceError,
    check_fits,
    document_size,
    row_capacity,
)
from ernie5_jax.text.protocol import TextTokenizer
from ernie5_jax.vision.protocol import VisualTokenizer

DROPOUT_RESERVE = 1.15
"""Room, in units of the plain length, that the plan keeps for text encoded with BPE-dropout."""
BATCH_FRAMES = 256
"""Pixel frames per call of the visual tokenizer; calls are padded to full batches, so one program serves all."""
BATCH_CLIPS = 64
_INDEX = "index.npz"


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The three tokenizers of a run."""

    text: TextTokenizer
    visual: VisualTokenizer
    audio: AudioTokenizer

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint by modality."""
        return {"text": self.text.fingerprint(), "visual": self.visual.fingerprint(), "audio": self.audio.fingerprint()}


def load_tokenizers(folder: Path | str) -> Tokenizers:
    """The tokenizers in `text/`, `visual/` and `audio/` of a folder, e.g. of a checkpoint."""
    from ernie5_jax.audio import load_audio_tokenizer
    from ernie5_jax.text import load_text_tokenizer
    from ernie5_jax.vision import load_visual_tokenizer

    folder = Path(folder)
    return Tokenizers(
        load_text_tokenizer(folder / "text"),
        load_visual_tokenizer(folder / "visual"),
        load_audio_tokenizer(folder / "audio"),
    )


class EncodedDocuments(RecordShards):
    """Random access to tokenised documents, and arrays over all of them for planning.

    Attributes:
      sizes: int64 [documents, 7], see `sequence.Sizes`, of the plain encoding.
      text_tokens: int64 [documents], tokens of all text spans.
      tasks: str [documents].
    """

    def __init__(self, folder: Path | str):
        super().__init__(folder)
        if "tokenizers" not in self.identity:
            raise DataError(f"folder '{folder}': found documents that are not tokenised, allowed: encoded ones")
        try:
            with np.load(self.folder / _INDEX) as index:
                self.sizes: np.ndarray = index["sizes"]
                self.text_tokens: np.ndarray = index["text_tokens"]
                self.tasks: np.ndarray = index["tasks"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"folder '{folder}': found a damaged {_INDEX} ({error}), allowed: a whole one; encode it again"
            ) from None

    def __getitem__(self, index: int) -> EncodedDocument:
        return self.read(index)[0]

    def read(self, index: int) -> tuple[EncodedDocument, list[str | None]]:
        """The document, and the text of its text spans (None elsewhere) for BPE-dropout."""
        return unpack_encoded(self.record(index))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the tokenizers, by modality."""
        return self.identity["tokenizers"]

    def check_tokenizers(self, tokenizers: Tokenizers) -> None:
        """Raises a `DataError` unless these tokenizers made the documents."""
        for name, found in tokenizers.fingerprints().items():
            if self.fingerprints[name] != found:
                raise DataError(
                    f"folder '{self.folder}': found documents of another {name} tokenizer ({self.fingerprints[name]}), "
                    f"allowed: {found}; encode them again"
                )


def encode_documents(
    shards: DocumentShards,
    text: TextTokenizer,
    visual: VisualTokenizer,
    audio: AudioTokenizer,
    out: Path | str,
    *,
    sequence: SequenceConfig,
    text_dropout: float = 0.0,
    shard_size: int = 1024,
    progress: bool = True,
    description: str = "encoding",
) -> EncodedDocuments:
    """Tokenises all documents; goes on where a run that was ended left off.

    Args:
      shards: The documents.
      text, visual, audio: The tokenizers.
      out: Folder to write.
      sequence: Row length and slot capacities, which every document must fit.
      text_dropout: BPE-dropout of training; when it is on, documents must fit with `DROPOUT_RESERVE` too.
      shard_size: Source documents per shard.
      progress: Whether to show a bar.
      description: Its text.

    Raises:
      DataError: Documents that overflow a capacity, or that a tokenizer refuses; names all of a shard. Nothing is cut.
    """
    out = Path(out)
    if audio.sample_rate != shards.sample_rate:
        raise DataError(
            f"folder '{shards.folder}': found audio at {shards.sample_rate} Hz, allowed: {audio.sample_rate} Hz"
        )
    tokenizers = Tokenizers(text, visual, audio)
    encoder = Encoder(tokenizers, sequence, DROPOUT_RESERVE if text_dropout else 1.0)
    identity = {
        "documents": shards.fingerprint(),
        "tokenizers": tokenizers.fingerprints(),
        "capacity": list(row_capacity(sequence)),
        "text_reserve": encoder.reserve,
    }

    def records(start: int, stop: int) -> Sequence[bytes]:
        return encoder.encode([shards[i] for i in range(start, stop)], start)

    write_record_shards(
        out,
        identity,
        len(shards),
        records,
        shard_size=shard_size,
        workers=2,
        progress=progress,
        description=description,
    )
    _write_index(out, identity, visual)
    return EncodedDocuments(out)


def _write_index(folder: Path, identity: dict[str, Any], visual: VisualTokenizer) -> None:
    """Lengths of all documents in one small file; made from the records, so that a resumed run cannot miss any."""
    path = folder / _INDEX
    if path.exists() and path.stat().st_mtime_ns >= max(p.stat().st_mtime_ns for p in folder.glob("records-*")):
        return
    shards = RecordShards(folder)
    sizes, tokens, tasks = [], [], []
    for i in range(len(shards)):
        document, _ = unpack_encoded(shards.record(i))
        sizes.append(document_size(document, visual.scales))
        tokens.append(_text_tokens(document))
        tasks.append(document.meta["task"])
    arrays = {
        "sizes": np.asarray(sizes, np.int64).reshape(-1, 7),
        "text_tokens": np.asarray(tokens, np.int64),
        "tasks": np.asarray(tasks, np.str_),
    }
    write_arrays(path, arrays)


def _text_tokens(document: EncodedDocument) -> int:
    return sum(len(span.value.ids) for span in document.spans if isinstance(span.value, EncodedText))


def encode_in_memory(
    documents: Sequence[Document], tokenizers: Tokenizers, sequence: SequenceConfig, *, split_prose: bool = False
) -> list[EncodedDocument]:
    """Tokenises a few documents without writing them, e.g. prompts; what does not fit is refused when laid out.

    Args:
      split_prose: Whether prose is cut at word boundaries into as many documents as it needs, as for training.

    Raises:
      DataError: A span that a tokenizer refuses.
    """
    encoder = Encoder(tokenizers, sequence, 1.0)
    visual, audio = encoder.media(documents, 0)
    if split_prose:
        return [part for document in documents for part, _ in encoder.parts(document, visual, audio)]
    return [encoder.whole(document, visual, audio)[0] for document in documents]


class Encoder:
    """Tokenises documents in memory; `reserve` is the room that text needs, in units of its plain length."""

    def __init__(self, tokenizers: Tokenizers, sequence: SequenceConfig, reserve: float):
        self.tokenizers, self.sequence, self.reserve = tokenizers, sequence, reserve
        self.capacity = row_capacity(sequence)
        # BOS and EOS are positions, EOS is a target.
        self.max_tokens = int(min((self.capacity.length - 2) / reserve, (self.capacity.text_targets - 1) / reserve))

    def encode(self, documents: Sequence[Document], first: int = 0) -> list[bytes]:
        """Records of `documents`, numbered from `first` in messages."""
        return [pack_encoded(*pair) for pair in self.pairs(documents, first)]

    def pairs(self, documents: Sequence[Document], first: int = 0) -> list[tuple[EncodedDocument, list[str | None]]]:
        """Encoded documents and the texts of their text spans; one for each document, several for long prose.

        Raises:
          DataError: Documents that overflow a capacity, or media that a tokenizer refuses.
        """
        visual, audio = self.media(documents, first)
        pairs, problems = [], []
        for number, document in enumerate(documents):
            name = f"document {first + number}"
            if "source" in document.meta:
                name += f" ({document.meta['source']})"
            try:
                for encoded, texts in self.parts(document, visual, audio):
                    size = document_size(encoded, self.tokenizers.visual.scales, text_reserve=self.reserve)
                    check_fits(size, self.capacity, name)
                    pairs.append((encoded, texts))
            except SequenceError as error:
                problems.append(str(error) if name in str(error) else f"{name}: {error}")
        if problems:
            lines = "".join(f"\n  {problem}" for problem in problems)
            raise DataError(f"documents: found {len(problems)} that do not fit a row, allowed: none{lines}")
        return pairs

    def parts(
        self, document: Document, visual: dict[int, EncodedVisual], audio: dict[int, EncodedAudio]
    ) -> Iterator[tuple[EncodedDocument, list[str | None]]]:
        meta = {"task": infer_task(document), **document.meta}
        if meta.pop("split_text", False):
            for piece in split_text(document.spans[0].value, self.tokenizers.text, self.max_tokens):
                value = self._text(piece)
                span = EncodedSpan("text", document.spans[0].role, value)
                yield EncodedDocument((span,), meta), [piece]
            return
        yield self.whole(document, visual, audio, meta)

    def whole(
        self,
        document: Document,
        visual: dict[int, EncodedVisual],
        audio: dict[int, EncodedAudio],
        meta: dict[str, Any] | None = None,
    ) -> tuple[EncodedDocument, list[str | None]]:
        """The document span by span, and the text of its text spans."""
        spans, texts = [], []
        for span in document.spans:
            value, text = span.value, None
            if isinstance(value, str):
                value, text = self._text(value), value
            elif isinstance(value, np.ndarray):
                found = audio[id(value)] if span.modality == "audio" else visual[id(value)]
                if isinstance(found, EncodedVisual):  # the half that the role reads
                    keep = "latents" if span.role == "generate" else "features"
                    found = EncodedVisual(**{keep: getattr(found, keep)})
                value = found
            spans.append(EncodedSpan(span.modality, span.role, value))
            texts.append(text)
        return EncodedDocument(tuple(spans), document.meta if meta is None else meta), texts

    def _text(self, text: str) -> EncodedText:
        return EncodedText(self.tokenizers.text.encode(text), len(text.encode("utf-8", "surrogatepass")))

    def media(
        self, documents: Sequence[Document], first: int
    ) -> tuple[dict[int, EncodedVisual], dict[int, EncodedAudio]]:
        """Encodings of all raw media by the id of their array; equal media (two directions) are encoded once."""
        clips: dict[tuple[int, ...], _Unique] = {}
        waves = _Unique()
        for document in documents:
            for span in document.spans:
                if isinstance(span.value, np.ndarray):
                    if span.modality == "audio":
                        waves.add(span.value)
                    else:
                        video = span.value if span.modality == "video" else span.value[None]
                        clips.setdefault(video.shape, _Unique()).add(video, span.value)
        try:
            codes = [EncodedAudio(code) for code in _encode_waves(waves.values, self.tokenizers.audio)]
            visual: dict[int, EncodedVisual] = {}
            for unique in clips.values():
                visual.update(unique.spread(encode_videos(unique.values, self.tokenizers.visual)))
        except ValueError as error:
            raise DataError(f"documents {first} ... {first + len(documents) - 1}: {error}") from None
        return visual, waves.spread(codes)


class _Unique:
    """Arrays without their repetitions."""

    def __init__(self):
        self.values: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}
        self._owners: dict[int, int] = {}

    def add(self, array: np.ndarray, owner: np.ndarray | None = None) -> None:
        key = array.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(array)
        self._owners[id(array if owner is None else owner)] = self._numbers[key]

    def spread(self, results: Sequence[Any]) -> dict[int, Any]:
        return {owner: results[number] for owner, number in self._owners.items()}


def encode_videos(videos: Sequence[np.ndarray], tokenizer: VisualTokenizer) -> list[EncodedVisual]:
    """uint8 [T, H, W, 3] each, all of one shape -> latents and features (K = 1) of each, in full batches."""
    if not videos:
        return []
    batch = max(1, BATCH_FRAMES // len(videos[0]))
    encoded = []
    for start in range(0, len(videos), batch):
        part = np.stack(videos[start : start + batch])
        room = np.zeros((batch - len(part), *part.shape[1:]), part.dtype)
        latents, features = tokenizer.encode(np.concatenate([part, room]))
        encoded += [
            EncodedVisual(np.asarray(latents[i]), np.asarray(features[i])[..., None, :]) for i in range(len(part))
        ]
    return encoded


def _encode_waves(waves: Sequence[np.ndarray], tokenizer: AudioTokenizer) -> list[np.ndarray]:
    codes: list[np.ndarray] = []
    for start in range(0, len(waves), BATCH_CLIPS):
        codes += tokenizer.encode(list(waves[start : start + BATCH_CLIPS]))
    return codes


def split_text(text: str, tokenizer: TextTokenizer, max_tokens: int) -> Iterator[str]:
    """Pieces of at most `max_tokens` tokens, cut behind white space where there is any; joined they are `text`."""
    guess = 3 * max_tokens  # characters
    while text:
        size = min(guess, len(text))
        while True:
            piece = text[:size] if size == len(text) else _whole_words(text[:size])
            tokens = len(tokenizer.encode(piece))
            if tokens <= max_tokens or len(piece) == 1:
                break
            size = max(1, min(len(piece) - 1, math.floor(len(piece) * max_tokens / tokens)))
        yield piece
        text = text[len(piece) :]
        guess = max(guess // 2, math.ceil(1.1 * len(piece) * max_tokens / max(tokens, 1)))


def _whole_words(piece: str) -> str:
    cut = max(piece.rfind(" "), piece.rfind("\n")) + 1
    return piece[:cut] if cut > len(piece) // 2 else piece


def unique_media(sources: Iterable[DocumentShards], modality: str) -> list[Any]:
    """What a tokenizer is trained on: every different text, picture, video or clip of some documents, in order.

    Args:
      sources: Prepared documents.
      modality: "text" (str), "image" (uint8 [H, W, 3]), "video" (uint8 [T, H, W, 3]) or "audio" (float32 [samples]).
    """
    found: dict[Any, tuple[str, Any]] = {}
    for shards in sources:
        for i in range(len(shards)):
            for kind, data in packed_values(shards.record(i), modality):
                found.setdefault(tuple(data) if isinstance(data, list) else data, (kind, data))
    return [unpack_value(modality, kind, data) for kind, data in found.values()]
