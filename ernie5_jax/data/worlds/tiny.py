"""A world of a few dozen procedural examples of every kind, made in a second: for tests and first steps."""

from __future__ import annotations

import numpy as np

from ernie5_jax.data.documents import DIGIT_WORDS, ListSource, captioned, passage
from ernie5_jax.data.media import MediaFormat
from ernie5_jax.data.worlds import drawing
from ernie5_jax.sequence import Document, Span

_FONT = (
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
)  # fmt: skip
"""Rows of 3 x 5 cells."""
_SPEAKERS = {"low": 1.0, "high": 1.6}
_COUNTS = {"train": 4, "test": 1}
"""Examples per digit and kind."""


def tiny_documents(split: str, form: MediaFormat) -> ListSource:
    """Every task in both directions, prose, and documents that interleave all modalities."""
    documents: list[Document] = []
    stream = 0 if split == "train" else 1
    for number in range(10 * _COUNTS[split]):
        rng = np.random.default_rng((stream, number))
        digit, meta = number % 10, {"digit": number % 10, "split": split}
        direction, speaker = rng.choice(list(drawing.DIRECTIONS)), list(_SPEAKERS)[number // 10 % 2]
        picture = form.fit_frames(drawing.to_rgb(_glyph(digit, rng))[None])[0]
        clip = form.fit_frames(drawing.to_rgb(drawing.moving(_glyph(digit, rng), direction)))
        form.check_frames(len(clip))
        sound = _tone(digit, _SPEAKERS[speaker], form.sample_rate, rng)
        image_text = drawing.image_caption(digit)
        motion_text = drawing.motion_caption(digit, direction)
        speech_text = drawing.speech_caption(digit)
        documents += [captioned(task, picture, image_text, **meta) for task in ("image_generation", "image_caption")]
        for task in ("video_generation", "video_caption"):
            documents.append(captioned(task, clip, motion_text, direction=str(direction), **meta))
        for task in ("speech_generation", "speech_caption"):
            documents.append(captioned(task, sound, speech_text, voice=speaker, **meta))
        if number % 2 == 0:
            documents.append(passage(_sentences(rng), split=split))
        if number % 5 == 0:
            documents.append(_interleaved(picture, sound, digit, meta))
    return ListSource(documents, f"tiny 1 {split} {form}")


def _interleaved(picture: np.ndarray, sound: np.ndarray, digit: int, meta: dict) -> Document:
    word = DIGIT_WORDS[digit]
    spans = (
        Span("image", "understand", picture),
        Span("text", "generate", f"this is {word}. say it: "),
        Span("audio", "generate", sound),
        Span("text", "generate", "draw it: "),
        Span("image", "generate", picture),
    )
    return Document(spans, {"task": "interleaved", "caption": word, **meta})


def _glyph(digit: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [16, 16]: a bold glyph of random brightness, a pixel or two off the centre."""
    cells = np.array(list(_FONT[digit]), np.uint8).reshape(5, 3)
    glyph = cells.repeat(2, axis=0).repeat(3, axis=1) * np.uint8(rng.integers(170, 256))
    picture = np.zeros((16, 16), np.uint8)
    top, left = rng.integers(2, 5), rng.integers(2, 6)
    picture[top : top + 10, left : left + 9] = glyph
    return picture


def _tone(digit: int, pitch: float, rate: int, rng: np.random.Generator) -> np.ndarray:
    """float32 [samples]: a tone and its octave; the digit sets the height, the voice moves it."""
    time = np.arange(int(rate * rng.uniform(0.16, 0.24))) / rate
    frequency = pitch * 200 * 2 ** (digit / 6) * rng.uniform(0.99, 1.01)
    wave = np.sin(2 * np.pi * frequency * time) + 0.4 * np.sin(4 * np.pi * frequency * time)
    envelope = np.minimum(1, np.minimum(time, time[::-1]) / 0.02)
    return (0.5 * wave * envelope).astype(np.float32)


def _sentences(rng: np.random.Generator) -> str:
    """A few sentences of sums and orders."""
    sentences = []
    for _ in range(int(rng.integers(2, 5))):
        a, b = sorted(int(i) for i in rng.integers(0, 5, 2))
        words = DIGIT_WORDS[a], DIGIT_WORDS[b], DIGIT_WORDS[a + b]
        sentences.append(f"{words[0]} and {words[1]} make {words[2]}." if rng.random() < 0.5 else
                         f"{words[0]} is {'less than' if a < b else 'equal to'} {words[1]}.")  # fmt: skip
    return " ".join(sentences)
