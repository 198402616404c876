"""Reading a finished or running run for evaluation and generation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from ernie5_jax.config import ExperimentConfig, from_mapping
from ernie5_jax.training.checkpoint import restore_state
from ernie5_jax.training.errors import CheckpointError
from ernie5_jax.training.paths import find_checkpoint
from ernie5_jax.training.state import abstract_state


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """What a checkpoint holds, without the optimiser.

    Attributes:
      config: The resolved configuration.
      params: Averaged parameters where the run keeps them, else the last ones.
      router_bias: float32 [L_routed, E].
      step: Optimiser steps taken.
      tokenizers: Folder with `text/`, `visual/`, `audio/`.
    """

    config: ExperimentConfig
    params: Any
    router_bias: jax.Array
    step: int
    tokenizers: Path


def load_config(path: str | Path) -> ExperimentConfig:
    """Resolved configuration of the checkpoint that `path` means (see `find_checkpoint`)."""
    file = find_checkpoint(path) / "files" / "config.json"
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint '{file}': cannot be read ({error}), allowed: an intact config.json"
        ) from None
    return from_mapping(ExperimentConfig, saved)


def load_run(path: str | Path) -> LoadedRun:
    """Loads parameters and configuration onto the first device.

    Args:
      path: Run folder (its newest checkpoint), `checkpoints/`, or one step's folder.

    Raises:
      CheckpointError: Nothing there, or not readable.
    """
    folder = find_checkpoint(path)
    config = load_config(folder)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = abstract_state(config)
    wanted = ("step", "router_bias", "ema_params" if config.optimizer.ema_decay else "params")
    abstract = {
        name: jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), tree)
        if name in wanted
        else jax.tree.map(lambda _: ..., tree)
        for name, tree in shapes.items()
    }
    state = restore_state(folder, abstract)
    return LoadedRun(
        config, state[wanted[2]], state["router_bias"], int(state["step"]), folder / "files" / "tokenizers"
    )
