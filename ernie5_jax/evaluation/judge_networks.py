"""Small convolutional classifiers in plain JAX, and their augmentations. Parameters are flat dicts of arrays."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["image", "video", "speech"]
Params = dict[str, jax.Array]

VIDEO_FRAMES = 3
"""Frames of a clip the video judge looks at: first, middle, last."""

_PICTURE_WIDTHS = (32, 64)
_SPEECH_WIDTHS = (48, 64, 96)


def init(kind: Kind, shape: tuple[int, ...], heads: dict[str, int], seed: int) -> Params:
    """Parameters of a judge for prepared inputs of `shape` (without the batch axis) and `heads` (classes by name)."""
    rng = np.random.default_rng(seed)
    params: dict[str, np.ndarray] = {}

    def add(name: str, *dims: int) -> None:
        params[f"{name}.w"] = rng.normal(size=dims).astype(np.float32) * math.sqrt(2 / math.prod(dims[:-1]))
        params[f"{name}.b"] = np.zeros(dims[-1], np.float32)

    if kind == "speech":
        widths = (shape[-1], *_SPEECH_WIDTHS)
        for i in range(len(_SPEECH_WIDTHS)):
            add(f"conv{i}", 5, widths[i], widths[i + 1])
        features = dict.fromkeys(heads, 2 * widths[-1])
    else:
        widths = (shape[-1], *_PICTURE_WIDTHS)
        for i in range(len(_PICTURE_WIDTHS)):
            add(f"conv{i}", 4, 4, widths[i], widths[i + 1])
        height, width = (-(-side // 4) for side in shape[-3:-1])
        flat = height * width * widths[-1]
        add("hidden", flat, 96)
        features = dict.fromkeys(heads, 96)
        if "direction" in heads:  # read from where things are in each frame, not from what they are
            features["direction"] = VIDEO_FRAMES * 96
    for name, classes in heads.items():
        add(f"head_{name}", features[name], classes)
    return {name: jnp.asarray(value) for name, value in params.items()}


def logits(kind: Kind, params: Params, x: jax.Array) -> dict[str, jax.Array]:
    """Logits [n, classes] per head of prepared inputs (see `judges.Judge.prepare`)."""
    if kind == "speech":
        return {"digit": _dense(params, "head_digit", _speech_trunk(params, x))}
    if kind == "image":
        return {"digit": _dense(params, "head_digit", _picture_trunk(params, x))}
    n, frames = x.shape[:2]
    hidden = _picture_trunk(params, x.reshape(n * frames, *x.shape[2:])).reshape(n, frames, -1)
    heads = {"digit": hidden.mean(1), "direction": hidden.reshape(n, -1)}
    return {name: _dense(params, f"head_{name}", value) for name, value in heads.items() if f"head_{name}.w" in params}


def augment(kind: Kind, key: jax.Array, x: jax.Array) -> jax.Array:
    """Random shifts, softness, gain and noise, drawn per example."""
    keys = jax.random.split(key, 5)
    per_example = (len(x),) + (1,) * (x.ndim - 1)
    if kind == "speech":
        x = _shifted(keys[0], x, (8, 2), fill=-1.0)
        floor = jax.random.uniform(keys[1], per_example, minval=-1.0, maxval=-0.2)
        x = jnp.maximum(x, floor)
        x = x + 0.15 * jax.random.normal(keys[2], (len(x), 1, x.shape[2]))  # loudness per band: another voice or room
    else:
        x = _shifted(keys[0], x, (*(0,) * (x.ndim - 4), 1, 1), fill=-1.0)
        soft = jax.random.uniform(keys[1], per_example)
        x = x + soft * (_blurred(x) - x)
        x = (x + 1) * jax.random.uniform(keys[2], per_example, minval=0.7, maxval=1.2) - 1
    sigma = jax.random.uniform(keys[3], per_example, maxval=0.3)
    return x + sigma * jax.random.normal(keys[4], x.shape)


def _shifted(key: jax.Array, x: jax.Array, reach: tuple[int, ...], fill: float) -> jax.Array:
    """Moves each example by up to `reach[i]` steps along axis i + 1; what comes in from outside is `fill`."""
    reach = reach + (0,) * (x.ndim - 1 - len(reach))
    padded = jnp.pad(x, [(0, 0), *((r, r) for r in reach)], constant_values=fill)
    limits = jnp.array([2 * r + 1 for r in reach])
    starts = jnp.floor(jax.random.uniform(key, (len(x), len(reach))) * limits).astype(jnp.int32)
    return jax.vmap(lambda picture, start: jax.lax.dynamic_slice(picture, tuple(start), x.shape[1:]))(padded, starts)


def _blurred(x: jax.Array) -> jax.Array:
    for axis in (-3, -2):
        x = 0.5 * x + 0.25 * (jnp.roll(x, 1, axis) + jnp.roll(x, -1, axis))
    return x


def _picture_trunk(params: Params, x: jax.Array) -> jax.Array:
    for i in range(len(_PICTURE_WIDTHS)):
        x = jax.lax.conv_general_dilated(
            x, params[f"conv{i}.w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[f"conv{i}.b"])
    return jax.nn.relu(_dense(params, "hidden", x.reshape(len(x), -1)))


def _speech_trunk(params: Params, x: jax.Array) -> jax.Array:
    for i in range(len(_SPEECH_WIDTHS)):
        x = jax.lax.conv_general_dilated(x, params[f"conv{i}.w"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
        x = jax.nn.relu(x + params[f"conv{i}.b"])
    return jnp.concatenate([x.mean(1), x.max(1)], -1)


def _dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.w"] + params[f"{name}.b"]
