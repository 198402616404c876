"""Built-in worlds by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ernie5_jax.data.documents import ConcatSource, DocumentSource, ListSource, passage, short_hash
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.media import MediaFormat

WorldMaker = Callable[[str, MediaFormat, Path, Mapping[str, str]], list[DocumentSource]]


def world_sources(
    name: str, split: str, form: MediaFormat, folder: Path, options: Mapping[str, str] | None = None
) -> DocumentSource:
    """All documents of one split of a world.

    Args:
      name: One of `WORLDS`.
      split: "train" or "test".
      form: Formats that media are brought to.
      folder: Where a world may keep what it makes.
      options: See the world's own module.

    Raises:
      DataError: Unknown world or option.
    """
    if name not in WORLDS:
        raise DataError(f"world: found {name!r}, allowed: {', '.join(WORLDS)}")
    return ConcatSource(WORLDS[name](split, form, folder, dict(options or {})))


def _digits(split: str, form: MediaFormat, folder: Path, options: Mapping[str, str]) -> list[DocumentSource]:
    from ernie5_jax.data.tfds_source import TfdsSource, load_builder

    _known_options("digits", options, ())
    plain = "the word {label:word}"
    mappings = {
        "handwriting": {"image": "image", "caption": "a handwritten {label:word}", "digit": "label"},
        "jittered": {"image": "image", "caption": "a handwritten {label:word}", "digit": "label"},
        "motion": {
            "video": "video",
            "caption": "the digit {label:word} moves {direction}",
            "digit": "label",
            "direction": "direction",
        },
        "speech": {"audio": "audio", "caption": plain, "digit": "label", "voice": "voice", "speaker": "speaker"},
        "prose": {"text": "text", "topic": "topic"},
    }
    sources: list[DocumentSource] = []
    for part, mapping in mappings.items():
        if part == "jittered" and split != "train":
            continue
        where = {"data_dir": str(folder / "tfds"), "import": "ernie5_jax.data.worlds.digits"}
        builder = load_builder(f"digits_world/{part}", where)
        options = {"speech": {"sample_rate": "8000"}, "jittered": {"tasks": "image_caption"}}.get(part, {})
        meta = {"split": split}
        if part != "speech":
            sources.append(TfdsSource(builder, split, mapping, form, options, meta))
            continue
        # Names of voices that were never heard say nothing, so only training voices are asked for by name.
        named = {**mapping, "prompt": f"{plain}|{plain} spoken by {{speaker}}"}
        if split == "train":
            sources.append(TfdsSource(builder, "train", named, form, options, {**meta, "unseen_voice": False}))
        else:
            sources.append(TfdsSource(builder, "test", mapping, form, options, {**meta, "unseen_voice": True}))
            sources.append(TfdsSource(builder, "takes", named, form, options, {**meta, "unseen_voice": False}))
    return sources


def _tiny(split: str, form: MediaFormat, folder: Path, options: Mapping[str, str]) -> list[DocumentSource]:
    del folder
    from ernie5_jax.data.worlds.tiny import tiny_documents

    _known_options("tiny", options, ())
    return [tiny_documents(split, form)]


def _recorded(split: str, form: MediaFormat, folder: Path, options: Mapping[str, str]) -> list[DocumentSource]:
    del folder
    from ernie5_jax.data.worlds.recorded import recorded_sources

    _known_options("digits_recorded", options, ("folder",))
    return recorded_sources(split, form, options.get("folder", ""))


def _python_source(split: str, form: MediaFormat, folder: Path, options: Mapping[str, str]) -> list[DocumentSource]:
    del form, folder
    from ernie5_jax.data.worlds.python_source import modules

    _known_options("python_source", options, ())
    texts = modules(split)
    documents = [passage(text, topic=name, split=split) for name, text in texts]
    return [ListSource(documents, f"python_source {split} {short_hash(texts)}")]


def _known_options(world: str, options: Mapping[str, str], allowed: tuple[str, ...]) -> None:
    for key in options:
        if key not in allowed:
            raise DataError(f"world '{world}' option: found {key!r}, allowed: {', '.join(allowed) or 'none'}")


WORLDS: dict[str, WorldMaker] = {
    "digits": _digits,
    "tiny": _tiny,
    "digits_recorded": _recorded,
    "python_source": _python_source,
}
"""Maker of the sources of a split by world name."""
