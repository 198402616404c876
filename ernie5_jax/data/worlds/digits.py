"""The default world as a TFDS builder: digits written, moving and spoken, and prose; nothing is downloaded.

handwriting: scikit-learn's 8 x 8 digits. The last 359 are held out as a block; the set is ordered by writer as far
  as is known, so this is a proxy for held-out writers.
jittered: training pictures turned, scaled and shifted a little, for understanding only.
motion: the same pictures as 12 px glyphs that cross a 16 px canvas; a picture's split is that of its handwriting.
speech: digits by espeak-ng, in several voices, rates and pitches. "test" holds accents (base voices) and variants
  that "train" never has, "takes" more takes of the training voices.
prose: Python's language reference by topic.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from ernie5_jax.data import media
from ernie5_jax.data.worlds import drawing, prose

HELD_OUT_PICTURES = 359
JITTERED_VIEWS = 3
SAMPLE_RATE = 8000
TRAIN_ACCENTS = {"en": "british", "en-us": "american", "en-029": "caribbean"}
TEST_ACCENTS = {"en-gb-scotland": "scottish", "en-gb-x-rp": "posh"}
TRAIN_VARIANTS = ("f1", "f2", "f3", "f4", "m1", "m2", "m3", "m4", "m5", "m8")
TEST_VARIANTS = ("f5", "m6", "m7")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
TAKES = {"train": 20, "test": 6, "takes": 1}
"""Per voice and digit: 6,000, 360 and 300 clips."""
_FEATURES = tfds.features


class DigitsWorld(tfds.core.GeneratorBasedBuilder):
    """Digits written, moving and spoken, and prose."""

    VERSION = tfds.core.Version("1.2.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=name, description=f"{name} of the digits world")
        for name in ("handwriting", "jittered", "motion", "speech", "prose")
    ]

    @property
    def _part(self) -> str:
        return self.builder_config.name  # type: ignore[union-attr]

    def _info(self) -> tfds.core.DatasetInfo:
        features: dict[str, dict[str, Any]] = {
            "handwriting": {"image": _FEATURES.Image(shape=(8, 8, 1)), "label": np.int64},
            "jittered": {
                "image": _FEATURES.Image(shape=(drawing.CANVAS_SIZE, drawing.CANVAS_SIZE, 1)),
                "label": np.int64,
            },
            "motion": {
                "video": _FEATURES.Sequence(_FEATURES.Image(shape=(drawing.CANVAS_SIZE, drawing.CANVAS_SIZE, 1))),
                "label": np.int64,
                "direction": _FEATURES.Text(),
            },
            # The Audio and Video features of TFDS need TensorFlow.
            "speech": {
                "audio": _FEATURES.Tensor(shape=(None,), dtype=np.int16),
                "label": np.int64,
                "voice": _FEATURES.Text(),
                "speaker": _FEATURES.Text(),
            },
            "prose": {"text": _FEATURES.Text(), "topic": _FEATURES.Text()},
        }
        return self.dataset_info_from_configs(features=_FEATURES.FeaturesDict(features[self._part]))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager  # nothing to download
        splits = {"speech": ("train", "test", "takes"), "jittered": ("train",)}.get(self._part, ("train", "test"))
        return {split: self._generate_examples(split) for split in splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        return getattr(self, f"_{self._part}")(split)

    def _handwriting(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for index, picture, label in pictures(split):
            yield f"{index:05d}", {"image": _png(picture), "label": label}

    def _jittered(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for index, picture, label in pictures(split):
            for view in range(JITTERED_VIEWS):
                image = drawing.jittered(picture, np.random.default_rng((3, index, view)))
                yield f"{index:05d}_{view}", {"image": _png(image), "label": label}

    def _motion(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for index, picture, label in pictures(split):
            for direction in drawing.two_directions(index):
                frames = [_png(frame) for frame in drawing.moving(picture, direction)]
                yield f"{index:05d}_{direction}", {"video": frames, "label": label, "direction": direction}

    def _speech(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        from ernie5_jax.data.espeak import EspeakSynthesizer

        synthesizer = EspeakSynthesizer(SAMPLE_RATE)
        stream = {"train": 0, "test": 1, "takes": 2}[split]
        clips, requests = [], []
        for number, (voice, speaker) in enumerate(voices(split)):
            for digit, take in itertools.product(range(10), range(TAKES[split])):
                rng = np.random.default_rng((stream, number, digit, take))
                requests.append(
                    (drawing.DIGIT_WORDS[digit], voice, int(rng.integers(120, 221)), int(rng.integers(30, 76)))
                )
                fields = {"label": digit, "voice": voice, "speaker": speaker}
                clips.append((f"{number:03d}_{digit}_{take:02d}", fields))
        for (key, fields), samples in zip(clips, synthesizer.render_all(requests), strict=True):
            samples = samples * (0.8 / max(float(np.abs(samples).max()), 1e-3))
            yield key, {"audio": np.round(samples * 32767).astype(np.int16), **fields}

    def _prose(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for topic, text in prose.topics(split):
            yield topic, {"text": text, "topic": topic}


def pictures(split: str) -> Iterator[tuple[int, np.ndarray, int]]:
    """(index, uint8 [8, 8], digit) of scikit-learn's handwriting."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    border = len(images) - HELD_OUT_PICTURES
    for i in range(border, len(images)) if split == "test" else range(border):
        yield i, np.round(images[i].reshape(8, 8) * (255 / 16)).astype(np.uint8), int(labels[i])


def voices(split: str) -> list[tuple[str, str]]:
    """(espeak-ng voice, name for captions) of a split; training and test share neither accents nor variants."""
    accents, variants = (TEST_ACCENTS, TEST_VARIANTS) if split == "test" else (TRAIN_ACCENTS, TRAIN_VARIANTS)
    return [
        (f"{accent}+{variant}", f"{name} {'woman' if variant[0] == 'f' else 'man'} {_NUMBERS[int(variant[1])]}")
        for accent, name in accents.items()
        for variant in variants
    ]


def _png(picture: np.ndarray) -> io.BytesIO:
    return io.BytesIO(media.encode_png(picture))
