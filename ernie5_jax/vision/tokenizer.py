"""The trained visual tokenizer: pixels <-> latents, in fixed-size batches or chunk by chunk; save and load."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.config import VisualTokenizerConfig, from_mapping, to_plain
from ernie5_jax.files import write_arrays, write_json
from ernie5_jax.vision.autoencoder import (
    Variables,
    centre,
    from_pixels,
    init_variables,
    make_apply,
    standardise,
    to_pixels,
)
from ernie5_jax.vision.convolution import Past
from ernie5_jax.vision.errors import VisionError
from ernie5_jax.vision.pyramid import ScalePyramid

_BATCH_SIZES = (8, 64)
"""Rows of one compiled call; a remainder is padded to the smallest that holds it."""

_CONFIG_FILE, _ARRAYS_FILE = "config.json", "arrays.npz"


class CausalVisualTokenizer:
    """Implements `VisualTokenizer` by a causal 3-D convolutional autoencoder.

    Args:
      config: Sizes.
      variables: As of `init_variables`, trained.
    """

    def __init__(self, config: VisualTokenizerConfig, variables: Variables):
        self.config = config
        self.variables = jax.tree.map(jnp.asarray, variables)
        self.pyramid = make_pyramid(config)
        self._encode, self._decode = _compiled(config)

    @property
    def bits(self) -> int:
        return self.config.bits

    @property
    def scales(self) -> tuple[tuple[int, int], ...]:
        return self.pyramid.scales

    @property
    def temporal_stride(self) -> int:
        return self.config.temporal_stride

    @property
    def spatial_stride(self) -> int:
        return self.config.spatial_stride

    @property
    def feature_dim(self) -> int:
        return self.config.feature_dim

    def latent_frames(self, frames: int) -> int:
        """t = 1 + (T - 1) / temporal stride.

        Raises:
          VisionError: T is not 1 mod the stride; frames are never dropped or repeated.
        """
        if frames < 1 or (frames - 1) % self.temporal_stride:
            stride = self.temporal_stride
            raise VisionError(f"video: found {frames} frames, allowed: T = 1 mod {stride}, i.e. 1, {1 + stride}, ...")
        return 1 + (frames - 1) // self.temporal_stride

    def encode(self, video: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [B, T, H, W, 3] -> latents float32 [B, t, h, w, C], features [B, t, h, w, D].

        Raises:
          VisionError: T is not 1 mod the temporal stride, or another size or type than the tokenizer's.
        """
        video = self._check_video(video)
        self.latent_frames(video.shape[1])
        latents, features = _in_batches(lambda rows: self._encode(self.variables, rows, None)[:2], video)
        return latents, features

    def decode(self, quantized: np.ndarray) -> np.ndarray:
        """Quantised latents float32 [B, t, h, w, C] -> uint8 [B, 1 + stride (t - 1), H, W, 3]."""
        quantized = self._check_latents(quantized)
        return _in_batches(lambda rows: self._decode(self.variables, rows, None)[:1], quantized)[0]

    def encode_chunk(self, video: np.ndarray, past: Past | None = None) -> tuple[np.ndarray, np.ndarray, Past]:
        """Encodes the next frames of a video; the chunks together give what `encode` gives.

        Args:
          video: uint8 [B, T, H, W, 3], T = 1 mod stride for the first chunk, 0 mod stride later.
          past: What the call for the previous chunk returned; None for the first.

        Returns:
          Latents and features of the chunk, and the state for the next one.
        """
        video = self._check_video(video)
        if past is None:
            self.latent_frames(video.shape[1])
        elif video.shape[1] < 1 or video.shape[1] % self.temporal_stride:
            found, stride = video.shape[1], self.temporal_stride
            raise VisionError(f"later chunk of a video: found {found} frames, allowed: a multiple of {stride}")
        latents, features, future = self._encode(self.variables, video, past)
        return np.asarray(latents), np.asarray(features), future

    def decode_chunk(self, quantized: np.ndarray, past: Past | None = None) -> tuple[np.ndarray, Past]:
        """Decodes the next latent frames [B, t, h, w, C] of a video, see `encode_chunk`."""
        video, future = self._decode(self.variables, self._check_latents(quantized), past)
        return np.asarray(video), future

    def reconstruct(self, video: np.ndarray) -> np.ndarray:
        """uint8 [B, T, H, W, 3] through encoder, quantiser and decoder: the ceiling of what a model can generate."""
        latents, _ = self.encode(video)
        return self.decode(self.pyramid.dequantize(self.pyramid.quantize(latents)))

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of configuration and parameters."""
        digest = hashlib.sha256(json.dumps(_sizes(self.config), sort_keys=True).encode())
        for name, array in sorted(_flatten(self.variables).items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `arrays.npz`, each whole or not at all."""
        write_arrays(Path(folder) / _ARRAYS_FILE, _flatten(self.variables))
        content = {"kind": "visual", "fingerprint": self.fingerprint(), "config": to_plain(self.config)}
        write_json(Path(folder) / _CONFIG_FILE, content, indent=2)

    def _check_video(self, video: np.ndarray) -> np.ndarray:
        video, side = np.asarray(video), self.config.image_size
        if video.dtype != np.uint8 or video.ndim != 5 or video.shape[2:] != (side, side, 3):
            found = f"{video.dtype} {tuple(video.shape)}"
            raise VisionError(f"video: found {found}, allowed: uint8 [B, T, {side}, {side}, 3]")
        return video

    def _check_latents(self, quantized: np.ndarray) -> np.ndarray:
        quantized = np.asarray(quantized, np.float32)
        if quantized.ndim != 5 or quantized.shape[2:] != (*self.pyramid.grid, self.bits) or quantized.shape[1] < 1:
            allowed = f"[B, t >= 1, {', '.join(map(str, (*self.pyramid.grid, self.bits)))}]"
            raise VisionError(f"quantized latents: found {tuple(quantized.shape)}, allowed: {allowed}")
        return quantized


