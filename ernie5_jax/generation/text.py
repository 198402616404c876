"""Text, one token per forward, until EOS."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ernie5_jax.generation.sampling import SamplingParams, position_keys, sample
from ernie5_jax.generation.stepping import Apply, Cursor, Weights, advance, group, slots
from ernie5_jax.sequence import text_position
from ernie5_jax.text.special_tokens import EOS, NUM_SPECIAL_TOKENS


class TextTrace(NamedTuple):
    """Generated tokens.

    Attributes:
      token: int32 [B, n], EOS and after it PAD-like repeats of EOS.
      log_probs: float32 [B, n] under the model's own distribution, the softmax over all tokens; 0 after EOS.
      count: int32 [B], tokens before EOS.
      logits: [B, n, V] the distribution each token was drawn from.
    """

    token: jax.Array
    log_probs: jax.Array
    count: jax.Array
    logits: jax.Array


def answer_logits(logits: jax.Array) -> jax.Array:
    """Logits [B, V] of a text answer: ordinary tokens and EOS; other special tokens are structure."""
    allowed = jnp.arange(logits.shape[-1]) >= NUM_SPECIAL_TOKENS
    return jnp.where(allowed.at[EOS].set(True), logits, -jnp.inf)


def generate_text(
    apply: Apply,
    weights: Weights,
    cursor: Cursor,
    logits: jax.Array,
    keys: jax.Array,
    params: SamplingParams,
    *,
    max_tokens: int,
) -> TextTrace:
    """Continues every sequence with text.

    Args:
      cursor: After the prompt.
      logits: [B, V] at the prompt's last position.
      keys: [B] random keys of the rows.
      max_tokens: Most tokens of an answer, EOS included.
    """
    size, vocab = logits.shape

    def step(carry):
        t, cursor, logits, done, trace = carry
        allowed = answer_logits(logits)
        chosen = sample(position_keys(keys, cursor.row), allowed, params)
        chosen = jnp.where(done, EOS, chosen)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[:, None], axis=-1)[:, 0]
        trace = TextTrace(
            token=trace.token.at[:, t].set(chosen),
            log_probs=trace.log_probs.at[:, t].set(jnp.where(done, 0, log_prob)),
            count=trace.count + (~done & (chosen != EOS)),
            logits=trace.logits.at[:, t].set(allowed),
        )
        done |= chosen == EOS
        batch, rows = group(
            text_position(cursor.index)[:, None], cursor.row, token=chosen[:, None], targets={"text": slots(size, 1)}
        )
        output, cache = advance(apply, weights, cursor, batch, rows)
        cursor = Cursor(cache, cursor.row + 1, cursor.index + 1)
        return t + 1, cursor, output.text_logits[:, 0], done, trace

    empty = TextTrace(
        jnp.full((size, max_tokens), EOS, jnp.int32),
        jnp.zeros((size, max_tokens), logits.dtype),
        jnp.zeros(size, jnp.int32),
        jnp.zeros((size, max_tokens, vocab), logits.dtype),
    )
    start = (jnp.int32(0), cursor, logits, jnp.zeros(size, bool), empty)
    return jax.lax.while_loop(lambda c: (c[0] < max_tokens) & ~c[3].all(), step, start)[-1]
