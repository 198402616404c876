"""Uni-RoPE coordinates (t, h, w) of every group; training layout and generation both read them here.

Text and audio sit at t = h = w = running index. A visual span that follows has the offset
o = next running index; frame y of an h x w grid on the H x W reference has
t = o + y, h = o + (i + .5) H / h - .5, w = o + (j + .5) W / w - .5 (centre alignment, decisions section 1).
Offsets may be numbers or arrays (numpy or jax) of any shape; positions gain that shape in front.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ernie5_jax.sequence.errors import SequenceError

Scales = tuple[tuple[int, int], ...]
_ONES = np.ones(3, np.float32)
_TIME = np.asarray([1, 0, 0], np.float32)


def aligned_centres(cells: int, reference: int) -> np.ndarray:
    """Coordinate of each of `cells` cells on an axis of `reference` cells, float32 [cells] (components 1.3)."""
    return ((np.arange(cells) + 0.5) * (reference / cells) - 0.5).astype(np.float32)


def grid_coordinates(grid: tuple[int, int], reference: tuple[int, int]) -> np.ndarray:
    """(0, h, w) of every cell of `grid` on `reference`, row-major, float32 [h * w, 3]."""
    h, w = np.meshgrid(aligned_centres(grid[0], reference[0]), aligned_centres(grid[1], reference[1]), indexing="ij")
    return np.stack([np.zeros(h.size, np.float32), h.ravel(), w.ravel()], axis=-1)


def check_scales(scales: Scales) -> None:
    """Raises a `SequenceError` unless the pyramid starts with one cell: BOI and SS are single tokens."""
    if not scales or tuple(scales[0]) != (1, 1):
        raise SequenceError(f"scales: found first scale {scales[:1]}, allowed: (1, 1), which BOI predicts")


@functools.lru_cache(maxsize=64)
def frame_table(scales: Scales) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Input positions of one generated frame relative to its offset.

    The inputs are the blocks of scales 2 ... K, then SS ("sum of all scales" on the first grid), which already
    belongs to the next frame and therefore sits at t = 1.

    Args:
      scales: (h_k, w_k) coarse to fine; the last is the H x W reference.

    Returns:
      float32 [P, 3], P = sum of h_k * w_k, and the slice of every scale: index k for scale k >= 1 (from 0);
      index 0 is the slice of SS, the input of the next frame's first scale.
    """
    check_scales(scales)
    reference = scales[-1]
    blocks = [grid_coordinates(grid, reference) for grid in scales[1:]]
    summary = grid_coordinates(scales[0], reference) + _TIME
    ends = np.cumsum([0] + [len(block) for block in blocks]).tolist()
    slices = [slice(ends[-1], ends[-1] + len(summary))]
    slices += [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    table = np.concatenate([*blocks, summary])
    table.setflags(write=False)
    return table, tuple(slices)


@functools.lru_cache(maxsize=256)
def visual_table(scales: Scales, frames: int) -> np.ndarray:
    """Input positions of a whole generated span relative to its offset, float32 [frames * P, 3]."""
    table, _ = frame_table(scales)
    steps = np.arange(frames, dtype=np.float32)[:, None, None] * _TIME
    positions = (table + steps).reshape(-1, 3)
    positions.setflags(write=False)
    return positions


@functools.lru_cache(maxsize=256)
def understood_table(frames: int, grid: tuple[int, int]) -> np.ndarray:
    """Positions of an understood span relative to its offset, float32 [frames * h * w, 3], integer coordinates."""
    steps = np.arange(frames, dtype=np.float32)[:, None, None] * _TIME
    positions = (grid_coordinates(grid, grid) + steps).reshape(-1, 3)
    positions.setflags(write=False)
    return positions


def text_position(index: Any) -> Any:
    """Position of a text token or audio frame with running index `index` [...]: [..., 3]."""
    return _float32(index)[..., None] * _ONES


def _float32(index: Any) -> Any:
    return np.asarray(index, np.float32) if isinstance(index, int | float | list | np.ndarray | np.generic) else index


def _shifted(offset: Any, frame: Any, table: np.ndarray) -> Any:
    # Same order of additions as in `visual_table`, so that generation and training round alike.
    return (table + frame * _TIME) + _float32(offset)[..., None, None]


def scale_position(offset: Any, frame: Any, scale: int, scales: Scales) -> Any:
    """Positions of the input block of `scale` (from 0; >= 1) of `frame`: [..., h_k * w_k, 3].

    Args:
      offset: Running index after BOI / BOV, number or array [...].
      frame: Latent frame from 0, number or scalar array.
      scale: Which scale; the first one has no block of its own (its input is BOI or the SS before it).
      scales: The pyramid.
    """
    if not 1 <= scale < len(scales):
        raise SequenceError(f"scale: found {scale}, allowed: 1 ... {len(scales) - 1} (BOI or SS is the first's input)")
    table, slices = frame_table(scales)
    return _shifted(offset, frame, table[slices[scale]])


def summary_position(offset: Any, frame: Any, scales: Scales) -> Any:
    """Position of SS of `frame`, at the same time the first-scale input of frame + 1: [..., 1, 3]."""
    table, slices = frame_table(scales)
    return _shifted(offset, frame, table[slices[0]])


def index_after_visual(offset: Any, frames: int, scales: Scales) -> Any:
    """Running index after a generated span: 1 + floor(largest coordinate used), SS included."""
    height, width = scales[-1]
    return offset + 1 + max(frames, height - 1, width - 1)


def index_after_understood(offset: Any, frames: int, grid: tuple[int, int]) -> Any:
    """Running index after an understood image or video of `frames` merged grids."""
    return offset + 1 + max(frames - 1, grid[0] - 1, grid[1] - 1)
