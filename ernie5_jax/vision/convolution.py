"""Causal convolutions that give the same result for a whole video and for its chunks.

Frames of all clips of a batch lie behind each other, [F, H, W, C]: what looks at one frame (most operations) runs once
for pictures and videos together. Nothing mixes a frame with a later one, and norms look at one frame, so a video may
come in pieces: what a convolution still needs from earlier frames is kept by module path, handed in and returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ernie5_jax.nn import at_least_float32, dot

Past = dict[str, tuple[jax.Array, ...]]
"""Last frames [B, n, H, W, C] of every group of clips that a causal convolution still has to see, by module path."""


class Stream:
    """One pass over groups of equally long clips, or over chunks of them.

    Args:
      clips: (B, T) of every group.
      past: What the pass over the previous chunks left in `future`; None at the start of the videos.

    Attributes:
      clips: As above; temporal down- and upsampling change it.
      start: Whether the chunks begin their videos.
      future: Filled by the pass.
    """

    def __init__(self, clips: Sequence[tuple[int, int]], past: Past | None = None):
        self.clips = tuple(clips)
        self.past = past
        self.start = past is None
        self.future: Past = {}

    def groups(self, x: jax.Array) -> list[jax.Array]:
        """[F, H, W, C] -> [B, T, H, W, C] of every group."""
        out, start = [], 0
        for batch, frames in self.clips:
            out.append(x[start : start + batch * frames].reshape(batch, frames, *x.shape[1:]))
            start += batch * frames
        return out

    def join(self, groups: Sequence[jax.Array]) -> jax.Array:
        """Inverse of `groups`; `clips` becomes what the groups hold."""
        self.clips = tuple((g.shape[0], g.shape[1]) for g in groups)
        flat = [g.reshape(-1, *g.shape[2:]) for g in groups]
        return flat[0] if len(flat) == 1 else jnp.concatenate(flat)

    def extend(self, path: str, groups: Sequence[jax.Array], frames: int) -> list[jax.Array]:
        """Every group preceded by the `frames` frames before it; the first frame of a video is repeated (Cosmos)."""
        if self.past is None:
            before = [jnp.repeat(g[:, :1], frames, axis=1) for g in groups]
        else:
            before = self.past[path]
        windows = [jnp.concatenate(pair, axis=1) for pair in zip(before, groups, strict=True)]
        self.future[path] = tuple(w[:, -frames:] for w in windows)
        return windows


def space_to_depth(x: jax.Array, size: int) -> jax.Array:
    """[..., H, W, C] -> [..., H / size, W / size, size^2 C]."""
    *lead, h, w, c = x.shape
    x = x.reshape(*lead, h // size, size, w // size, size, c)
    return jnp.moveaxis(x, -4, -3).reshape(*lead, h // size, w // size, size * size * c)


def depth_to_space(x: jax.Array, size: int) -> jax.Array:
    """Inverse of `space_to_depth`."""
    *lead, h, w, c = x.shape
    x = x.reshape(*lead, h, w, size, size, c // size**2)
    return jnp.moveaxis(x, -4, -3).reshape(*lead, h * size, w * size, c // size**2)


def parameter(shape: tuple[int, ...], axes: tuple[str, ...], *, scale: float = 0.0, value: float = 0.0) -> nnx.Param:
    """A Param to be set to value + N(0, scale^2) by `autoencoder.init_variables`, outside of compiled code."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, init_scale=scale, init_value=value)


