"""Judges: small classifiers that read digits out of media, trained on real training data (jittered views too) only."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from ernie5_jax.evaluation import judge_networks as networks
from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.evaluation.media_sets import collect
from ernie5_jax.evaluation.speech_features import HOP_SECONDS, MELS, log_mel
from ernie5_jax.files import write_arrays
from ernie5_jax.sequence.types import Document

Label = int | str

JUDGED_MODALITIES: dict[str, str] = {"image": "image", "video": "video", "speech": "audio"}
"""Modality of the spans each judge reads."""

_PREDICT_BATCH = 128
_LONGEST_CLIP_SECONDS = 1.2


@dataclasses.dataclass(frozen=True)
class Judge:
    """A trained classifier with one head per question ("digit", "direction").

    Attributes:
      kind: "image" reads uint8 [H, W, 3], "video" uint8 [T, H, W, 3], "speech" float32 [samples].
      labels: Class names of every head, in the order of its logits.
      params: Flat dict of arrays.
      shape: Of one prepared input.
      sample_rate: Hz, of speech.
    """

    kind: networks.Kind
    labels: dict[str, tuple[Label, ...]]
    params: networks.Params
    shape: tuple[int, ...]
    sample_rate: int = 0

    def predict(self, media: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The label each head gives to every clip or picture."""
        x = prepare(self.kind, media, self.shape, self.sample_rate)
        found: dict[str, list[np.ndarray]] = {head: [] for head in self.labels}
        for start in range(0, len(x), _PREDICT_BATCH):
            part = x[start : start + _PREDICT_BATCH]
            padded = np.zeros((_PREDICT_BATCH, *self.shape), np.float32)
            padded[: len(part)] = part
            for head, values in _predict(self.kind, self.params, padded).items():
                found[head].append(np.asarray(values)[: len(part)])
        return {
            head: np.array([self.labels[head][i] for i in np.concatenate(v)] if v else []) for head, v in found.items()
        }

    def accuracy(self, media: Sequence[np.ndarray], head: str, labels: Sequence[Label]) -> float:
        """Share of `media` whose label is right."""
        return float((self.predict(media)[head] == np.asarray(labels)).mean())

    def save(self, path: Path) -> None:
        """Writes one `.npz`, atomically."""
        description = {"kind": self.kind, "labels": self.labels, "shape": self.shape, "sample_rate": self.sample_rate}
        arrays = {name: np.asarray(value) for name, value in self.params.items()}
        write_arrays(path, {"description": np.array(json.dumps(description)), **arrays})

    @classmethod
    def load(cls, path: Path) -> Judge:
        """Reads what `save` wrote.

        Raises:
          EvaluationError: The file is not a judge.
        """
        try:
            with np.load(path) as stored:
                arrays = {name: stored[name] for name in stored.files}
            description = json.loads(str(arrays.pop("description")))
        except (OSError, ValueError, KeyError) as error:
            raise EvaluationError(
                f"judge {path}: found an unreadable file ({error}), allowed: one by Judge.save"
            ) from None
        return cls(
            kind=description["kind"],
            labels={head: tuple(names) for head, names in description["labels"].items()},
            params={name: jnp.asarray(value) for name, value in arrays.items()},
            shape=tuple(description["shape"]),
            sample_rate=description["sample_rate"],
        )


def prepare(
    kind: networks.Kind, media: Sequence[np.ndarray], shape: tuple[int, ...], sample_rate: int = 0
) -> np.ndarray:
    """Network inputs float32 [n, *shape]: grey pictures or log-mel pictures, about -1 ... 1.

    Raises:
      EvaluationError: Pictures of another size than `shape`.
    """
    if kind == "speech":
        return log_mel(list(media), sample_rate, shape[0])
    pictures = np.empty((len(media), *shape), np.float32)
    for i, item in enumerate(media):
        if kind == "video":
            item = item[np.linspace(0, len(item) - 1, networks.VIDEO_FRAMES).round().astype(int)]
        if item.shape[:-1] != shape[:-1]:
            raise EvaluationError(f"{kind} {i}: found size {item.shape[:-1]}, allowed: {shape[:-1]}, the judge's own")
        pictures[i, ..., 0] = item.mean(-1, dtype=np.float32) / 127.5 - 1
    return pictures


