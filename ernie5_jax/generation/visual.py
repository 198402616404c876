"""Images and videos, one (frame, scale) per forward (NFSP)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ernie5_jax.generation.sampling import SamplingParams, for_both, guide, position_keys, sample_bits
from ernie5_jax.generation.stepping import Apply, Cursor, Weights, advance, group, slots
from ernie5_jax.sequence import scale_position, summary_position
from ernie5_jax.vision.pyramid import ScalePyramid


class VisualTrace(NamedTuple):
    """Generated frames.

    Attributes:
      bits: int8 [B, t, P, C], scales concatenated coarse to fine.
      log_probs: float32 [B, t, P], summed over the bits of a code, under the model's own distribution.
      quantized: float32 [B, t, h, w, C], what the tokenizer decodes.
      logits: [B, t, P, C] of the conditional rows.
    """

    bits: jax.Array
    log_probs: jax.Array
    quantized: jax.Array
    logits: jax.Array


def bit_log_prob(logits: jax.Array, bits: jax.Array) -> jax.Array:
    """Log-probability of each code [..., C] -> [...]."""
    return jax.nn.log_sigmoid(jnp.where(bits > 0, logits, -logits)).sum(-1)


def generate_visual(
    apply: Apply,
    weights: Weights,
    cursor: Cursor,
    logits: jax.Array,
    keys: jax.Array,
    params: SamplingParams,
    *,
    pyramid: ScalePyramid,
    frames: int,
    guided: bool,
) -> VisualTrace:
    """Generates one image (frames = 1) or video span after BOI / BOV.

    Args:
      cursor: After the prompt; `index` is the span's offset.
      logits: [B, 1, C] of the first scale at BOx.
      keys: [B] random keys (conditional rows only).
      pyramid: Scales and resampling, the same object as in tokenizer and training layout.
      frames: Latent frames.
      guided: Whether the second half of the rows is unconditional.
    """
    total = cursor.row.shape[0]
    size = total // 2 if guided else total
    scales, offset = pyramid.scales, cursor.index

    def choose(k, logits, row, acc):
        bits = sample_bits(position_keys(keys, row[:size]), guide(logits, params, guided), params)
        own = logits[:size]
        grid = for_both(bits, guided).reshape(total, *scales[k], pyramid.bits)
        return pyramid.accumulate(acc, grid, k), (bits, bit_log_prob(own, bits), own)

    def frame(carry, y):
        cursor, logits = carry
        acc = jnp.zeros((total, *pyramid.grid, pyramid.bits), jnp.float32)
        chosen = []
        row, cache = cursor.row, cursor.cache
        for k in range(len(scales)):
            if k:
                features = pyramid.next_input(acc, k).reshape(total, -1, pyramid.bits)
                position = scale_position(offset, y, k, scales)
                logits, cache = _block(apply, weights, cursor, cache, row, position, features, k)
                row = row + features.shape[1]
            acc, outcome = choose(k, logits, row, acc)
            chosen.append(outcome)
        features = pyramid.summary(acc).reshape(total, -1, pyramid.bits)
        logits, cache = _block(apply, weights, cursor, cache, row, summary_position(offset, y, scales), features, 0)
        cursor = Cursor(cache, row + 1, cursor.index)
        bits, log_probs, own = (jnp.concatenate(parts, axis=1) for parts in zip(*chosen, strict=True))
        return (cursor, logits), VisualTrace(bits, log_probs, acc[:size], own)

    _, trace = jax.lax.scan(frame, (cursor, logits), jnp.arange(frames, dtype=jnp.float32))
    return VisualTrace(*(jnp.moveaxis(part, 0, 1) for part in trace))


def _block(apply, weights, cursor, cache, row, position, features, scale):
    """Forward of one block of scale inputs (or SS, which counts as the first scale): logits [B, n, C] and cache."""
    total, count = features.shape[:2]
    values = {"features": features, "scale": jnp.full((total, count), scale, jnp.int32)}
    batch, rows = group(
        position,
        row,
        inputs={"visual": slots(total, count, values)},
        targets={"visual": slots(total, count)},
    )
    output, cache = advance(apply, weights, Cursor(cache, row, cursor.index), batch, rows)
    return output.visual_logits, cache
