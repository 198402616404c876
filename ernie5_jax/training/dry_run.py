"""What a configuration would train, without training it."""

from __future__ import annotations

import jax
import numpy as np

from ernie5_jax.config import ExperimentConfig
from ernie5_jax.training.accounting import memory_estimate, parameter_table, parameter_totals
from ernie5_jax.training.state import abstract_state
from ernie5_jax.training.step import empty_batch, make_train_step, masks_of_step, split_micro_batches


def abstract_step(config: ExperimentConfig):
    """Shapes of (state, metrics) after one optimiser step; raises what tracing raises."""
    batch = split_micro_batches(empty_batch(config), config.training.micro_batches)
    return jax.eval_shape(make_train_step(config), abstract_state(config), batch, masks_of_step(config, 0))


def describe(config: ExperimentConfig) -> str:
    """Parameter table, totals, memory estimate and the result of one abstract step, as text."""
    rows = parameter_table(config.model)
    cells = [("parameter", "shape", "axes", "count")]
    cells += [(r.path, "x".join(map(str, r.shape)), ", ".join(r.axes), f"{r.count:,}") for r in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(row, widths, strict=False)), row[3]]) for row in cells]
    totals = parameter_totals(config.model)
    lines.append("")
    lines.append(f"parameters: {totals['total']:,} in all, {totals['active']:,} active per token")
    lines.append(
        f"backbone alone: {totals['backbone_total']:,} in all, {totals['backbone_active']:,} active "
        f"({totals['backbone_active'] / totals['backbone_total']:.1%})"
    )
    devices = config.parallel.data or jax.device_count()
    memory = memory_estimate(config, devices)
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in memory.items())
    lines.append(
        f"memory per device on {devices} devices ({config.parallel.rules}), MiB, estimated: {parts}, "
        f"together {sum(memory.values()) / 2**20:,.1f}"
    )
    state, metrics = abstract_step(config)
    arrays = jax.tree.leaves(state)
    size = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in arrays)
    lines.append(
        f"abstract step: {config.training.batch_rows} rows x {config.sequence.length} positions in "
        f"{config.training.micro_batches} micro-batches -> state of {len(arrays)} arrays, {size / 2**20:,.1f} MiB, "
        f"loss {metrics['loss'].dtype}{list(metrics['loss'].shape)}"
    )
    return "\n".join(lines)
