"""A submodel of a checkpoint as a checkpoint of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ernie5_jax.config import ElasticSamplingConfig, ExperimentConfig
from ernie5_jax.elastic import extract_submodel
from ernie5_jax.model import ElasticMask
from ernie5_jax.training.checkpoint import Checkpoints
from ernie5_jax.training.errors import CheckpointError
from ernie5_jax.training.identity import config_json
from ernie5_jax.training.paths import FOLDER, find_checkpoint
from ernie5_jax.training.restore import load_run
from ernie5_jax.training.run_data import files_below
from ernie5_jax.training.state import state_from


def save_submodel(source: str | Path, mask: ElasticMask, workdir: str | Path) -> ExperimentConfig:
    """Extracts the submodel behind `mask` from a checkpoint into a new run folder.

    The result is an ordinary self-contained checkpoint of a static model at the step of its source: it generates, is
    evaluated, and another run may start from it (`training.init_from`). Moments of the optimiser start afresh.

    Args:
      source: Run folder or checkpoint; its averaged parameters are taken, where it keeps them.
      mask: One submodel, R = 1.
      workdir: Folder without checkpoints; made if missing.

    Returns:
      The configuration of the new checkpoint.

    Raises:
      CheckpointError: The source cannot be read, or `workdir` has checkpoints already.
    """
    folder, workdir = find_checkpoint(source), Path(workdir)
    check_unused(workdir)
    run = load_run(folder)
    params, bias = jax.tree.map(np.asarray, (run.params, run.router_bias))
    model, params, bias = extract_submodel(run.config.model, params, bias, jax.tree.map(np.asarray, mask))
    training = dataclasses.replace(run.config.training, init_from="")
    config = dataclasses.replace(run.config, model=model, elastic=ElasticSamplingConfig(), training=training)
    facts = json.loads((folder / "files" / "run.json").read_text())
    facts["extracted_from"] = {"step": run.step, "submodel": describe_mask(mask)}
    files = {
        **files_below(folder / "files" / "tokenizers", "tokenizers"),
        "config.json": config_json(config),
        "run.json": json.dumps(facts).encode(),
    }
    checkpoints = Checkpoints(workdir, 1, files)
    try:
        checkpoints.save(run.step, state_from(config, params, bias, run.step))
        checkpoints.wait()
    finally:
        checkpoints.close()
    return config


def check_unused(workdir: str | Path) -> None:
    """Raises a `CheckpointError` if the folder holds checkpoints."""
    checkpoints = Path(workdir) / FOLDER
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise CheckpointError(f"folder '{workdir}': found checkpoints in it, allowed: a folder without")


def describe_mask(mask: ElasticMask) -> dict[str, Any]:
    """What a mask (R = 1) keeps, JSON-able: layer numbers, and per kept layer its expert numbers and top-k."""
    live = np.flatnonzero(np.asarray(mask.layers)[0])
    experts, top_k = np.asarray(mask.experts)[0], np.asarray(mask.top_k)[0]
    return {
        "layers": live.tolist(),
        "experts": [np.flatnonzero(experts[layer]).tolist() for layer in live],
        "top_k": top_k[live].tolist(),
    }
