"""Parameters, floating-point operations and memory of a run, counted from shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.config import ExperimentConfig, ModelConfig
from ernie5_jax.model import ElasticMask, init_params, logical_axes
from ernie5_jax.parallel import DATA_AXIS, path_name, preset

# Dense bfloat16 peak of one chip, FLOP/s (vendors' data sheets).
_PEAK = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """One array: its path, shape, logical axes, number of elements, and how many of them one token uses."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    count: int
    active: int


@functools.lru_cache(maxsize=8)
def parameter_table(model: ModelConfig) -> tuple[ParameterRow, ...]:
    """All parameters, sorted by path; of a layer's experts, top_k / num_experts are active."""
    shapes, _ = jax.eval_shape(lambda: init_params(model))
    axes = jax.tree.leaves(logical_axes(model), is_leaf=lambda n: isinstance(n, tuple))
    routers = {stack.name: stack.router for stack in model.stacks}
    rows = []
    for (path, leaf), names in zip(jax.tree_util.tree_leaves_with_path(shapes), axes, strict=True):
        name, count = path_name(path), math.prod(leaf.shape)
        active = count
        if "experts" in names:
            router = routers[name.split("/")[1]]
            assert router is not None
            active = count * router.top_k // router.num_experts
        rows.append(ParameterRow(name, leaf.shape, names, count, active))
    return tuple(sorted(rows, key=lambda row: row.path))


def parameter_totals(model: ModelConfig) -> dict[str, int]:
    """total, active; and the same for the backbone alone (no embeddings, heads, MTP): decisions section 3."""
    rows = parameter_table(model)
    backbone = [row for row in rows if row.path.startswith("backbone/")]
    return {
        "total": sum(row.count for row in rows),
        "active": sum(row.active for row in rows),
        "backbone_total": sum(row.count for row in backbone),
        "backbone_active": sum(row.active for row in backbone),
    }


def submodel_totals(model: ModelConfig, mask: ElasticMask) -> dict[str, int]:
    """`parameter_totals` of the submodel behind a mask (R = 1), without building it."""
    live, top_k = np.asarray(mask.layers)[0], np.asarray(mask.top_k)[0]
    width = np.asarray(mask.experts)[0].sum(-1)
    first, start = {}, 0
    for stack in model.stacks:
        first[stack.name] = start, start + stack.count
        start += stack.count
    totals = {"total": 0, "active": 0, "backbone_total": 0, "backbone_active": 0}
    for row in parameter_table(model):
        count = active = row.count
        backbone = row.path.startswith("backbone/")
        if backbone:
            layers = slice(*first[row.path.split("/")[1]])
            kept = used = live[layers].astype(np.int64)
            each = row.count // len(kept)
            for axis in ("experts", "router_experts"):
                if axis in row.axes:
                    each //= row.shape[row.axes.index(axis)]
                    kept = kept * width[layers]
                    used = used * top_k[layers] if axis == "experts" else kept
            count, active = int(each * kept.sum()), int(each * used.sum())
        for name, value in (("total", count), ("active", active)):
            totals[name] += value
            totals[f"backbone_{name}"] += value if backbone else 0
    return totals


def flops_per_token(model: ModelConfig, length: int, layers: float, top_k: float) -> float:
    """Forward and backward model FLOPs of one position in the backbone: 6 per active weight, and attention.

    Attention counts the whole row, 12 * heads * head_dim * length per layer (the usual convention).

    Args:
      model: Sizes.
      length: Positions of a row.
      layers: Layers that run (mean over micro-batches).
      top_k: Experts per token (mean).
    """
    d, heads = model.hidden_size, model.num_heads * model.head_dim
    attention = 2 * d * heads + 2 * d * model.num_kv_heads * model.head_dim
    sparse = d * model.router.num_experts + 3 * d * (model.expert_width * top_k + model.shared_expert_width)
    dense = 3 * d * model.dense_width
    share = model.num_dense_layers / model.num_layers
    weights = layers * (attention + share * dense + (1 - share) * sparse)
    weights += model.mtp_depth * (attention + dense + 2 * d * d)
    return 6 * weights + 12 * (layers + model.mtp_depth) * heads * length


def head_flops(model: ModelConfig, slots: dict[str, int]) -> float:
    """Forward and backward FLOPs of the heads on the used target slots (text, visual, audio, mtp)."""
    d = model.hidden_size
    weights = {
        "text": d * model.vocab_size,
        "mtp": d * model.vocab_size,
        "visual": d * model.visual_bits,
        "audio": d * model.audio_levels * (model.audio_bins + 1),
    }
    return 6.0 * sum(weights[name] * count for name, count in slots.items())


def peak_flops(devices: int) -> float:
    """FLOP/s that `devices` devices reach at best: data sheet, or on CPUs (which share the cores) a measured matmul."""
    kind = jax.devices()[0].device_kind
    for name in sorted(_PEAK, key=len, reverse=True):
        if kind.startswith(name):
            return _PEAK[name] * devices
    size = 1024
    x = jnp.ones((size, size), jnp.float32)
    matmul = jax.jit(jnp.matmul)
    matmul(x, x).block_until_ready()
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        matmul(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def memory_estimate(config: ExperimentConfig, devices: int) -> dict[str, int]:
    """Bytes per device: state, gradients, and a rough figure for activations of one micro-batch.

    Activations count per layer and position what the backward pass keeps (about 14 D-wide and the experts' values), or
    one D-wide vector with remat, and the logits.
    """
    rules, model = preset(config.parallel.rules), config.model
    copies = 3 + (config.optimizer.ema_decay > 0)
    params = 0
    for row in parameter_table(model):
        split = any(axis == DATA_AXIS for axis in rules.spec(row.axes))
        params += row.count // (devices if split else 1)
    width = 2 if config.training.precision == "bfloat16" else 4
    rows = -(-config.training.batch_rows // (config.training.micro_batches * devices))
    positions, sequence = rows * config.sequence.length, config.sequence
    per_layer = model.hidden_size * (1 if model.remat else 14) + (
        0 if model.remat else 3 * (model.expert_width * model.router.top_k + model.shared_expert_width)
    )
    scores = 0 if model.remat else rows * model.num_heads * sequence.length**2 * model.num_layers
    logits = rows * sequence.capacity("text_targets") * model.vocab_size * (1 + model.mtp_depth)
    codes = rows * sequence.capacity("audio_targets") * model.audio_levels * (model.audio_bins + 1)
    return {
        "state": 4 * params * copies,
        "gradients": 4 * params,
        "activations": width * (positions * per_layer * model.num_layers + scores) + 4 * (logits + codes),
    }


def used_slots(batch: Any) -> dict[str, int]:
    """Target slots with weight, by head, of a numpy batch."""
    counts = {}
    for name, slots in batch.targets.items():
        used = slots.weight > 0
        counts[name] = int(used.any(-1).sum() if name == "audio" else used.sum())
    return counts
