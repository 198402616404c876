"""Tokenizers of a few numpy lines that follow the Protocols; they need no training and nearly invert."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ernie5_jax.errors import UserError
from ernie5_jax.testing.configs import square_scales
from ernie5_jax.text.special_tokens import NUM_SPECIAL_TOKENS


class _Saved:
    """`fingerprint`, `save` and `load` of a tokenizer that is nothing but its constructor's arguments."""

    _settings: dict[str, Any]

    def fingerprint(self) -> str:
        text = json.dumps([type(self).__name__, self._settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / "config.json.tmp"
        temporary.write_text(json.dumps({"kind": type(self).__name__, **self._settings}, sort_keys=True))
        temporary.rename(folder / "config.json")

    @classmethod
    def load(cls, folder: Path) -> Any:
        settings = json.loads((folder / "config.json").read_text())
        if settings.pop("kind") != cls.__name__:
            raise UserError(f"{folder}: found another tokenizer, allowed: {cls.__name__}")
        return cls(**settings)


class DummyTextTokenizer(_Saved):
    """One id per UTF-8 byte, after the special tokens; exact for any string."""

    def __init__(self, vocab_size: int = NUM_SPECIAL_TOKENS + 256):
        if vocab_size < NUM_SPECIAL_TOKENS + 256:
            raise UserError(f"vocab_size: found {vocab_size}, allowed: >= {NUM_SPECIAL_TOKENS + 256}")
        self._settings = {"vocab_size": vocab_size}
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        data = text.encode("utf-8", "surrogatepass")
        return np.frombuffer(data, np.uint8).astype(np.int32) + NUM_SPECIAL_TOKENS

    def encode_dropout(self, text: str, key: tuple[int, ...], rate: float) -> np.ndarray:
        del key, rate  # bytes have no merges to drop
        return self.encode(text)

    def decode(self, ids: np.ndarray) -> str:
        data = bytes(int(i) - NUM_SPECIAL_TOKENS for i in ids if 0 <= i - NUM_SPECIAL_TOKENS < 256)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")


class DummyVisualTokenizer(_Saved):
    """Mean colour of every patch, turned into C channels by a fixed orthonormal matrix.

    Args:
      bits: C >= 3.
      num_scales: Squares 1, 2, 4, ...
      spatial_stride: Pixels per latent cell.
      temporal_stride: Frames after the first per latent frame.
      feature_dim: D of the features.
    """

    def __init__(
        self,
        bits: int = 4,
        num_scales: int = 2,
        spatial_stride: int = 4,
        temporal_stride: int = 4,
        feature_dim: int = 6,
    ):
        self._settings = {
            "bits": bits,
            "num_scales": num_scales,
            "spatial_stride": spatial_stride,
            "temporal_stride": temporal_stride,
            "feature_dim": feature_dim,
        }
        if bits < 3 or feature_dim < 3:
            raise UserError(f"bits, feature_dim: found {bits}, {feature_dim}, allowed: >= 3 (one per colour)")
        self.bits, self.feature_dim = bits, feature_dim
        self.spatial_stride, self.temporal_stride = spatial_stride, temporal_stride
        self.scales = square_scales(num_scales)
        rng = np.random.default_rng(0)
        self._to_latent = np.linalg.qr(rng.normal(size=(bits, 3)))[0].T.astype(np.float32)
        self._to_feature = np.linalg.qr(rng.normal(size=(feature_dim, 3)))[0].T.astype(np.float32)

    @property
    def image_size(self) -> int:
        """Side of the pictures whose latents fill the last scale, pixels."""
        return self.scales[-1][0] * self.spatial_stride

    def encode(self, video: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        batch, frames, height, width, _ = video.shape
        side = self.spatial_stride
        if (frames - 1) % self.temporal_stride:
            raise UserError(f"video: found T = {frames} frames, allowed: T = 1 mod {self.temporal_stride}")
        if height % side or width % side:
            raise UserError(f"video: found {height} x {width} pixels, allowed: multiples of {side}")
        colour = video.reshape(batch, frames, height // side, side, width // side, side, 3).mean((3, 5)) / 127.5 - 1
        later = colour[:, 1:].reshape(batch, -1, self.temporal_stride, *colour.shape[2:]).mean(2)
        colour = np.concatenate([colour[:, :1], later], axis=1).astype(np.float32)
        return colour @ self._to_latent, colour @ self._to_feature

    def decode(self, quantized: np.ndarray) -> np.ndarray:
        colour = np.asarray(quantized) @ self._to_latent.T
        pixels = np.clip((colour + 1) * 127.5, 0, 255).round().astype(np.uint8)
        later = np.repeat(pixels[:, 1:], self.temporal_stride, axis=1)
        pixels = np.concatenate([pixels[:, :1], later], axis=1)
        return pixels.repeat(self.spatial_stride, axis=2).repeat(self.spatial_stride, axis=3)


class DummyAudioTokenizer(_Saved):
    """Mean of every frame in a positional system: level 1 is the coarsest digit of base `bins`."""

    def __init__(self, levels: int = 3, bins: int = 16, samples_per_frame: int = 40, sample_rate: int = 1000):
        self._settings = {
            "levels": levels,
            "bins": bins,
            "samples_per_frame": samples_per_frame,
            "sample_rate": sample_rate,
        }
        self.levels, self.bins = levels, bins
        self.samples_per_frame, self.sample_rate = samples_per_frame, sample_rate

    def features(self, waves: list[np.ndarray]) -> list[np.ndarray]:
        frames = [self._frames(wave) for wave in waves]
        return [np.stack([f.mean(1), f.std(1)], axis=1).astype(np.float32) for f in frames]

    def encode(self, waves: list[np.ndarray]) -> list[np.ndarray]:
        codes = []
        for feature in self.features(waves):
            rest = np.clip((feature[:, 0].astype(np.float64) + 1) / 2, 0, 1 - 1e-9)
            digits = []
            for _ in range(self.levels):
                digits.append(np.floor(rest * self.bins))
                rest = rest * self.bins - digits[-1]
            codes.append(np.stack(digits, axis=1).astype(np.int32))
        return codes

    def decode(self, codes: list[np.ndarray]) -> list[np.ndarray]:
        place = float(self.bins) ** -np.arange(1, self.levels + 1)
        waves = []
        for code in codes:
            # Half of the last place centres the value in its interval.
            value = 2 * (code @ place + place[-1] / 2) - 1
            waves.append(np.repeat(value, self.samples_per_frame).astype(np.float32))
        return waves

    def _frames(self, wave: np.ndarray) -> np.ndarray:
        if not len(wave):
            raise UserError("audio: found 0 samples, allowed: at least 1")
        return np.pad(wave, (0, -len(wave) % self.samples_per_frame)).reshape(-1, self.samples_per_frame)
