"""`summary.json`: the figures of a run that others rely on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from ernie5_jax.evaluation.results import Results, write_json

SCORE_KEYS = (
    "image_caption_accuracy",
    "speech_word_accuracy",
    "image_generation_accuracy",
    "speech_generation_accuracy",
    "video_generation_accuracy",
    "video_direction_accuracy",
    "video_digit_accuracy",
)
NUMBER_KEYS = ("image_variety", "near_duplicates", "text_bits_per_byte", "order0", "zlib")
RUN_KEYS = ("checkpoint", "experts", "top_k", "active_fraction", "min_normalized_entropy", "max_violation", "seconds")

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ernie5_jax")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers; absent packages are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What the times were measured on."""
    import jax

    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": [device.device_kind for device in jax.devices()],
        "system": f"{platform.system()} {platform.machine()}",
    }


def summarize(results: Results, run: dict[str, Any]) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
      results: Of the `digits` suite. Tasks that were not run appear as null: a missing figure is not a good one.
      run: At least `RUN_KEYS`; further entries are kept.
    """
    summary: dict[str, Any] = {
        key: results.scores[key].to_json() if key in results.scores else None for key in SCORE_KEYS
    }
    summary |= {key: results.numbers.get(key) for key in NUMBER_KEYS}
    summary |= {key: run.get(key) for key in RUN_KEYS}
    summary |= {"judges": results.judges, "losses": results.losses, "versions": versions(), "machine": machine()}
    return summary | {key: value for key, value in run.items() if key not in summary}


def write_summary(path: Path, results: Results, run: dict[str, Any]) -> dict[str, Any]:
    """Writes `summarize(results, run)` atomically and returns it."""
    summary = summarize(results, run)
    write_json(path, summary)
    return summary