class CausalConv3d(nnx.Module):
    """3 x 3 convolution that sees the present and `kernel_time - 1` earlier frames; zero padding in space.

    `kernel` works on the present frame, `history` on the earlier ones, oldest first. History starts at zero
    (inflation of a 2-D convolution, VideoAR), so that at first every frame is processed like a picture.
    """

    def __init__(self, path: str, width_in: int, width_out: int, kernel_time: int, gain: float = 1.0):
        axes = ("height", "width", "channels_in", "channels_out")
        shape = (3, 3, width_in, width_out)
        self.kernel = parameter(shape, axes, scale=gain / math.sqrt(9 * width_in))
        self.history = parameter((kernel_time - 1, *shape), ("time", *axes)) if kernel_time > 1 else None
        self.bias = parameter((width_out,), ("channels_out",))
        self.path = path

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """[F, H, W, C] -> [F, H, W, C']."""
        kernel = self.kernel[...].astype(x.dtype)
        if self.history is None:
            y = _convolve(x, kernel)
        else:
            y = self._causal(x, kernel, self.history[...].astype(x.dtype), stream)
        return y + self.bias[...].astype(y.dtype)

    def _causal(self, x: jax.Array, kernel: jax.Array, history: jax.Array, stream: Stream) -> jax.Array:
        groups = stream.groups(x)
        windows = stream.extend(self.path, groups, len(history))
        out = []
        for group, window in zip(groups, windows, strict=True):
            batch, frames = group.shape[:2]
            if stream.start and frames == 1:
                # A picture: all time slices see the same frame.
                flat, weights = group, kernel + history.sum(0)
            else:
                # Time slices as input channels of a 2-D convolution: much faster than 3-D ones on a CPU.
                flat = jnp.concatenate([window[:, i : i + frames] for i in range(len(history) + 1)], axis=-1)
                weights = jnp.concatenate([*history, kernel], axis=2)
            y = _convolve(flat.reshape(batch * frames, *flat.shape[2:]), weights)
            out.append(y.reshape(batch, frames, *y.shape[1:]))
        return stream.join(out)


def _convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


class Pointwise(nnx.Module):
    """Linear map of the channels, with bias."""

    def __init__(self, width_in: int, width_out: int, gain: float = 1.0):
        axes = ("channels_in", "channels_out")
        self.kernel = parameter((width_in, width_out), axes, scale=gain / math.sqrt(width_in))
        self.bias = parameter((width_out,), ("channels_out",))

    def __call__(self, x: jax.Array) -> jax.Array:
        return dot(x, self.kernel[...].astype(x.dtype)) + self.bias[...].astype(x.dtype)


class FrameNorm(nnx.Module):
    """Root-mean-square norm over height, width and channels of one frame; never over time."""

    def __init__(self, width: int, eps: float):
        self.scale = parameter((width,), ("norm",), value=1.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = at_least_float32(x)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=(-3, -2, -1), keepdims=True) + self.eps)
        return (y * self.scale[...]).astype(x.dtype)


class TemporalDown(nnx.Module):
    """Halves the frames after the first: pairs become their mean plus a learned map; the first stays alone."""

    def __init__(self, width: int):
        self.merge = Pointwise(2 * width, width, 0.5)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """1 + 2n frames of each clip -> 1 + n at the start of a video, 2n -> n later."""
        groups = stream.groups(x)
        if stream.start:
            groups = [jnp.concatenate([g[:, :1], g], axis=1) for g in groups]
        first, second = stream.join([g[:, ::2] for g in groups]), stream.join([g[:, 1::2] for g in groups])
        return (first + second) / 2 + self.merge(jnp.concatenate([first, second], axis=-1))


class TemporalUp(nnx.Module):
    """Doubles the frames after the first, which stays one frame."""

    def __init__(self, width: int):
        self.split = Pointwise(width, 2 * width, 0.5)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """1 + n frames of each clip -> 1 + 2n at the start of a video, n -> 2n later."""
        y = self.split(x).reshape(*x.shape[:-1], 2, x.shape[-1]) + x[..., None, :]
        groups = stream.groups(jnp.moveaxis(y, -2, 1))
        groups = [g.reshape(g.shape[0], -1, *g.shape[3:]) for g in groups]
        return stream.join([g[:, 1:] for g in groups] if stream.start else groups)
