"""Encoder and decoder of the causal 3-D tokenizer; a picture is a video of one frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ernie5_jax.config import VisualTokenizerConfig
from ernie5_jax.vision.convolution import (
    CausalConv3d,
    FrameNorm,
    Past,
    Pointwise,
    Stream,
    TemporalDown,
    TemporalUp,
    depth_to_space,
    space_to_depth,
)


class ResidualBlock(nnx.Module):
    """x + conv(silu(causal conv(silu(norm(x)))))."""

    def __init__(self, path: str, width: int, kernel_time: int, eps: float):
        self.norm = FrameNorm(width, eps)
        self.first = CausalConv3d(f"{path}.first", width, width, kernel_time)
        self.second = CausalConv3d(f"{path}.second", width, width, 1, 0.5)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        y = self.first(jax.nn.silu(self.norm(x)), stream)
        return x + self.second(jax.nn.silu(y), stream)


def _blocks(path: str, config: VisualTokenizerConfig, level: int) -> nnx.List:
    width, time = config.channels[level], _kernel_time(config, level)
    return nnx.List(
        [ResidualBlock(f"{path}.{level}.{i}", width, time, config.norm_eps) for i in range(config.res_blocks)]
    )


def _kernel_time(config: VisualTokenizerConfig, level: int) -> int:
    if config.temporal_kernels:
        return config.temporal_kernels[level]
    return 3 if level == len(config.channels) - 1 else 1


def _halvings(config: VisualTokenizerConfig) -> int:
    return config.temporal_stride.bit_length() - 1


class Encoder(nnx.Module):
    """Pixels -> features at the latent grid -> latents."""

    def __init__(self, config: VisualTokenizerConfig):
        widths = config.channels
        self.patch_size = config.patch_size
        self.stem = CausalConv3d("stem", 3 * config.patch_size**2, widths[0], _kernel_time(config, 0))
        self.levels = nnx.List([_blocks("levels", config, i) for i in range(len(widths))])
        self.spatial = nnx.List([Pointwise(4 * a, b) for a, b in zip(widths, widths[1:], strict=False)])
        self.temporal = nnx.List([TemporalDown(widths[-1]) for _ in range(_halvings(config))])
        self.merged = _blocks("merged", config, len(widths) - 1)
        self.norm = FrameNorm(widths[-1], config.norm_eps)
        self.out = Pointwise(widths[-1], config.bits)

    def __call__(self, pixels: jax.Array, stream: Stream) -> tuple[jax.Array, jax.Array]:
        """[F, H, W, 3] in [-1, 1] -> latents [f, h, w, C], features [f, h, w, D].

        T = 1 + stride (t - 1) frames of a clip at the start of a video, stride t in later chunks.
        """
        x = self.stem(space_to_depth(pixels, self.patch_size), stream)
        for level, blocks in enumerate(self.levels):
            for block in blocks:
                x = block(x, stream)
            if level < len(self.spatial):
                x = self.spatial[level](space_to_depth(x, 2))
        for down in self.temporal:
            x = down(x, stream)
        for block in self.merged:
            x = block(x, stream)
        features = self.norm(x)
        return self.out(features), features


class Decoder(nnx.Module):
    """Quantised latents -> pixels."""

    def __init__(self, config: VisualTokenizerConfig):
        widths = config.channels
        self.patch_size = config.patch_size
        # Codes have unit length; bring every bit to the order of 1.
        self.scale = config.bits**0.5
        self.stem = CausalConv3d("stem", config.bits, widths[-1], _kernel_time(config, len(widths) - 1))
        self.levels = nnx.List([_blocks("levels", config, i) for i in range(len(widths))])
        self.spatial = nnx.List([Pointwise(b, 4 * a) for a, b in zip(widths, widths[1:], strict=False)])
        self.temporal = nnx.List([TemporalUp(widths[-1]) for _ in range(_halvings(config))])
        self.merged = _blocks("merged", config, len(widths) - 1)
        self.norm = FrameNorm(widths[0], config.norm_eps)
        self.out = CausalConv3d("out", widths[0], 3 * config.patch_size**2, _kernel_time(config, 0), 0.2)

    def __call__(self, quantized: jax.Array, stream: Stream) -> jax.Array:
        """[f, h, w, C] -> [F, H, W, 3], about [-1, 1]."""
        x = self.stem(quantized * self.scale, stream)
        for block in self.merged:
            x = block(x, stream)
        for up in self.temporal:
            x = up(x, stream)
        for level in reversed(range(len(self.levels))):
            for block in self.levels[level]:
                x = block(x, stream)
            if level:
                x = depth_to_space(self.spatial[level - 1](x), 2)
        return depth_to_space(self.out(jax.nn.silu(self.norm(x)), stream), self.patch_size)


class AutoEncoder(nnx.Module):
    """Encoder and decoder; the quantiser between them has no parameters."""

    def __init__(self, config: VisualTokenizerConfig):
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)


Variables = dict[str, Any]
"""`params`: nested dict of the autoencoder; `mean`: [2, C], see `centre`; `features`: [2, D], see `standardise`."""


def init_variables(config: VisualTokenizerConfig, seed: int) -> Variables:
    """Fresh variables, numpy float32."""
    rng = np.random.default_rng(seed)

    def draw(variable: nnx.Variable) -> np.ndarray:
        meta, shape = variable.get_metadata(), variable.get_value().shape
        return (meta["init_value"] + meta["init_scale"] * rng.standard_normal(shape)).astype(np.float32)

    state = nnx.state(_abstract(config), nnx.Param)
    params = jax.tree.map(draw, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return {
        "params": nnx.to_pure_dict(params),
        "mean": np.zeros((2, config.bits), np.float32),
        "features": np.stack([np.zeros(config.feature_dim), np.ones(config.feature_dim)]).astype(np.float32),
    }


def standardise(features: jax.Array, statistics: jax.Array) -> jax.Array:
    """Features [..., D] less their mean, over their deviation (both [D] of the training pictures).

    Raw features are mostly a constant vector, which hides what differs between pictures from the model that reads them.
    """
    return (features - statistics[0]) * statistics[1]


def _abstract(config: VisualTokenizerConfig) -> AutoEncoder:
    return nnx.eval_shape(lambda: AutoEncoder(config))


def centre(latents: jax.Array, mean: jax.Array, start: bool) -> jax.Array:
    """Subtracts the mean latent, so that the bits of coarse scales are not constant.

    Pictures and first frames stand for one frame, later latents for several: each kind has its own mean.

    Args:
      latents: [B, t, h, w, C].
      mean: [2, C].
      start: Whether the first frame is the first of its video.
    """
    later = jnp.arange(latents.shape[1]) >= (1 if start else 0)
    return latents - jnp.where(later[:, None], mean[1], mean[0])[:, None, None]


class Apply(NamedTuple):
    """The autoencoder as pure functions of its parameters, over groups of clips.

    Attributes:
      encode: (params, [pixels [B, T, H, W, 3] in [-1, 1]], past) -> ([latents, mean included], [features], future).
      decode: (params, [quantized [B, t, h, w, C]], past) -> ([pixels], future).
    """

    encode: Callable[[Any, Sequence[jax.Array], Past | None], tuple[list[jax.Array], list[jax.Array], Past]]
    decode: Callable[[Any, Sequence[jax.Array], Past | None], tuple[list[jax.Array], Past]]


def make_apply(config: VisualTokenizerConfig) -> Apply:
    """Pure encode and decode; `past` and `future` are those of `Stream`."""
    graph, abstract = nnx.split(_abstract(config))

    def merge(params: Any) -> AutoEncoder:
        state = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def encode(params: Any, clips: Sequence[jax.Array], past: Past | None):
        stream = Stream([], past)
        latents, features = merge(params).encoder(stream.join(clips), stream)
        return stream.groups(latents), stream.groups(features), stream.future

    def decode(params: Any, clips: Sequence[jax.Array], past: Past | None):
        stream = Stream([], past)
        pixels = merge(params).decoder(stream.join(clips), stream)
        return stream.groups(pixels), stream.future

    return Apply(encode, decode)


def to_pixels(video: jax.Array) -> jax.Array:
    """uint8 -> float32 in [-1, 1]."""
    return video.astype(jnp.float32) / 127.5 - 1


def from_pixels(pixels: jax.Array) -> jax.Array:
    """[-1, 1] -> uint8, rounded and clipped."""
    return jnp.clip(jnp.round((pixels + 1) * 127.5), 0, 255).astype(jnp.uint8)
