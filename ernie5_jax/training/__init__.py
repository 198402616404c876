"""Training: state, objective, step, loop, checkpoints, and the preparation of what a run reads.

Names are imported on first use, so that a reader of checkpoints does not load the data pipeline.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ernie5_jax.training.accounting import memory_estimate, parameter_table, parameter_totals
    from ernie5_jax.training.checkpoint import Checkpoints
    from ernie5_jax.training.errors import CheckpointError, TrainingError
    from ernie5_jax.training.loop import train
    from ernie5_jax.training.metrics_log import PROCESS_FIELDS, read_metrics
    from ernie5_jax.training.paths import find_checkpoint
    from ernie5_jax.training.preparation import STAGES, prepare_run
    from ernie5_jax.training.restore import LoadedRun, load_config, load_run
    from ernie5_jax.training.run_data import RunData
    from ernie5_jax.training.schedule import learning_rate
    from ernie5_jax.training.state import abstract_state, evaluation_params, init_state, make_state
    from ernie5_jax.training.step import TrainProgram, make_train_step, split_micro_batches

_HOMES = {
    "STAGES": "preparation",
    "Checkpoints": "checkpoint",
    "CheckpointError": "errors",
    "LoadedRun": "restore",
    "PROCESS_FIELDS": "metrics_log",
    "RunData": "run_data",
    "TrainProgram": "step",
    "TrainingError": "errors",
    "abstract_state": "state",
    "evaluation_params": "state",
    "find_checkpoint": "paths",
    "init_state": "state",
    "learning_rate": "schedule",
    "load_config": "restore",
    "load_run": "restore",
    "make_state": "state",
    "make_train_step": "step",
    "memory_estimate": "accounting",
    "parameter_table": "accounting",
    "parameter_totals": "accounting",
    "prepare_run": "preparation",
    "read_metrics": "metrics_log",
    "split_micro_batches": "step",
    "train": "loop",
}

__all__ = [
    "STAGES",
    "CheckpointError",
    "Checkpoints",
    "LoadedRun",
    "PROCESS_FIELDS",
    "RunData",
    "TrainProgram",
    "TrainingError",
    "abstract_state",
    "evaluation_params",
    "find_checkpoint",
    "init_state",
    "learning_rate",
    "load_config",
    "load_run",
    "make_state",
    "make_train_step",
    "memory_estimate",
    "parameter_table",
    "parameter_totals",
    "prepare_run",
    "read_metrics",
    "split_micro_batches",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
