"""Which configuration a run may be resumed with (decisions section 6)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ernie5_jax.config import IDENTITY_KEYS, ConfigError, ExperimentConfig, from_mapping, to_plain
from ernie5_jax.data import load_tokenizers
from ernie5_jax.training.errors import CheckpointError
from ernie5_jax.training.paths import FOLDER, find_checkpoint
from ernie5_jax.training.restore import load_config

RUN_KEYS = ("model.remat",)
"""Keys inside an identity key that change no value of a run."""


def config_json(config: ExperimentConfig) -> bytes:
    """The resolved configuration as a checkpoint keeps it."""
    return json.dumps(to_plain(config), indent=1, sort_keys=True).encode()


def check_identity(saved: dict[str, Any], config: ExperimentConfig) -> None:
    """Compares the configuration of a checkpoint with that of the run which wants to continue it.

    Args:
      saved: Parsed `config.json`.
      config: The new one.

    Raises:
      ConfigError: Names the first identity key that differs.
    """
    now = json.loads(config_json(config))
    for key in IDENTITY_KEYS:
        for path, old, new in _differences(_get(saved, key), _get(now, key), key):
            if path not in RUN_KEYS:
                raise ConfigError(
                    f"config key '{path}': found {new!r}, allowed: {old!r} as in the checkpoint (or another workdir)"
                )


def check_resumable(workdir: Path, config: ExperimentConfig) -> None:
    """`check_identity` and steps against a run folder's newest checkpoint; nothing to check where there is none."""
    folder = Path(workdir) / FOLDER
    if not folder.is_dir() or not any(f.name.isdecimal() for f in folder.iterdir()):
        return
    newest = find_checkpoint(workdir)
    if int(newest.name) > config.training.steps:
        raise ConfigError(
            f"config key 'training.steps': found {config.training.steps}, allowed: at least {newest.name}, "
            f"the steps that '{workdir}' has behind it, or another --workdir"
        )
    file = newest / "files" / "config.json"
    try:
        # Keys that are younger than the checkpoint had what is their default now.
        saved = json.loads(config_json(from_mapping(ExperimentConfig, json.loads(file.read_text()))))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint '{file}': cannot be read ({error}), allowed: an intact config.json"
        ) from None
    check_identity(saved, config)


def check_start(config: ExperimentConfig) -> None:
    """Checks that a run can start from the checkpoint `training.init_from`: same model, same tokenizers.

    Raises:
      ConfigError: Names the first key that differs.
      CheckpointError: There is no readable checkpoint.
    """
    saved, now = (json.loads(config_json(c)) for c in (load_config(config.training.init_from), config))
    for room in ("model", "text", "visual", "audio"):
        for path, old, new in _differences(saved[room], now[room], room):
            if path not in (*RUN_KEYS, "model.elastic"):
                where = f"as in training.init_from '{config.training.init_from}'"
                raise ConfigError(f"config key '{path}': found {new!r}, allowed: {old!r} {where}")


def check_given_tokenizers(config: ExperimentConfig) -> None:
    """Checks that the tokenizers in `data.tokenizers` are such as the configuration would train.

    Raises:
      ConfigError: Names the first key that differs.
      UserError: A tokenizer cannot be read; names its folder.
    """
    folder = config.data.tokenizers
    tokenizers = load_tokenizers(folder)
    pairs = {"text": ({"vocab_size": tokenizers.text.vocab_size}, {"vocab_size": config.text.vocab_size})}
    for room in ("visual", "audio"):
        pairs[room] = to_plain(getattr(tokenizers, room).config), to_plain(getattr(config, room))
    for room, (saved, now) in pairs.items():
        for path, old, new in _differences(saved, now, room):
            if not path.startswith(f"{room}.training"):  # how it was made, not what it is
                where = f"as in data.tokenizers '{folder}'"
                raise ConfigError(f"config key '{path}': found {new!r}, allowed: {old!r} {where}")


def check_tokenizers(checkpoint: Path, fingerprints: Mapping[str, str]) -> None:
    """Raises a `CheckpointError` unless the step folder `checkpoint` was trained on codes of these tokenizers."""
    file = checkpoint / "files" / "run.json"
    try:
        trained: dict[str, str] = json.loads(file.read_text()).get("tokenizers", {})
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint '{file}': cannot be read ({error}), allowed: an intact run.json") from None
    for name, found in fingerprints.items():
        if found != trained.get(name, found):
            raise CheckpointError(
                f"checkpoint '{checkpoint}': found another {name} tokenizer ({found}), "
                f"allowed: the one it was trained with ({trained[name]})"
            )


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _differences(old: Any, new: Any, path: str):
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}")
    elif old != new:
        yield path, old, new
