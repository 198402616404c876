"""The training loop: resumable, and never waiting for the device in a step that needs nothing from it."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from ernie5_jax.config import ExperimentConfig, to_plain
from ernie5_jax.files import make_folder, write_arrays
from ernie5_jax.parallel import DATA_AXIS, make_mesh, path_name, preset
from ernie5_jax.sequence.types import Batch
from ernie5_jax.training import accounting
from ernie5_jax.training.checkpoint import Checkpoints
from ernie5_jax.training.errors import TrainingError
from ernie5_jax.training.identity import check_resumable, config_json
from ernie5_jax.training.metrics import summarize
from ernie5_jax.training.metrics_log import MetricsLog
from ernie5_jax.training.objective import MODALITIES
from ernie5_jax.training.restore import load_run
from ernie5_jax.training.run_data import RunData
from ernie5_jax.training.state import TrainState, evaluation_params, sharded_abstract_state, state_from, state_shardings
from ernie5_jax.training.step import (
    TrainProgram,
    make_eval_step,
    masks_of_step,
    split_micro_batches,
)

LAG = 2
"""Steps the host may be ahead of the results it has looked at."""


def train(config: ExperimentConfig, workdir: Path, data: RunData, *, stop_at: int | None = None) -> int:
    """Trains until `config.training.steps`, or saves and ends after step `stop_at` without changing any schedule.

    A run folder that has a checkpoint is continued from its newest one: the metrics file is cut back to it, and all
    further records but timing and process fields equal those of an uninterrupted run bit for bit (same device count,
    core count and versions).

    Returns:
      The step reached.

    Raises:
      TrainingError: Loss or gradient not finite; the batch is saved beside the metrics.
      CheckpointError: A checkpoint cannot be written or read.
      ConfigError: The folder's checkpoint was made with another value of an identity key.
    """
    if stop_at is not None and stop_at < 1:
        raise TrainingError(f"argument stop_at: found {stop_at}, allowed: >= 1")
    check_resumable(workdir, config)
    make_folder(workdir)
    facts = json.dumps(_run_facts(config, data)).encode()
    files = {**data.files, "config.json": config_json(config), "run.json": facts}
    checkpoints = Checkpoints(workdir, config.training.keep_checkpoints, files)
    try:
        return _Run(config, workdir, data, checkpoints).run(stop_at)
    finally:
        checkpoints.close()


class _Run:
    """Everything the loop holds; one object per call of `train`."""

    def __init__(self, config: ExperimentConfig, workdir: Path, data: RunData, checkpoints: Checkpoints):
        self.config, self.workdir, self.data, self.checkpoints = config, workdir, data, checkpoints
        self.mesh, self.rules = make_mesh(config.parallel), preset(config.parallel.rules)
        self.program = data.program.result() if data.program else TrainProgram(config, self.mesh, self.rules)
        self.start = checkpoints.latest or 0
        if self.start:
            abstract = sharded_abstract_state(config, self.mesh, self.rules)
            self.state = checkpoints.restore(self.start, abstract)
        elif config.training.init_from:
            self.state = start_from(config, state_shardings(config, self.mesh, self.rules))
        else:
            self.state = self.program.init()
        self.eval_fn = make_eval_step(config, self.mesh, self.rules)
        self.pending: collections.deque[_Pending] = collections.deque()
        self.clock = _Clock(config, self.mesh.shape[DATA_AXIS])

    def run(self, stop_at: int | None) -> int:
        training = self.config.training
        last = training.steps if stop_at is None else min(stop_at, training.steps)
        self.log = MetricsLog(self.workdir, self.start, training.tensorboard)
        self.bar = tqdm(
            total=training.steps, initial=self.start, unit="step", disable=not training.progress, mininterval=1
        )
        batches = self.data.batches(self.start) if self.start < last else iter(())
        step = self.start
        try:
            self.clock.start(self.state)
            for batch in batches:
                step += 1
                self._dispatch(step, batch)
                if step >= last:
                    break
            self._finish(step)
        finally:
            getattr(batches, "close", lambda: None)()
            self.bar.close()
            self.log.close()
        return step

    def _dispatch(self, step: int, batch: Batch) -> None:
        training = self.config.training
        micro = split_micro_batches(batch, training.micro_batches)
        self.state, metrics = self.program(self.state, micro, masks_of_step(self.config, step - 1))
        evaluate = bool(training.evaluate_every) and step % training.evaluate_every == 0
        logged = evaluate or step == 1 or step % training.log_every == 0 or step == training.steps
        self.pending.append(_Pending(step, metrics, batch, logged))
        self.bar.update(1)
        held_out: dict[str, Any] = {}
        if evaluate and self.data.held_out is not None:
            held_out = self._evaluate()
            self.pending[-1].extra.update({f"held_out_{name}": value for name, value in held_out.items()})
        if training.checkpoint_every and step % training.checkpoint_every == 0:
            self._save(step, held_out.get("loss"))
        else:
            self._collect(LAG)

    def _save(self, step: int, held_out_loss: float | None = None) -> None:
        # Metrics first: a run killed right after the checkpoint must not miss them.
        self._collect(0)
        self.checkpoints.save(step, self.state, held_out_loss)

    def _finish(self, step: int) -> None:
        self._collect(0)
        if step > self.start:
            self.checkpoints.save(step, self.state)
        self.checkpoints.wait()

    def _collect(self, keep: int) -> None:
        """Looks at the results of all but the last `keep` steps."""
        while len(self.pending) > keep:
            item = self.pending.popleft()
            if not bool(item.metrics["accepted"]):
                self._reject(item)
            self.clock.count(item.batch)
            if item.logged:
                metrics = jax.device_get(item.metrics)
                record = {"step": item.step, **summarize(metrics, self.config.model), **item.extra}
                record.update(self.clock.lap(record), compilations=self.program.compilations)
                self.log.write(record)
                self.bar.set_postfix(loss=f"{record['loss']:.4g}", refresh=False)

    def _reject(self, item: _Pending) -> None:
        path = self.workdir / f"rejected_batch_{item.step}.npz"
        save_batch(path, item.batch)
        loss, norm = float(item.metrics["loss"]), float(item.metrics["grad_norm"])
        raise TrainingError(
            f"step {item.step}: found loss {loss}, gradient norm {norm}, allowed: finite numbers; "
            f"the state was kept, the batch is in '{path}'"
        )

    def _evaluate(self) -> dict[str, Any]:
        """Held-out record of the averaged parameters; its loss is the unweighted sum of the modalities' means."""
        assert self.data.held_out is not None
        params, bias = evaluation_params(self.state), self.state["router_bias"]
        total: Any = None
        for batch in self.data.held_out():
            sums = {**jax.device_get(self.eval_fn(params, bias, batch)), "denominators": batch.denominators}
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        if total is None:
            return {}
        record = summarize(total, self.config.model)
        record["loss"] = sum(record.get(f"loss_{name}", 0.0) for name in MODALITIES)
        return record


