"""Data: documents from manifests, TFDS and built-in worlds -> shards -> tokenised records -> packed batches."""

from ernie5_jax.data.documents import TASKS, ConcatSource, DocumentSource, ListSource, captioned, infer_task, passage
from ernie5_jax.data.encoding import (
    EncodedDocuments,
    Encoder,
    Tokenizers,
    encode_documents,
    encode_in_memory,
    encode_videos,
    load_tokenizers,
    split_text,
    unique_media,
)
from ernie5_jax.data.errors import DataError
from ernie5_jax.data.loader import Loader, make_loader
from ernie5_jax.data.manifest import Manifest, ManifestError, Problem, check_manifest
from ernie5_jax.data.media import MediaFormat, read_audio, read_image, read_video
from ernie5_jax.data.mixture import check_tasks
from ernie5_jax.data.prepare import SPLITS, prepare_documents, prepare_encoded, prepare_manifest
from ernie5_jax.data.rows import HeldOutRows, RowSource
from ernie5_jax.data.shards import DocumentShards, read_shards, write_shards
from ernie5_jax.data.tfds_source import TfdsSource, load_builder
from ernie5_jax.data.worlds import WORLDS, world_sources

__all__ = [
    "SPLITS",
    "TASKS",
    "WORLDS",
    "ConcatSource",
    "DataError",
    "DocumentShards",
    "DocumentSource",
    "EncodedDocuments",
    "Encoder",
    "HeldOutRows",
    "ListSource",
    "Loader",
    "Manifest",
    "ManifestError",
    "MediaFormat",
    "Problem",
    "RowSource",
    "TfdsSource",
    "Tokenizers",
    "captioned",
    "check_manifest",
    "check_tasks",
    "encode_documents",
    "encode_in_memory",
    "encode_videos",
    "infer_task",
    "load_builder",
    "load_tokenizers",
    "make_loader",
    "passage",
    "prepare_documents",
    "prepare_encoded",
    "prepare_manifest",
    "read_audio",
    "read_image",
    "read_shards",
    "read_video",
    "split_text",
    "unique_media",
    "world_sources",
    "write_shards",
]
