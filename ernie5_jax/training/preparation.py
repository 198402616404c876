"""From a configuration to everything a run reads: documents, tokenizers, encoded documents; finished stages are kept.

W/data/documents, W/data/encoded   see `data.prepare_documents`
W/tokenizers/<modality>/           a trained tokenizer and `recipe.json`, what it was trained from
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ernie5_jax.config import ExperimentConfig, from_mapping, to_plain
from ernie5_jax.data import (
    DocumentShards,
    HeldOutRows,
    RowSource,
    check_tasks,
    load_tokenizers,
    make_loader,
    prepare_documents,
    prepare_encoded,
    unique_media,
)
from ernie5_jax.files import write_file
from ernie5_jax.parallel import make_mesh, preset
from ernie5_jax.sequence import Batch, stack
from ernie5_jax.training.errors import CheckpointError
from ernie5_jax.training.identity import check_given_tokenizers, check_resumable, check_start, check_tokenizers
from ernie5_jax.training.paths import find_checkpoint
from ernie5_jax.training.run_data import RunData, files_below
from ernie5_jax.training.step import TrainProgram, check_rows

STAGES = ("data", "tokenizers", "encoding")
_RECIPE = "recipe.json"
Stage = Callable[[str], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def timed_stage(name: str) -> Iterator[None]:
    """Prints how long the block took."""
    start = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


def prepare_run(
    config: ExperimentConfig, workdir: Path | str, *, stage: Stage = timed_stage, progress: bool | None = None
) -> RunData:
    """Makes (or goes on making) what a run reads, in its work folder.

    A stage is skipped when its result was made from the same configuration and input; an interrupted one goes on or
    starts anew, nothing half-made is ever used.

    Args:
      config: Everything.
      workdir: Run folder W.
      stage: Context manager around every stage of `STAGES`, called with its name.
      progress: Whether to show bars; None follows `training.progress`.

    Raises:
      ConfigError: W holds a checkpoint made with another value of an identity key.
      DataError: A source that cannot be used.
    """
    workdir = Path(workdir)
    check_resumable(workdir, config)
    if config.training.init_from and not _newest_step(workdir):
        check_start(config)
    if config.data.tokenizers and not _newest_step(workdir):
        check_given_tokenizers(config)
    mesh = make_mesh(config.parallel)
    check_rows(config, mesh)
    bars = config.training.progress if progress is None else progress
    folder, splits = workdir / "data", ["train"]
    if config.training.evaluate_every:
        splits.append("test")
    with stage(STAGES[0]):
        documents = {split: prepare_documents(config, folder, split, progress=bars) for split in splits}
        check_tasks(documents["train"].values(), config.data)
    # Compiled beside the tokenizers, which leave cores idle, and only now, so that whoever has a mistake in their data
    # hears of it at once.
    newest, program = _newest_step(workdir), None
    if newest < config.training.steps:
        draws = not newest and not config.training.init_from
        program = _in_background(functools.partial(_compile, config, mesh, draws))
    with stage(STAGES[1]):
        _tokenizers(config, workdir / "tokenizers", documents["train"], bars)
    with stage(STAGES[2]):
        tokenizers = load_tokenizers(workdir / "tokenizers")
        if newest:
            check_tokenizers(find_checkpoint(workdir), tokenizers.fingerprints())
        encoded = {
            split: prepare_encoded(config, folder, split, shards, tokenizers, progress=bars)
            for split, shards in documents.items()
        }
    rows = RowSource(encoded["train"], config, tokenizers)

    def batches(step: int) -> Iterator[Batch]:
        return make_loader(rows, config.training.batch_rows, step=step, prefetch=config.data.prefetch)

    held_out = HeldOutRows(encoded["test"], config, tokenizers) if "test" in encoded else None
    return RunData(
        batches=batches,
        held_out=None if held_out is None else functools.partial(_spread, held_out, config),
        files=files_below(workdir / "tokenizers", "tokenizers"),
        tokenizers=tokenizers.fingerprints(),
        program=program,
    )


def _newest_step(workdir: Path) -> int:
    with contextlib.suppress(CheckpointError):
        return int(find_checkpoint(workdir).name)
    return 0


def _compile(config: ExperimentConfig, mesh: Mesh, draws: bool) -> TrainProgram:
    program = TrainProgram(config, mesh, preset(config.parallel.rules))
    if draws:
        program.compile_init()
    return program


def _in_background(work: Callable[[], Any]) -> Future[Any]:
    """The result of `work`, done by a thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def _spread(rows: HeldOutRows, config: ExperimentConfig) -> Iterator[Batch]:
    """`training.evaluate_rows` rows, evenly spread because neighbours are alike, in batches of one size."""
    size = config.training.batch_rows // config.training.micro_batches
    count = max(1, min(config.training.evaluate_rows, len(rows)) // size) * size
    picked = [int(i) for i in np.linspace(0, len(rows) - 1, count)]
    for start in range(0, count, size):
        yield stack([rows[i] for i in picked[start : start + size]])


def _tokenizers(
    config: ExperimentConfig, folder: Path, documents: Mapping[str, DocumentShards], progress: bool
) -> None:
    """Trains those that are missing, on CPUs two at a time: each alone leaves cores idle in its small operations."""

    def make(*modalities: str) -> None:
        for modality in modalities:
            _tokenizer(modality, config, folder / modality, documents, progress)

    if jax.default_backend() != "cpu":
        make("text", "visual", "audio")
        return
    sound = _in_background(functools.partial(make, "audio"))
    make("text", "visual")
    sound.result()


def _tokenizer(
    modality: str, config: ExperimentConfig, folder: Path, documents: Mapping[str, DocumentShards], progress: bool
) -> None:
    """Trains the tokenizer of `modality` into `folder`, unless it is there, made from the same things.

    A run that starts from a checkpoint takes the tokenizers of that one, unless others are named.
    """
    settings, given = getattr(config, modality), _given(config)
    recipe: dict[str, Any] = {"config": to_plain(settings)}
    if given:
        recipe |= {"from": str(given)}
    else:
        fingerprints = {name: shards.fingerprint() for name, shards in sorted(documents.items())}
        recipe |= {"seed": config.seed, "documents": fingerprints}
    text = json.dumps(recipe, sort_keys=True)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        made = json.loads((folder / _RECIPE).read_text())
        made["config"] = to_plain(from_mapping(type(settings), made["config"]))  # younger keys take their defaults
        if json.dumps(made, sort_keys=True) == text:
            return
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if given:
        shutil.copytree(given / modality, temporary)
    else:
        _TRAINERS[modality](config, list(documents.values()), progress).save(temporary)
    write_file(temporary / _RECIPE, text)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _given(config: ExperimentConfig) -> Path | None:
    """Folder of the tokenizers that are not to be trained."""
    if config.data.tokenizers:
        return Path(config.data.tokenizers)
    start = config.training.init_from
    return find_checkpoint(start) / "files" / "tokenizers" if start else None


def _train_text(config: ExperimentConfig, documents: list[DocumentShards], progress: bool) -> Any:
    from ernie5_jax.text import train_bpe

    del progress  # seconds
    return train_bpe(unique_media(documents, "text"), config.text)


def _train_visual(config: ExperimentConfig, documents: list[DocumentShards], progress: bool) -> Any:
    from ernie5_jax.vision import train_visual_tokenizer

    images, videos = (unique_media(documents, modality) for modality in ("image", "video"))
    settings = config.visual
    if not images and not videos:
        # Nothing to see: the tokenizer only has to exist, with its shapes.
        settings = _briefly(settings)
        images = [np.full((settings.image_size, settings.image_size, 3), 128, np.uint8)]
    return train_visual_tokenizer(images, videos, settings, config.seed, progress=progress)


def _train_audio(config: ExperimentConfig, documents: list[DocumentShards], progress: bool) -> Any:
    from ernie5_jax.audio import train_audio_tokenizer

    clips, settings = unique_media(documents, "audio"), config.audio
    if not clips:
        settings = _briefly(settings)
        noise = np.random.default_rng(config.seed).uniform(-0.1, 0.1, 8 * settings.samples_per_frame)
        clips = [noise.astype(np.float32)]
    return train_audio_tokenizer(clips, settings, seed=config.seed, progress=progress)


def _briefly(settings: Any) -> Any:
    return dataclasses.replace(settings, training=dataclasses.replace(settings.training, steps=1, batch_size=1))


_TRAINERS: dict[str, Callable[[ExperimentConfig, list[DocumentShards], bool], Any]] = {
    "text": _train_text,
    "visual": _train_visual,
    "audio": _train_audio,
}
