"""What a step reports: additive sums on the device, a flat record on the host."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.config import ModelConfig
from ernie5_jax.metrics import max_violation, normalized_entropy
from ernie5_jax.model import ElasticMask, ModelOutput
from ernie5_jax.sequence.types import Batch
from ernie5_jax.training.objective import MODALITIES


def diagnostic_sums(output: ModelOutput, batch: Batch, model: ModelConfig) -> dict[str, jax.Array]:
    """Hits and counts of one micro-batch, which add up over micro-batches and devices.

    Returns:
      bit_hits, bit_count [scales]; level_hits, level_count [Q]; counts, eligible_counts [L_routed, E].
    """
    sums = {"counts": output.router.counts, "eligible_counts": output.router.eligible_counts}
    if output.visual_logits is not None:
        slots = batch.targets["visual"]
        used = (slots.weight > 0).astype(jnp.float32)
        right = ((output.visual_logits > 0) == (slots.values["bits"] > 0)).mean(-1)
        scale = jax.nn.one_hot(slots.values["scale"], model.visual_scales) * used[..., None]
        sums["bit_hits"] = jnp.einsum("bn,bnk->k", right, scale)
        sums["bit_count"] = scale.sum((0, 1))
    if output.audio_logits is not None:
        slots = batch.targets["audio"]
        used = (slots.weight > 0).astype(jnp.float32)
        right = output.audio_logits.argmax(-1) == slots.values["codes"]
        sums["level_hits"] = (right * used).sum((0, 1))
        sums["level_count"] = used.sum((0, 1))
    return sums


def draft_sums(output: ModelOutput, batch: Batch) -> dict[str, jax.Array]:
    """Drafts of the MTP modules, and how many of them the main head would have accepted: its greedy choice for the same
    token, under teacher forcing.

    Returns:
      draft_hits, draft_count; empty where there is nothing to compare.
    """
    if output.mtp_logits is None or output.text_logits is None:
        return {}
    text, mtp = batch.targets["text"], batch.targets["mtp"]
    size, depth, length = mtp.index.shape[0], mtp.index.shape[1], batch.token.shape[1]
    rows = jnp.arange(size)[:, None]
    main = jnp.full((size, length + depth + 1), -1).at[rows, text.index].set(output.text_logits.argmax(-1))
    main = main.at[:, length].set(-1)  # where empty slots point
    ahead = mtp.index + jnp.arange(1, depth + 1)[:, None]  # module d and the main head d positions on see to one token
    chosen = main[rows[..., None], ahead]
    drafts = (mtp.weight > 0) & (chosen >= 0)
    hits = drafts & (output.mtp_logits.argmax(-1) == chosen)
    return {"draft_hits": hits.sum().astype(jnp.float32), "draft_count": drafts.sum().astype(jnp.float32)}


def mask_sizes(masks: ElasticMask | None, model: ModelConfig) -> dict[str, jax.Array]:
    """live_layers, live_experts (per layer) and top_k, means over micro-batches and rows."""
    if masks is None:
        routers = model.layer_routers or (model.router,)
        sizes = (model.num_layers, *(np.mean([(r.num_experts, r.top_k) for r in routers], axis=0)))
        return {name: jnp.asarray(s, jnp.float32) for name, s in zip(_MASK_FIELDS, sizes, strict=True)}
    return {
        "live_layers": masks.layers.sum(-1).mean(dtype=jnp.float32),
        "live_experts": masks.experts.sum(-1).mean(dtype=jnp.float32),
        "top_k": masks.top_k.mean(dtype=jnp.float32),
    }


_MASK_FIELDS = ("live_layers", "live_experts", "top_k")


def summarize(metrics: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Flat record of a step's (or an evaluation's) metrics, fetched to the host. Absent quantities are left out.

    Keys: loss_<modality>, loss_mtp, weight_<modality> (modalities present only), bits_per_byte, bit_accuracy (list per
    scale), code_accuracy (list per level), normalized_entropy and max_violation (lists per routed layer, None where a
    layer did not run); for steps loss, grad_norm, learning_rate, live_layers, live_experts, top_k; for evaluations
    mtp_acceptance.
    """
    record: dict[str, Any] = {}
    for name in ("loss", "grad_norm", "learning_rate"):
        if name in metrics:
            record[name] = float(metrics[name])
    record.update({name: _number(value) for name, value in metrics.get("mask", {}).items()})
    below = metrics["denominators"]
    for name in (*MODALITIES, "mtp"):
        if below[name] > 0:
            record[f"loss_{name}"] = float(metrics["sums"][name]) / float(below[name])
            if name in metrics.get("modality_weights", {}):
                record[f"weight_{name}"] = float(metrics["modality_weights"][name])
    if below["text_bytes"] > 0:
        record["bits_per_byte"] = float(metrics["sums"]["text"]) / (math.log(2) * float(below["text_bytes"]))
    for name, part in (("bit_accuracy", "bit"), ("code_accuracy", "level")):
        if f"{part}_hits" in metrics:
            with np.errstate(divide="ignore", invalid="ignore"):
                record[name] = _numbers(np.asarray(metrics[f"{part}_hits"]) / np.asarray(metrics[f"{part}_count"]))
    if metrics.get("draft_count", 0) > 0:
        record["mtp_acceptance"] = float(metrics["draft_hits"]) / float(metrics["draft_count"])
    if np.shape(metrics["counts"])[-1] > 1:
        experts = np.array(model.layer_experts)
        record["normalized_entropy"] = _numbers(normalized_entropy(metrics["counts"], experts))
        record["max_violation"] = _numbers(max_violation(metrics["counts"], experts))
    return record


def _number(value: Any) -> int | float:
    value = float(value)
    return int(value) if value.is_integer() else value


def _numbers(values: np.ndarray) -> list[float | None]:
    """JSON has no NaN."""
    return [float(v) if np.isfinite(v) else None for v in values]
