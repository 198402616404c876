"""The audio tokenizer: waveforms <-> codec frames, saved as one self-contained folder."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from ernie5_jax.audio import rvq, training
from ernie5_jax.audio.errors import AudioError
from ernie5_jax.audio.networks import Codec
from ernie5_jax.audio.stft import griffin_lim
from ernie5_jax.config import AudioTokenizerConfig, from_mapping, to_plain
from ernie5_jax.files import write_arrays, write_file

_CONFIG_FILE, _ARRAYS_FILE = "config.json", "arrays.npz"
_FORMAT = 1
_BATCHES = (4, 32)
_SMALLEST_FRAMES = 16


class RvqAudioTokenizer:
    """Residual-vector-quantised codec over log magnitudes (implements `AudioTokenizer`).

    A clip always runs in a program whose shape follows from its own length, so its codes do not depend on its
    neighbours, and few programs are compiled.
    """

    def __init__(self, config: AudioTokenizerConfig, arrays: dict[str, Any]):
        """`arrays`: nested dict with `params`, `codes` [Q, K, D] and `scale`, see `training.State`."""
        self.config = config
        self._arrays = jax.tree.map(jnp.asarray, arrays)
        self._graph = training.codec_structure(config)

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def samples_per_frame(self) -> int:
        return self.config.samples_per_frame

    @property
    def frame_rate(self) -> float:
        """Code frames per second."""
        return self.config.frame_rate

    @property
    def levels(self) -> int:
        return self.config.levels

    @property
    def bins(self) -> int:
        return self.config.bins

    def frames(self, samples: int) -> int:
        """Code frames of a clip of `samples` samples."""
        return -(-samples // self.samples_per_frame)

    def encode(self, waves: list[np.ndarray]) -> list[np.ndarray]:
        """float32 [samples_i] in [-1, 1] each -> int32 [ceil(samples_i / samples_per_frame), Q].

        Raises:
          AudioError: A clip is empty, not one-dimensional, or not finite; names its place in the list.
        """
        return [codes for codes, _ in self._encode(waves)]

    def features(self, waves: list[np.ndarray]) -> list[np.ndarray]:
        """Encoder output before quantisation, float32 [frames_i, latent_dim]; errors as `encode`."""
        return [latents for _, latents in self._encode(waves)]

    def decode(self, codes: list[np.ndarray]) -> list[np.ndarray]:
        """int [frames_i, n] each, n <= Q levels (the same n for all) -> float32 [frames_i * samples_per_frame].

        Raises:
          AudioError: A code outside 0 ... bins - 1 or a wrong number of levels; names its place in the list.
        """
        codes = [np.asarray(code) for code in codes]
        for i, code in enumerate(codes):
            if code.ndim != 2 or not 1 <= code.shape[1] <= self.levels or code.shape[1] != codes[0].shape[1]:
                raise AudioError(f"audio codes {i}: found shape {code.shape}, allowed: [frames, {self.levels}]")
            if code.size and not (code.min() >= 0 and code.max() < self.bins):
                found = f"{code.min()} ... {code.max()}"
                raise AudioError(f"audio codes {i}: found codes {found}, allowed: 0 ... {self.bins - 1}")
        program = functools.partial(_decode, graph=self._graph, config=self.config)
        results = _in_buckets(codes, [len(code) for code in codes], 1, lambda *batch: (program(self._arrays, *batch),))
        return [wave[: len(code) * self.samples_per_frame] for (wave,), code in zip(results, codes, strict=True)]

    def _encode(self, waves: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        waves = [np.asarray(wave, np.float32) for wave in waves]
        for i, wave in enumerate(waves):
            if wave.ndim != 1 or wave.size == 0:
                raise AudioError(f"audio clip {i}: found shape {wave.shape}, allowed: [samples] with samples >= 1")
            if not np.isfinite(wave).all():
                raise AudioError(f"audio clip {i}: found samples that are not finite, allowed: -1 ... 1")
        counts = [self.frames(wave.size) for wave in waves]
        program = functools.partial(_encode, graph=self._graph, config=self.config)
        results = _in_buckets(
            waves, counts, self.samples_per_frame, lambda *batch: program(self._arrays, *batch), _BATCHES[-1:]
        )
        return [(codes[:n], latents[:n]) for (codes, latents), n in zip(results, counts, strict=True)]

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of configuration and arrays; equal ones read each other's codes."""
        digest = hashlib.sha256(self._config_text().encode())
        for name, array in sorted(self._flat().items()):
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Writes `config.json` and `arrays.npz`, each whole or not at all."""
        write_arrays(Path(folder) / _ARRAYS_FILE, self._flat())
        write_file(Path(folder) / _CONFIG_FILE, self._config_text())

    def _flat(self) -> dict[str, np.ndarray]:
        flat = traverse_util.flatten_dict(self._arrays, sep="/")
        return {name: np.asarray(array) for name, array in flat.items()}

    def _config_text(self) -> str:
        config = to_plain(self.config)
        if not config["split"]:
            del config["split"]  # younger than the format: tokenizers without it keep their fingerprints
        content = {"kind": "rvq_audio_tokenizer", "format": _FORMAT, "config": config}
        return json.dumps(content, indent=1, sort_keys=True)


def load_audio_tokenizer(folder: Path | str) -> RvqAudioTokenizer:
    """Reads a folder written by `RvqAudioTokenizer.save`.

    Raises:
      AudioError: A file is missing or unreadable, or holds something else; names the file.
    """
    folder = Path(folder)
    try:
        content = json.loads((folder / _CONFIG_FILE).read_text())
        with (folder / _ARRAYS_FILE).open("rb") as file, np.load(file) as stored:
            flat = {name: stored[name] for name in stored.files}
    except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
        raise AudioError(
            f"audio tokenizer {str(folder)!r}: cannot be read ({error}), allowed: a saved folder"
        ) from None
    kind = (content.get("kind"), content.get("format")) if isinstance(content, dict) else None
    if kind != ("rvq_audio_tokenizer", _FORMAT):
        raise AudioError(
            f"audio tokenizer {str(folder)!r}: found kind and format {kind}, allowed: rvq_audio_tokenizer, 1"
        )
    config = from_mapping(AudioTokenizerConfig, content["config"])
    arrays = traverse_util.unflatten_dict(flat, sep="/")
    if jax.tree.map(np.shape, arrays) != _shapes(config):
        raise AudioError(f"audio tokenizer {str(folder)!r}: arrays do not fit its {_CONFIG_FILE}")
    return RvqAudioTokenizer(config, arrays)


def train_audio_tokenizer(
    clips: Sequence[np.ndarray],
    config: AudioTokenizerConfig,
    *,
    seed: int = 0,
    progress: bool = True,
    log: Callable[[dict[str, float]], None] | None = None,
) -> RvqAudioTokenizer:
    """Trains a codec on mono clips.

    Args:
      clips: Random-access sequence of float32 [samples_i] in [-1, 1] at `config.sample_rate`, held in memory.
      config: Sizes and training.
      seed: Of initial values and batches; the result is a function of (clips, config, seed).
      progress: Shows a progress bar.
      log: Called with `step` and metrics every `config.training.log_every` steps.

    Raises:
      AudioError: No clips, an empty clip, or the loss is not finite.
    """
    state = training.fit(clips, config, seed, progress, log)
    arrays = {"params": state["params"], "codes": state["codebooks"]["codes"], "scale": state["scale"]}
    return RvqAudioTokenizer(config, arrays)


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def _encode(arrays, waves, counts, *, graph, config):
    """[B, T * samples_per_frame], int32 [B] frames -> codes int32 [B, T, Q], latents [B, T, D]."""
    mask = jnp.arange(waves.shape[1] // config.samples_per_frame) < counts[:, None]
    codec = training.codec_from(graph, arrays["params"])
    latents = codec.encode(training.spectral_features(waves, arrays["scale"], config), mask)
    return rvq.quantize(arrays["codes"], latents, split=config.split).codes, latents


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def _decode(arrays, codes, counts, *, graph, config):
    """int32 [B, T, n], int32 [B] frames -> float32 [B, T * samples_per_frame] in [-1, 1]."""
    mask = jnp.arange(codes.shape[1]) < counts[:, None]
    codec = training.codec_from(graph, arrays["params"])
    decoded = codec.decode(rvq.dequantize(arrays["codes"], codes, split=config.split), mask)
    features = decoded.reshape(*mask.shape, config.fold, -1) * arrays["scale"]["std"] + arrays["scale"]["mean"]
    magnitude = jnp.maximum(jnp.exp(features) - config.log_floor, 0) * mask[..., None, None]
    magnitude = magnitude.reshape(mask.shape[0], -1, config.spectral_bins)
    iterations, momentum = config.griffin_lim_iterations, config.griffin_lim_momentum
    return jnp.clip(griffin_lim(magnitude, config.fft_size, config.hop_length, iterations, momentum), -1, 1)


def _in_buckets(items, counts, stride, program, batches=_BATCHES):
    """Runs `program(batch, counts)` over zero-padded groups of items whose length rounds up to the same power of two.

    Args:
      items: Arrays [counts_i * stride or less, ...].
      counts: Frames of each item.
      stride: Rows of an item per frame.
      program: Returns a tuple of arrays with a leading batch axis.
      batches: Batch sizes that may be used, ascending.

    Returns:
      One tuple of numpy arrays per item, in order, still padded along the frames.
    """
    groups: dict[int, list[int]] = {}
    for i, count in enumerate(counts):
        groups.setdefault(max(_SMALLEST_FRAMES, 1 << max(count - 1, 0).bit_length()), []).append(i)
    results: list[Any] = [None] * len(items)
    for frames, members in groups.items():
        size = next((b for b in batches if b >= len(members)), batches[-1])
        for start in range(0, len(members), size):
            part = members[start : start + size]
            batch = np.zeros((size, frames * stride, *items[part[0]].shape[1:]), items[part[0]].dtype)
            lengths = np.zeros(size, np.int32)
            for row, i in enumerate(part):
                batch[row, : len(items[i])] = items[i]
                lengths[row] = counts[i]
            outputs = [np.asarray(output) for output in program(batch, lengths)]
            for row, i in enumerate(part):
                results[i] = tuple(output[row] for output in outputs)
    return results


def _shapes(config: AudioTokenizerConfig) -> dict[str, Any]:
    """Shapes of the stored arrays."""
    params = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(Codec(config, nnx.Rngs(0)))))
    return {
        "params": jax.tree.map(np.shape, params),
        "codes": (config.levels, config.bins, config.code_dim),
        "scale": {"mean": (config.spectral_bins,), "std": ()},
    }
