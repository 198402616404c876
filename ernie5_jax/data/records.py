"""Documents <-> msgpack records. Media are encoded bytes (see `media`), tokenised spans are named arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import msgpack
import numpy as np

from ernie5_jax.data import media
from ernie5_jax.data.errors import DataError
from ernie5_jax.sequence import (
    Document,
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    Span,
)

_VALUES = {"text": EncodedText, "image": EncodedVisual, "video": EncodedVisual, "audio": EncodedAudio}


def pack_document(document: Document, sample_rate: int) -> bytes:
    """Serialises a document whose media have their final size and rate; audio is `sample_rate` Hz."""
    spans = [[span.modality, span.role, *_pack_value(span, sample_rate)] for span in document.spans]
    return _pack({"spans": spans, "meta": document.meta})


def unpack_document(record: bytes) -> Document:
    """Inverse of `pack_document` (16-bit sound)."""
    plain = _unpack(record)
    spans = tuple(Span(modality, role, unpack_value(modality, *rest)) for modality, role, *rest in plain["spans"])
    return Document(spans, plain["meta"])


def packed_values(record: bytes, modality: str) -> list[tuple[str, Any]]:
    """Arguments of `unpack_value` for the spans of one modality, tokenised ones left out; equal media pack equally."""
    return [(kind, data) for name, _, kind, data in _unpack(record)["spans"] if name == modality and kind != "arrays"]


def pack_encoded(document: EncodedDocument, texts: list[str | None]) -> bytes:
    """Serialises a tokenised document.

    Args:
      document: Spans of ids, latents (kept as float16), features (float16) or codes.
      texts: The text of every text span, for BPE-dropout at load time; None elsewhere.
    """
    spans = [
        [span.modality, span.role, _pack_arrays(span.value), text]
        for span, text in zip(document.spans, texts, strict=True)
    ]
    return _pack({"spans": spans, "meta": document.meta})


def unpack_encoded(record: bytes) -> tuple[EncodedDocument, list[str | None]]:
    """Inverse of `pack_encoded`."""
    plain = _unpack(record)
    spans = tuple(
        EncodedSpan(modality, role, _unpack_arrays(modality, arrays)) for modality, role, arrays, _ in plain["spans"]
    )
    return EncodedDocument(spans, plain["meta"]), [span[3] for span in plain["spans"]]


def _pack(plain: dict[str, Any]) -> bytes:
    packed = msgpack.packb(plain, unicode_errors="surrogatepass")
    return cast(bytes, packed)  # None only from a packer without autoreset


def _unpack(record: bytes) -> dict[str, Any]:
    try:
        return msgpack.unpackb(record, unicode_errors="surrogatepass", strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise DataError(f"record: found damaged bytes ({error}), allowed: records written by this library") from None


def _pack_value(span: Span, sample_rate: int) -> tuple[str, Any]:
    value = span.value
    if isinstance(value, EncodedText | EncodedVisual | EncodedAudio):
        return "arrays", _pack_arrays(value, exact=True)
    if span.modality == "text":
        return "text", value
    if span.modality == "image":
        return "png", media.encode_png(value)
    if span.modality == "video":
        # One PNG of all frames below each other: lossless, and neighbouring frames compress each other.
        return "png_frames", [len(value), media.encode_png(value.reshape(-1, *value.shape[2:]))]
    return "wav", media.encode_wav(value, sample_rate)


def unpack_value(modality: str, kind: str, data: Any) -> Any:
    """The value of a span from what `pack_document` made of it."""
    if kind == "arrays":
        return _unpack_arrays(modality, data)
    if kind == "png":
        return media.decode_image(data)
    if kind == "png_frames":
        pixels = media.decode_image(data[1])
        return pixels.reshape(data[0], -1, *pixels.shape[1:])
    if kind == "wav":
        return media.decode_audio(data)[0]
    return data


def _pack_arrays(value: EncodedText | EncodedVisual | EncodedAudio, exact: bool = False) -> dict[str, Any]:
    packed = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if isinstance(item, np.ndarray):
            if item.dtype.kind == "f":
                item = item.astype(np.float32 if exact else np.float16)
            packed[field.name] = [str(item.dtype), list(item.shape), item.tobytes()]
        elif item is not None:
            packed[field.name] = item
    return packed


def _unpack_arrays(modality: str, arrays: dict[str, Any]) -> Any:
    values = {}
    for name, item in arrays.items():
        if isinstance(item, list):
            array = np.frombuffer(item[2], item[0]).reshape(item[1])
            item = array.astype(np.float32) if array.dtype.kind == "f" else array
        values[name] = item
    return _VALUES[modality](**values)
