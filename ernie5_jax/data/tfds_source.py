"""TFDS examples as documents: a mapping says which feature becomes which span."""

from __future__ import annotations

import importlib
import string
from collections.abc import Mapping
from typing import Any

import numpy as np

from ernie5_jax.data.documents import DIGIT_WORDS, MEDIUM_TASKS, captioned, passage, short_hash
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.media import MediaFormat
from ernie5_jax.sequence import Document

OPTIONS = ("data_dir", "frames", "import", "sample_rate", "tasks", "test_split", "train_split")
"""Options of a TFDS source:

  data_dir: Where TFDS keeps its data sets; default TFDS's own.
  import: Module that registers the builder, for builders that TFDS does not bring.
  train_split, test_split: TFDS split expressions, e.g. "train[:90%]"; defaults "train" and "test".
  tasks: Directions to make of a captioned medium, joined by commas; default both.
  frames: Video frames to take, from the first; default all of them.
  sample_rate: Hz of the audio where the feature does not say.
"""
_MEDIA = ("image", "video", "audio", "text")


def load_builder(name: str, options: Mapping[str, str]) -> Any:
    """The TFDS builder `name`, its data downloaded and prepared as array_record files without TensorFlow.

    Raises:
      DataError: Unknown name, no network, or a builder that needs the tensorflow package once, to write its files.
    """
    with_flags_parsed()
    import tensorflow_datasets as tfds

    if options.get("import"):
        importlib.import_module(options["import"])
    try:
        builder = tfds.builder(name, data_dir=options.get("data_dir") or None, file_format="array_record")
        builder.download_and_prepare()
    except ModuleNotFoundError as error:
        needs = f"its builder needs the package {error.name} to write its files once"
        raise DataError(f"TFDS '{name}': {needs}, allowed: pip install {error.name}, then run again") from None
    except DataError:
        raise
    except Exception as error:  # TFDS, its downloader and its builders raise whatever they like
        raise DataError(f"TFDS '{name}': {type(error).__name__}: {_one_line(error)}") from None
    return builder


