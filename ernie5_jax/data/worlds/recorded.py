"""Real handwriting and recordings in the layout of three files in one folder.

  handwritten_digits_28px.npz: image uint8 [n, 28, 28], label [n].
  spoken_digits_8khz.npz: audio int16 (all samples joined), offsets [n + 1], label [n], speaker [n], speaker_names.
  shakespeare.txt: text; where it is missing, the prose of the digits world is read.

Held out: the last 1/8 of the pictures as a block, the last 8 recordings of every digit and speaker, the last 1/10 of
the text. Speakers are the same in both splits. Training recordings are also played a little faster, slower and later,
for understanding only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ernie5_jax.data.documents import DocumentSource, captioned, passage, short_hash
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.media import MediaFormat
from ernie5_jax.data.worlds import drawing, prose
from ernie5_jax.sequence import Document

PICTURES, RECORDINGS, TEXT = "handwritten_digits_28px.npz", "spoken_digits_8khz.npz", "shakespeare.txt"
SAMPLE_RATE = 8000
HELD_OUT_TAKES = 8
PERTURBED_VIEWS = 3


class _FunctionSource:
    def __init__(self, count: int, make: Callable[[int], Document], fingerprint: str):
        self._count, self._make, self._fingerprint = count, make, fingerprint

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(index)

    def fingerprint(self) -> str:
        return self._fingerprint


def recorded_sources(split: str, form: MediaFormat, folder: str) -> list[DocumentSource]:
    """Pictures, motion, speech and text of a split.

    Raises:
      DataError: No folder given, or a file is missing or not laid out as above.
    """
    if not folder:
        raise DataError("world 'digits_recorded' option folder: found '', allowed: a folder with " + PICTURES)
    root = Path(folder)
    pictures = _load(root / PICTURES, ("image", "label"))
    sounds = _load(root / RECORDINGS, ("audio", "offsets", "label", "speaker", "speaker_names"))
    return [
        *_picture_sources(split, form, pictures, _stamp(root / PICTURES)),
        *_speech_sources(split, form, sounds, _stamp(root / RECORDINGS)),
        _text_source(split, root / TEXT),
    ]


def _picture_sources(split: str, form: MediaFormat, data: dict[str, np.ndarray], stamp: list) -> list[DocumentSource]:
    images, labels = data["image"], data["label"]
    border = len(images) - len(images) // 8
    start, stop = (border, len(images)) if split == "test" else (0, border)

    def picture(index: int) -> Document:
        number, task = divmod(index, 2)
        digit = int(labels[start + number])
        pixels = form.fit_frames(drawing.to_rgb(images[start + number])[None])[0]
        task_name = ("image_generation", "image_caption")[task]
        return captioned(task_name, pixels, drawing.image_caption(digit), digit=digit, split=split)

    def motion(index: int) -> Document:
        number, task = divmod(index, 2)
        digit = int(labels[start + number])
        direction = drawing.two_directions(start + number)[0]
        clip = form.fit_frames(drawing.to_rgb(drawing.moving(images[start + number], direction)))
        task_name, caption = ("video_generation", "video_caption")[task], drawing.motion_caption(digit, direction)
        return captioned(task_name, clip, caption, digit=digit, direction=direction, split=split)

    count = 2 * (stop - start)
    return [
        _FunctionSource(count, picture, short_hash(["pictures", stamp, split, str(form)])),
        _FunctionSource(count, motion, short_hash(["motion", stamp, split, str(form)])),
    ]


def held_out_takes(labels: np.ndarray, speakers: np.ndarray) -> np.ndarray:
    """bool [n]: the last `HELD_OUT_TAKES` recordings of every digit and speaker."""
    held_out = np.zeros(len(labels), bool)
    for digit, speaker in sorted({(int(d), int(s)) for d, s in zip(labels, speakers, strict=True)}):
        held_out[np.flatnonzero((labels == digit) & (speakers == speaker))[-HELD_OUT_TAKES:]] = True
    return held_out


def perturbed(samples: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Samples after up to 40 ms of silence, and a rate at which they sound up to 10 % faster or slower."""
    silence = np.zeros(rng.integers(0, SAMPLE_RATE // 25), samples.dtype)
    return np.concatenate([silence, samples]), SAMPLE_RATE * int(rng.integers(90, 111)) // 100


def _speech_sources(split: str, form: MediaFormat, data: dict[str, np.ndarray], stamp: list) -> list[DocumentSource]:
    held_out = held_out_takes(data["label"], data["speaker"])
    takes = np.flatnonzero(held_out if split == "test" else ~held_out)

    def recording(number: int, task: str, named: bool = False, view: int = 0) -> Document:
        take = int(takes[number])
        digit, speaker = int(data["label"][take]), str(data["speaker_names"][data["speaker"][take]])
        samples, rate = data["audio"][data["offsets"][take] : data["offsets"][take + 1]], SAMPLE_RATE
        if view:
            samples, rate = perturbed(samples, np.random.default_rng((take, view)))
        wave = form.fit_audio(samples.astype(np.float32) / 32768, rate)
        meta = {"digit": digit, "voice": speaker, "speaker": speaker, "unseen_voice": False, "split": split}
        return captioned(task, wave, drawing.speech_caption(digit, speaker if named else ""), **meta)

    def speech(index: int) -> Document:
        number, task = divmod(index, 2)
        return recording(number, ("speech_generation", "speech_caption")[task], named=not task and number % 2 == 1)

    def view(index: int) -> Document:
        number, nth = divmod(index, PERTURBED_VIEWS)
        return recording(number, "speech_caption", view=1 + nth)

    identity = [stamp, split, str(form)]
    plain = _FunctionSource(2 * len(takes), speech, short_hash(["speech", *identity]))
    if split != "train":
        return [plain]
    views = _FunctionSource(PERTURBED_VIEWS * len(takes), view, short_hash(["views", PERTURBED_VIEWS, *identity]))
    return [plain, views]


def _text_source(split: str, path: Path) -> DocumentSource:
    texts = [text for _, text in prose.topics(split)]
    stamp: list = ["topics", len(texts)]
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        border = text.rfind("\n\n", 0, len(text) * 9 // 10) + 2
        texts, stamp = [text[border:] if split == "test" else text[:border]], _stamp(path)
    make = functools.partial(_passage, texts, split)
    return _FunctionSource(len(texts), make, short_hash(["text", stamp, split]))


def _passage(texts: list[str], split: str, index: int) -> Document:
    return passage(texts[index], split=split)


def _load(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """All members in memory: indexing an open .npz reads the member again every time."""
    if not path.is_file():
        raise DataError(f"{path}: found no such file, allowed: the layout of world 'digits_recorded'")
    try:
        with np.load(path, allow_pickle=False) as data:
            missing = [name for name in names if name not in data]
            if missing:
                raise DataError(f"{path}: found no array {missing[0]!r}, allowed: {', '.join(names)}")
            return {name: data[name] for name in names}
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: found a damaged file ({error}), allowed: an .npz file") from None


def _stamp(path: Path) -> list:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]