@functools.lru_cache(maxsize=8)
def _compiled(config: VisualTokenizerConfig) -> tuple[Any, Any]:
    """Jitted encode (uint8 -> centred latents, features) and decode (-> uint8), shared by tokenizers of one size."""
    apply = make_apply(config)

    def encode(variables: Variables, video: jax.Array, past: Past | None):
        latents, features, future = apply.encode(variables["params"], [to_pixels(video)], past)
        features = standardise(features[0], variables["features"])
        return centre(latents[0], variables["mean"], past is None), features, future

    def decode(variables: Variables, quantized: jax.Array, past: Past | None):
        pixels, future = apply.decode(variables["params"], [quantized], past)
        return from_pixels(pixels[0]), future

    return jax.jit(encode), jax.jit(decode)


def make_pyramid(config: VisualTokenizerConfig) -> ScalePyramid:
    """The scale pyramid of a tokenizer."""
    return ScalePyramid([(side, side) for side in config.scales], config.bits)


def load_visual_tokenizer(folder: str | os.PathLike[str]) -> CausalVisualTokenizer:
    """Reads what `CausalVisualTokenizer.save` wrote.

    Raises:
      VisionError: Missing, unreadable or changed files; names the folder.
    """
    folder = Path(folder)
    try:
        content = json.loads((folder / _CONFIG_FILE).read_text())
        config = from_mapping(VisualTokenizerConfig, _tuples(content["config"]), "visual")
        with np.load(folder / _ARRAYS_FILE) as file:
            arrays = {name: file[name] for name in file.files}
        expected = _flatten(init_variables(config, 0))
        if {k: v.shape for k, v in arrays.items()} != {k: v.shape for k, v in expected.items()}:
            raise ValueError("arrays of other names or shapes than its config.json says")
        tokenizer = CausalVisualTokenizer(config, _unflatten(arrays))
    except Exception as error:  # files of unknown origin fail in many ways; the user needs the folder's name
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise VisionError(f"visual tokenizer '{folder}': found {reason}, allowed: a folder written by save()") from None
    if tokenizer.fingerprint() != content.get("fingerprint"):
        raise VisionError(
            f"visual tokenizer '{folder}': found fingerprint {tokenizer.fingerprint()}, allowed: "
            f"{content.get('fingerprint')!r}, the one in its config.json"
        )
    return tokenizer


def _sizes(config: VisualTokenizerConfig) -> dict[str, Any]:
    """What the tokens depend on beside the parameters; how it was trained does not matter."""
    plain = to_plain(config)
    return {key: value for key, value in plain.items() if key != "training"}


def _in_batches(function: Any, rows: np.ndarray) -> list[np.ndarray]:
    """Applies `function` to padded batches of few sizes, so that nothing compiles twice, and joins the results."""
    parts = []
    for start in range(0, max(len(rows), 1), _BATCH_SIZES[-1]):
        part = rows[start : start + _BATCH_SIZES[-1]]
        size = next(s for s in _BATCH_SIZES if s >= len(part))
        padded = np.concatenate([part, np.zeros((size - len(part), *rows.shape[1:]), rows.dtype)])
        parts.append([np.asarray(out)[: len(part)] for out in function(padded)])
    return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree) if isinstance(tree, jax.Array) else tree}
    return {k: v for key in tree for k, v in _flatten(tree[key], f"{prefix}/{key}" if prefix else str(key)).items()}


def _unflatten(arrays: dict[str, np.ndarray]) -> Any:
    tree: dict[Any, Any] = {}
    for name, array in arrays.items():
        *path, last = (int(part) if part.isdigit() else part for part in name.split("/"))
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    return tree


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(v) for key, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
