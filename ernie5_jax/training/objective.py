"""The loss contract (decisions section 6): sums from the forward, denominators of the whole global batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ernie5_jax.config import LossConfig, ModelConfig
from ernie5_jax.kernels.cross_entropy import cross_entropy
from ernie5_jax.model import ElasticMask, ModelOutput
from ernie5_jax.sequence.types import Batch

MODALITIES = ("text", "image", "video", "audio")
Sums = dict[str, Any]


def bit_cross_entropy(logits: jax.Array, bits: jax.Array) -> jax.Array:
    """Binary cross-entropy, mean over the C bits of a token: [..., C] -> [...]."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return (jax.nn.softplus(logits) - bits.astype(logits.dtype) * logits).mean(-1)


def loss_sums(output: ModelOutput, batch: Batch) -> dict[str, jax.Array]:
    """Weighted sums of the losses of one micro-batch: text, image, video, audio, mtp, z. Absent kinds give 0."""
    zero = jnp.zeros((), jnp.float32)
    sums: dict[str, jax.Array] = dict.fromkeys((*MODALITIES, "mtp"), zero)
    targets = batch.targets
    for name, readout in (("text", output.text), ("mtp", output.mtp)):
        if readout is not None:
            slots = targets[name]
            sums[name] = readout.cross_entropy(slots.values["token"], slots.weight)
    if output.visual_logits is not None:
        slots = targets["visual"]
        loss = bit_cross_entropy(output.visual_logits, slots.values["bits"])
        is_video = slots.values["is_video"]
        sums["image"] = _weighted(jnp.where(is_video, 0, slots.weight), loss)
        sums["video"] = _weighted(jnp.where(is_video, slots.weight, 0), loss)
    if output.audio_logits is not None:
        slots = targets["audio"]
        sums["audio"] = _weighted(slots.weight, cross_entropy(output.audio_logits, slots.values["codes"]))
    return {**sums, "z": output.router.z_loss_sum.sum()}


def _weighted(weight: jax.Array, loss: jax.Array) -> jax.Array:
    # Empty slots hold arbitrary logits: their loss must not reach the sum even as inf * 0.
    return jnp.where(weight > 0, weight * loss, 0).sum()


def routed_tokens(batch: Batch, mask: ElasticMask | None, model: ModelConfig) -> jax.Array:
    """Denominator of the z-loss: non-PAD tokens x routed layers that run, known before the forward.

    Batch and mask may have a leading axis of micro-batches; the result is the sum over all of them.
    """
    tokens = (batch.segment > 0).sum(-1).astype(jnp.float32)
    if mask is None:
        return tokens.sum() * (model.num_layers - model.num_dense_layers)
    return (tokens * mask.layers[..., model.num_dense_layers :].sum(-1)).sum()


def modality_weights(ema: dict[str, jax.Array], config: LossConfig) -> dict[str, jax.Array]:
    """w_m, read before the step.

    "posterior": w_m = clip(EMA_text / EMA_m, weight_min, weight_max) brings the losses of all modalities to the same
    interval (ERNIE 5.0 section 3.2 names the idea, the formula is ours). An EMA of 0 was never observed: weight 1.
    """
    weights = {}
    for name in MODALITIES:
        weight = jnp.asarray(config.fixed_weights.get(name, 1.0), jnp.float32)
        if config.modality_weighting == "posterior":
            seen = (ema[name] > 0) & (ema["text"] > 0)
            ratio = ema["text"] / jnp.where(ema[name] > 0, ema[name], 1)
            weight = weight * jnp.where(seen, jnp.clip(ratio, config.weight_min, config.weight_max), 1)
        weights[name] = weight
    return weights


def update_ema(ema: dict[str, jax.Array], losses: dict[str, jax.Array], present: dict[str, jax.Array], decay: float):
    """Running losses after a step; a modality absent from the global batch keeps its value, the first one sets it."""
    new = {}
    for name in MODALITIES:
        moved = jnp.where(ema[name] > 0, decay * ema[name] + (1 - decay) * losses[name], losses[name])
        new[name] = jnp.where(present[name], moved, ema[name]).astype(jnp.float32)
    return new


def coefficients(
    weights: dict[str, jax.Array], denominators: dict[str, jax.Array], z_tokens: jax.Array, loss: LossConfig, z: float
) -> dict[str, jax.Array]:
    """c with L = sum_i c_i S_i: weight / denominator of every sum, 0 where the denominator is 0.

    Args:
      weights: w_m of the modalities.
      denominators: Those of the Batch.
      z_tokens: Denominator of the z-loss.
      loss: Weight of multi-token prediction.
      z: Weight of the z-loss.
    """
    scale = {**weights, "mtp": jnp.asarray(loss.mtp_weight, jnp.float32), "z": jnp.asarray(z, jnp.float32)}
    below = {**{name: denominators[name] for name in (*MODALITIES, "mtp")}, "z": z_tokens}
    return {name: ratio(scale[name], below[name]) for name in scale}


def ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """above / below, 0 where below is 0."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1), 0)