@dataclasses.dataclass
class _Pending:
    """A dispatched step whose results were not looked at yet."""

    step: int
    metrics: Any
    batch: Batch
    logged: bool
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class _Clock:
    """Time, throughput and compilations between two records."""

    def __init__(self, config: ExperimentConfig, devices: int):
        self.devices, self.model, self.length = devices, config.model, config.sequence.length
        self.tokens, self.head_flops, self.steps = 0, 0.0, 0

    def start(self, state: Any) -> None:
        jax.block_until_ready(state)
        self.peak = accounting.peak_flops(self.devices)
        self.began = self.before = time.perf_counter()

    def count(self, batch: Batch) -> None:
        self.steps += 1
        self.tokens += int(batch.denominators["tokens"])
        self.head_flops += accounting.head_flops(self.model, accounting.used_slots(batch))

    def lap(self, record: dict[str, Any]) -> dict[str, Any]:
        """Process fields of a record; FLOPs of the whole lap are taken at the record's submodel."""
        now = time.perf_counter()
        seconds = max(now - self.before, 1e-9)
        per_token = accounting.flops_per_token(self.model, self.length, record["live_layers"], record["top_k"])
        fields = {
            "tokens_per_second": self.tokens / seconds,
            "step_seconds": seconds / max(self.steps, 1),
            "elapsed_seconds": now - self.began,
            "mfu": (self.tokens * per_token + self.head_flops) / seconds / self.peak,
        }
        self.before, self.tokens, self.head_flops, self.steps = now, 0, 0.0, 0
        return fields


def start_from(config: ExperimentConfig, shardings: TrainState) -> TrainState:
    """The state before the first step with the parameters of `training.init_from`, laid out as `shardings` say."""
    run = load_run(config.training.init_from)
    return jax.device_put(state_from(config, run.params, run.router_bias), shardings)


def save_batch(path: Path, batch: Batch) -> None:
    """Writes a batch as .npz, one array per field path such as `targets/text/weight`."""
    arrays: dict[str, Any] = {
        path_name(where): np.asarray(leaf) for where, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    write_arrays(path, arrays)


def _run_facts(config: ExperimentConfig, data: RunData) -> dict[str, Any]:
    """What the bitwise promise depends on, and whose codes the model reads."""
    import flax
    import orbax.checkpoint

    return {
        "devices": to_plain(config.parallel)["data"] or jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "orbax": orbax.checkpoint.__version__,
        "numpy": np.__version__,
        "tokenizers": data.tokenizers,
    }