def with_flags_parsed() -> None:
    """grain's and TFDS's readers ask absl flags, which nobody parses in a notebook."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class TfdsSource:
    """Random access to the documents of one split of a TFDS data set."""

    def __init__(
        self,
        builder: Any,
        split: str,
        mapping: Mapping[str, str],
        form: MediaFormat,
        options: Mapping[str, str] | None = None,
        meta: Mapping[str, Any] | None = None,
    ):
        """
        Args:
          builder: A prepared builder, see `load_builder`.
          split: TFDS split expression.
          mapping: One of image, video, audio, text: the feature with the medium. `caption`: a feature, or a template
            (any text with spaces) such as "a handwritten {label:word}", where :word spells the digit. `prompt`: the
            same for the direction that generates the medium (default: the caption); templates joined by "|" take
            turns by example. Every other key: a feature that is kept in `meta` under that key.
          form: Formats that media are brought to.
          options: See `OPTIONS`.
          meta: Constants for `meta`.

        Raises:
          DataError: A mapping or option that does not fit the data set; names it.
        """
        self._builder, self._split, self._mapping, self._format = builder, split, dict(mapping), form
        self._name = builder.info.full_name
        self._options, self._meta = dict(options or {}), dict(meta or {})
        self._features = builder.info.features
        self._check()
        self._medium = next(key for key in _MEDIA if key in mapping)
        self._tasks = self._read_tasks()
        try:
            self._examples = builder.as_data_source(split=split)
        except (ValueError, KeyError) as error:
            raise DataError(f"TFDS '{self._name}' split '{split}': {_one_line(error)}") from None
        self._last: tuple[int, dict[str, Any], Any] = (-1, {}, None)

    def __len__(self) -> int:
        return len(self._examples) * len(self._tasks)

    def __getitem__(self, index: int) -> Document:
        number, direction = divmod(index, len(self._tasks))
        try:
            if self._last[0] != number:  # both directions are read one after the other
                example = self._examples[number]
                self._last = number, example, self._convert(example[self._mapping[self._medium]])
            return self._document(*self._last, self._tasks[direction])
        except DataError as error:
            raise DataError(f"TFDS '{self._name}' split '{self._split}' example {number}: {error}") from None

    def fingerprint(self) -> str:
        size = len(self._examples)
        return short_hash([self._name, self._split, size, self._mapping, self._options, self._meta, vars(self._format)])

    def _check(self) -> None:
        where = f"TFDS '{self._name}' mapping"
        media = [key for key in _MEDIA if key in self._mapping]
        if len(media) != 1:
            raise DataError(f"{where}: found {media or 'no medium'}, allowed: exactly one of {', '.join(_MEDIA)}")
        if media != ["text"] and "caption" not in self._mapping:
            raise DataError(f"{where}: found no caption, allowed: a feature or a template with {{feature}}")
        for key, value in self._mapping.items():
            for feature in _fields(value) if key in ("caption", "prompt") else [value]:
                if feature not in self._features:
                    raise DataError(f"{where} '{key}': found {feature!r}, allowed: {', '.join(self._features)}")
        for key in self._options:
            if key not in OPTIONS:
                raise DataError(f"TFDS '{self._name}' option: found {key!r}, allowed: {', '.join(OPTIONS)}")

    def _read_tasks(self) -> tuple[str, ...]:
        if self._medium == "text":
            return ("text",)
        allowed = MEDIUM_TASKS[self._medium]
        tasks = tuple(filter(None, self._options.get("tasks", "").split(","))) or allowed
        for task in tasks:
            if task not in allowed:
                raise DataError(f"TFDS '{self._name}' option tasks: found {task!r}, allowed: {', '.join(allowed)}")
        return tasks

    def _document(self, number: int, example: dict[str, Any], value: Any, task: str) -> Document:
        reserved = (*_MEDIA, "caption", "prompt")
        meta = {key: self._plain(example, feature) for key, feature in self._mapping.items() if key not in reserved}
        meta = {**meta, **self._meta}
        if self._medium == "text":
            return passage(value, **meta)
        template = self._mapping["caption"]
        if task.endswith("_generation") and "prompt" in self._mapping:
            templates = self._mapping["prompt"].split("|")
            template = templates[number % len(templates)]
        return captioned(task, value, self._fill(template, example), **meta)

    def _convert(self, value: Any) -> Any:
        if self._medium == "text":
            return _text(value)
        if self._medium == "audio":
            feature = self._features[self._mapping["audio"]]
            rate = getattr(feature, "sample_rate", None) or int(self._options.get("sample_rate", 0))
            if not rate:
                raise DataError("audio without a sample rate, allowed: option sample_rate in Hz")
            return self._format.fit_audio(_full_scale(np.asarray(value)), rate)
        frames = np.stack(value) if isinstance(value, list) else np.asarray(value)
        if self._medium == "image":
            frames = frames[None]
        elif self._options.get("frames"):
            frames = frames[: int(self._options["frames"])]
        if frames.shape[-1] == 1:
            frames = frames.repeat(3, axis=-1)
        if self._medium == "video":
            self._format.check_frames(len(frames))
        frames = self._format.fit_frames(np.ascontiguousarray(frames))
        return frames[0] if self._medium == "image" else frames

    def _fill(self, template: str, example: dict[str, Any]) -> str:
        if not _is_template(template):
            return str(self._plain(example, template))
        parts = []
        for literal, feature, form, _ in string.Formatter().parse(template):
            parts.append(literal)
            if feature:
                value = self._plain(example, feature)
                parts.append(DIGIT_WORDS[int(value)] if form == "word" else str(value))
        return "".join(parts)

    def _plain(self, example: dict[str, Any], feature: str) -> Any:
        """A JSON-able value; class labels by name, unless the name is a number."""
        value = example[feature]
        if isinstance(value, bytes):
            return value.decode("utf-8")
        names = getattr(self._features[feature], "names", None)
        if names:
            name = names[int(value)]
            return int(name) if name.isdigit() else name
        return np.asarray(value).tolist()


def _is_template(text: str) -> bool:
    return "{" in text or " " in text


def _fields(templates: str) -> list[str]:
    if not _is_template(templates):
        return [templates]
    return [field for _, field, _, _ in string.Formatter().parse(templates) if field]


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _full_scale(samples: np.ndarray) -> np.ndarray:
    """Integer samples -> float32 in [-1, 1]. TFDS keeps 16-bit sound in wider integers too."""
    if samples.dtype.kind in "iu":
        return samples.astype(np.float32) / (32768.0 if samples.dtype.itemsize > 1 else 128.0)
    return samples.astype(np.float32)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
