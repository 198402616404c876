"""From the configuration's sources to folders of documents and of encoded documents.

folder/documents/<source>/<split>/   documents
folder/encoded/<source>/<split>/     the same through the tokenizers
folder/worlds/                       what worlds keep
"""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from ernie5_jax.config import ExperimentConfig, SourceConfig
from ernie5_jax.data.documents import DocumentSource
from ernie5_jax.data.encoding import EncodedDocuments, Tokenizers, encode_documents
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.manifest import Manifest, check_manifest
from ernie5_jax.data.media import MediaFormat
from ernie5_jax.data.shards import DocumentShards, read_shards, write_shards
from ernie5_jax.data.sizes import check_capacity
from ernie5_jax.data.tfds_source import TfdsSource, load_builder
from ernie5_jax.data.worlds import world_sources
from ernie5_jax.sequence import Document, SequenceError

SPLITS = ("train", "test")


def prepare_documents(
    config: ExperimentConfig, folder: Path | str, split: str, *, progress: bool = True
) -> dict[str, DocumentShards]:
    """Makes (or goes on making) the documents of one split of every source.

    Args:
      config: `data.sources`, formats and capacities.
      folder: Where to keep them; what is finished is only opened.
      split: "train" or "test". Sources without it are left out.
      progress: Whether to show bars.

    Returns:
      Documents by source name.

    Raises:
      DataError: A source that cannot be used; names it.
    """
    if not config.data.sources:
        raise DataError("config key 'data.sources': found none, allowed: at least one source")
    prepared = {}
    for name, source in sorted(config.data.sources.items()):
        shards = _prepare(name, source, config, Path(folder), split, progress)
        if shards is not None and len(shards):
            prepared[name] = shards
    if not prepared:
        raise DataError(f"config key 'data.sources': found no documents of split '{split}'")
    return prepared


def prepare_encoded(
    config: ExperimentConfig,
    folder: Path | str,
    split: str,
    documents: dict[str, DocumentShards],
    tokenizers: Tokenizers,
    *,
    progress: bool = True,
) -> dict[str, EncodedDocuments]:
    """Encodes (or goes on encoding) the documents of one split of every source; see `encode_documents`."""
    return {
        name: encode_documents(
            shards,
            tokenizers.text,
            tokenizers.visual,
            tokenizers.audio,
            Path(folder) / "encoded" / name / split,
            sequence=config.sequence,
            text_dropout=config.text.dropout,
            progress=progress,
            description=f"encoding {name} {split}",
        )
        for name, shards in documents.items()
    }


def prepare_manifest(
    path: Path | str, config: ExperimentConfig, folder: Path | str, *, progress: bool = True
) -> dict[str, DocumentShards]:
    """Checks a manifest in full, then writes its documents to `folder`/<split>; nothing is written for a bad one.

    The split of a document is its `meta.split`, "train" where there is none.

    Raises:
      ManifestError: Lists all bad lines.
    """
    manifest = check_manifest(path, config, progress)
    return _write_splits(manifest, config, Path(folder), progress)


def _prepare(
    name: str, source: SourceConfig, config: ExperimentConfig, folder: Path, split: str, progress: bool
) -> DocumentShards | None:
    form = MediaFormat.of(config)
    out = folder / "documents" / name
    where = f"config key 'data.sources.{name}'"
    if source.path:
        if source.path.endswith(".jsonl"):
            return prepare_manifest(source.path, config, out, progress=progress).get(split)
        path = Path(source.path) / split
        if not path.is_dir():
            if not any((Path(source.path) / other).is_dir() for other in SPLITS):
                raise DataError(f"{where}.path: found no documents in '{source.path}', allowed: a prepared folder")
            return None
        return read_shards(path)
    if source.world:
        made = world_sources(source.world, split, form, folder / "worlds", source.options)
    elif source.tfds:
        options = {"data_dir": str(folder / "tfds"), **source.options}
        expression = options.get(f"{split}_split", split)
        if not expression:
            return None
        made = TfdsSource(
            load_builder(source.tfds, options), expression, source.mapping, form, source.options, {"split": split}
        )
    else:
        raise DataError(f"{where}: found nothing, allowed: one of path, world, tfds")
    checked = _Checked(made, config)
    return write_shards(
        checked, out / split, form.sample_rate, progress=progress, description=f"preparing {name} {split}"
    )


class _Checked:
    """Documents of a source; one that cannot fit a row is refused when it is read."""

    def __init__(self, source: DocumentSource, config: ExperimentConfig):
        self._source, self._config = source, config

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Document:
        document = self._source[index]
        try:
            check_capacity(document, self._config)
        except SequenceError as error:
            raise DataError(f"document {index} ({document.meta.get('task')}): {error}") from None
        return document

    def fingerprint(self) -> str:
        return self._source.fingerprint()


class _Part:
    """The documents of one split of a manifest."""

    def __init__(self, manifest: Manifest, numbers: list[int], split: str):
        self._manifest, self._numbers, self._split = manifest, numbers, split

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Document:
        return self._manifest[self._numbers[index]]

    def fingerprint(self) -> str:
        return f"{self._manifest.fingerprint()} {self._split}"


def _write_splits(
    manifest: Manifest, config: ExperimentConfig, folder: Path, progress: bool
) -> dict[str, DocumentShards]:
    numbers: dict[str, list[int]] = {}
    for i in tqdm(range(len(manifest)), desc="splitting", unit=" documents", disable=not progress, leave=False):
        numbers.setdefault(manifest.split(i), []).append(i)
    return {
        split: write_shards(
            _Part(manifest, part, split),
            folder / split,
            config.audio.sample_rate,
            progress=progress,
            description=f"preparing {manifest.path.name} {split}",
        )
        for split, part in sorted(numbers.items())
    }