def train_judge(
    kind: networks.Kind,
    media: Sequence[np.ndarray],
    labels: dict[str, Sequence[Label]],
    *,
    steps: int = 600,
    seed: int = 0,
    sample_rate: int = 0,
    batch_size: int = 48,
    progress: bool = False,
) -> Judge:
    """Trains a judge on real media.

    Args:
      kind: "image", "video" or "speech".
      media: Real training pictures, clips or waves.
      labels: One label per item and head; video may have "digit" and "direction", the others "digit".
      steps: Optimiser steps of `batch_size` examples, each freshly augmented.
      seed: Decides the initial values, the batches and the augmentation.
      sample_rate: Hz, needed for speech.
    """
    for head, values in labels.items():
        if len(values) != len(media) or not len(media):
            raise EvaluationError(f"{kind} judge: found {len(values)} {head} labels for {len(media)} items")
    shape = _input_shape(kind, media, sample_rate)
    names = {head: tuple(sorted(set(values), key=str)) for head, values in labels.items()}
    index = {head: jnp.array([names[head].index(v) for v in values]) for head, values in labels.items()}
    data = jnp.asarray(prepare(kind, media, shape, sample_rate))
    params = networks.init(kind, shape, {head: len(values) for head, values in names.items()}, seed)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-2)
    state = (params, optimizer.init(params))
    step = _make_step(kind, optimizer, batch_size)
    key = jax.random.key(seed, impl="unsafe_rbg")  # compiles several times faster than threefry
    for i in tqdm(range(steps), desc=f"{kind} judge", disable=not progress, leave=False):
        state = step(state, key, i, data, index)
    return Judge(kind, names, state[0], shape, sample_rate)


def train_judges(
    documents: Sequence[Document],
    *,
    steps: int,
    seed: int = 0,
    sample_rate: int = 0,
    folder: Path | None = None,
    progress: bool = False,
) -> dict[str, Judge]:
    """Trains the judges "image", "video" and "speech" on what `documents` (training split) contain.

    Args:
      documents: With `digit` (and `direction`) in their meta.
      steps: Per judge.
      sample_rate: Hz of the audio.
      folder: Where finished judges are kept; those already there are loaded instead.
    """

    def train(kind: str) -> Judge | None:
        path = folder / f"{kind}.npz" if folder else None
        if path and path.exists():
            return Judge.load(path)
        media = collect(documents, JUDGED_MODALITIES[kind])
        if not len(media):
            return None
        labels: dict[str, Any] = {"digit": media.digits}
        if kind == "video" and all(media.directions):
            labels["direction"] = media.directions
        judge = train_judge(
            cast(networks.Kind, kind),
            media.values,
            labels,
            steps=steps,
            seed=seed,
            sample_rate=sample_rate if kind == "speech" else 0,
            progress=progress,
        )
        if path:
            judge.save(path)
        return judge

    # Small networks: one alone leaves cores idle.
    with ThreadPoolExecutor(len(JUDGED_MODALITIES)) as pool:
        trained = zip(JUDGED_MODALITIES, pool.map(train, JUDGED_MODALITIES), strict=True)
        return {kind: judge for kind, judge in trained if judge is not None}


def _input_shape(kind: networks.Kind, media: Sequence[np.ndarray], sample_rate: int) -> tuple[int, ...]:
    if kind == "speech":
        if sample_rate < 1:
            raise EvaluationError(f"speech judge: found sample rate {sample_rate}, allowed: >= 1 Hz")
        seconds = min(max(len(wave) for wave in media) / sample_rate, _LONGEST_CLIP_SECONDS)
        return max(8, round(seconds / HOP_SECONDS)), MELS
    if kind == "video":
        return networks.VIDEO_FRAMES, *media[0].shape[1:3], 1
    return *media[0].shape[:2], 1


def _make_step(kind: networks.Kind, optimizer: optax.GradientTransformation, batch_size: int) -> Any:
    def loss(params: networks.Params, x: jax.Array, labels: dict[str, jax.Array]) -> jax.Array:
        total = jnp.zeros(())
        for head, logits in networks.logits(kind, params, x).items():
            smooth = optax.smooth_labels(jax.nn.one_hot(labels[head], logits.shape[-1]), 0.05)
            total += optax.softmax_cross_entropy(logits, smooth).mean()
        return total

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, key: jax.Array, i: int, data: jax.Array, index: dict[str, jax.Array]) -> Any:
        params, opt_state = state
        pick, noise = jax.random.split(jax.random.fold_in(key, i))
        chosen = jax.random.randint(pick, (batch_size,), 0, len(data))
        x = networks.augment(kind, noise, data[chosen])
        gradients = jax.grad(loss)(params, x, {head: values[chosen] for head, values in index.items()})
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return cast(networks.Params, optax.apply_updates(params, updates)), opt_state

    return step


@functools.partial(jax.jit, static_argnums=0)
def _predict(kind: networks.Kind, params: networks.Params, x: jax.Array) -> dict[str, jax.Array]:
    return {head: logits.argmax(-1) for head, logits in networks.logits(kind, params, x).items()}
