"""Audio, one codec frame per forward; its levels are chosen inside the layer loop (NCP)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ernie5_jax.generation.sampling import SamplingParams, for_both, guide, position_keys, sample
from ernie5_jax.generation.stepping import Apply, Cursor, Weights, advance, group, slots
from ernie5_jax.sequence import Batch, text_position


class AudioTrace(NamedTuple):
    """Generated codec frames.

    Attributes:
      codes: int32 [B, n, Q]; frames from `count` on are EOA (`bins`).
      log_probs: float32 [B, n, Q] under the model's own distribution, the softmax over all classes; the EOA frame
        counts at level 1 only.
      count: int32 [B], frames before EOA.
      logits: [B, n, Q, bins + 1] of the conditional rows.
    """

    codes: jax.Array
    log_probs: jax.Array
    count: jax.Array
    logits: jax.Array


class _FrameSampler:
    """Chooses the codes of one frame level by level.

    Level 1 decides when to stop: if it emits `bins` all further levels do; `bins` from a later level alone is masked
    out (decisions section 1). Slots behind the first are those of frames in the prompt, whose codes are `given`.
    """

    def __init__(
        self, keys: jax.Array, row: jax.Array, params: SamplingParams, guided: bool, given: jax.Array | None = None
    ):
        self.keys, self.row, self.params, self.guided, self.given = keys, row, params, guided, given
        self.ended: jax.Array | None = None
        self.log_probs: list[jax.Array] = []

    def __call__(self, level: int, logits: jax.Array) -> jax.Array:
        bins = logits.shape[-1] - 1
        own = logits = logits[:, 0]
        if level:
            logits = logits.at[:, bins].set(-jnp.inf)
        guided = guide(logits, self.params, self.guided)
        if level and self.guided:
            guided = guided.at[:, bins].set(-jnp.inf)  # inf - inf of the line above
        code = sample(position_keys(self.keys, self.row, level), guided, self.params)
        if self.ended is None:
            self.ended = code == bins
        log_probs = jax.nn.log_softmax(own[: code.shape[0]])
        log_prob = jnp.take_along_axis(log_probs, code[:, None], axis=-1)[:, 0]
        self.log_probs.append(jnp.where(self.ended, 0, log_prob) if level else log_prob)
        code = jnp.where(self.ended, bins, code)
        code = for_both(code, self.guided)
        return code[:, None] if self.given is None else self.given[..., level].at[:, 0].set(code)


def generate_audio(
    apply: Apply,
    weights: Weights,
    cursor: Cursor,
    prompt: tuple[Batch, jax.Array],
    keys: jax.Array,
    params: SamplingParams,
    *,
    levels: int,
    bins: int,
    max_frames: int,
    guided: bool,
) -> AudioTrace:
    """Generates one audio span after BOA.

    Args:
      cursor: Empty cache; `row` and `index` are those after the prompt.
      prompt: The prompt's batch and rows with audio slot 0 at BOA; its forward chooses the first frame.
      keys: [B] random keys (conditional rows only).
      levels, bins: Q and codes per level.
      max_frames: Longest span.
      guided: Whether the second half of the rows is unconditional.
    """
    total = cursor.row.shape[0]
    size = total // 2 if guided else total

    def forward(cursor, batch, rows, trace, t, done):
        given = batch.targets["audio"].values.get("codes")
        sampler = _FrameSampler(keys, cursor.row[:size] - 1, params, guided, given)
        output, cache = advance(apply, weights, cursor, batch, rows, choose_code=sampler)
        codes = output.audio_codes[:, 0]
        frame_done = done | (codes[:size, 0] == bins)
        trace = AudioTrace(
            codes=trace.codes.at[:, t].set(jnp.where(done[:, None], bins, codes[:size])),
            log_probs=trace.log_probs.at[:, t].set(jnp.where(done[:, None], 0, jnp.stack(sampler.log_probs, -1))),
            count=trace.count + ~frame_done,
            logits=trace.logits.at[:, t].set(output.audio_logits[:size, 0]),
        )
        return Cursor(cache, cursor.row, cursor.index), codes, frame_done, trace

    def step(carry):
        t, cursor, codes, done, trace = carry
        batch, rows = group(
            text_position(cursor.index)[:, None],
            cursor.row,
            inputs={"audio": slots(total, 1, {"codes": codes[:, None]})},
            targets={"audio": slots(total, 1)},
        )
        cursor = Cursor(cursor.cache, cursor.row + 1, cursor.index + 1)
        cursor, codes, done, trace = forward(cursor, batch, rows, trace, t, done)
        return t + 1, cursor, codes, done, trace

    dtype = weights.router_bias.dtype
    empty = AudioTrace(
        jnp.full((size, max_frames, levels), bins, jnp.int32),
        jnp.zeros((size, max_frames, levels), dtype),
        jnp.zeros(size, jnp.int32),
        jnp.zeros((size, max_frames, levels, bins + 1), dtype),
    )
    state = forward(cursor, *prompt, empty, 0, jnp.zeros(size, bool))
    final = jax.lax.while_loop(lambda c: (c[0] < max_frames) & ~c[3].all(), step, (jnp.int32(1), *state))
    return final[-1]
