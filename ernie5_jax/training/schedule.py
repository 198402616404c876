"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ernie5_jax.config import OptimizerConfig


def learning_rate(step: jax.Array | int, config: OptimizerConfig, steps: int) -> jax.Array:
    """Rate of optimiser step number `step` (from 0), float32.

    Both schedules warm up linearly, peak * (step + 1) / warmup_steps. "wsd" then stays at the peak and falls linearly
    over the last `decay_fraction * steps` steps, as far as they are no warm-up; "cosine" falls along half a cosine. The
    last step has the end rate.
    """
    peak, end = config.learning_rate, config.end_learning_rate
    warmup = min(config.warmup_steps, steps)
    step = jnp.asarray(step, jnp.float32)
    warm = peak * (step + 1) / max(warmup, 1)
    if config.schedule == "wsd":
        decay = min(config.decay_fraction * steps, steps - warmup)
        if decay == 0:
            return jnp.minimum(warm, peak) if warmup else jnp.full_like(step, peak)
        progress = jnp.clip((step + 1 - (steps - decay)) / decay, 0, 1)
        falling = peak + (end - peak) * progress
    else:
        progress = jnp.clip((step + 1 - warmup) / max(steps - warmup, 1), 0, 1)
        falling = end + (peak - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return jnp.where(step < warmup, warm, falling)
