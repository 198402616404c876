"""Planning and packing: documents -> rows of fixed length -> Batch (decisions sections 2 and 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ernie5_jax.config import ModelConfig, SequenceConfig
from ernie5_jax.sequence.errors import SequenceError
from ernie5_jax.sequence.row import Row
from ernie5_jax.sequence.sizes import Sizes, check_fits, row_capacity
from ernie5_jax.sequence.types import Batch, Slots
from ernie5_jax.text.special_tokens import PAD

DENOMINATORS = ("text", "image", "video", "audio", "mtp", "tokens", "text_bytes")


def plan_rows(
    sizes: np.ndarray, config: SequenceConfig, *, seed: Sequence[int] | int | None = None, open_rows: int = 32
) -> list[np.ndarray]:
    """Packs documents into rows greedily: each goes into the first open row with room; the oldest open row closes.

    A pure function of its arguments, so every host and every resumed run sees the same rows.

    Args:
      sizes: int [documents, 7], see `Sizes`.
      config: Row length and slot capacities.
      seed: Order of the documents, a permutation drawn from it (e.g. (seed, epoch)); None keeps their order.
      open_rows: Rows that are kept open at a time.

    Returns:
      Per row, in the order in which rows were opened, the document numbers int64 [n >= 1].

    Raises:
      SequenceError: A document does not fit an empty row; names it.
    """
    sizes = np.asarray(sizes, np.int64).reshape(-1, len(Sizes._fields))
    capacity = row_capacity(config)
    too_large = np.flatnonzero((sizes > np.asarray(capacity)).any(axis=1))
    if len(too_large):
        number = int(too_large[0])
        check_fits(Sizes(*sizes[number].tolist()), capacity, f"document {number} ({len(too_large)} do not fit)")
    order = np.arange(len(sizes)) if seed is None else np.random.default_rng(seed).permutation(len(sizes))
    empty = np.asarray([capacity], np.int64)
    rows: list[list[int]] = []
    room = np.zeros((0, len(capacity)), np.int64)  # of the open rows, which are the last len(room) of `rows`
    for number in order.tolist():
        fits = (room >= sizes[number]).all(axis=1)
        first = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[first]:
            room = np.concatenate([room[1:] if len(room) >= open_rows else room, empty])
            rows.append([])
            first = len(room) - 1
        room[first] -= sizes[number]
        rows[len(rows) - len(room) + first].append(number)
    return [np.asarray(row, np.int64) for row in rows]


def _empty_slots(config: SequenceConfig, model: ModelConfig, feature_group: int) -> tuple[dict, dict]:
    """Empty input and target slots of one row; an empty slot points one past the end."""

    def slots(name: str, level: tuple[int, ...] = (), **values: tuple[tuple[int, ...], type]) -> Slots:
        count = config.capacity(name)
        arrays = {key: np.zeros((count, *shape), dtype) for key, (shape, dtype) in values.items()}
        return Slots(np.full(count, config.length, np.int32), arrays, np.zeros((count, *level), np.float32))

    bits, levels = (model.visual_bits,), (model.audio_levels,)
    inputs = {
        "visual": slots("visual_inputs", features=(bits, np.float32), scale=((), np.int32)),
        "understand": slots("understand_inputs", features=((feature_group, model.vision_feature_dim), np.float32)),
        "audio": slots("audio_inputs", codes=(levels, np.int32)),
    }
    targets = {
        "text": slots("text_targets", token=((), np.int32)),
        "visual": slots("visual_targets", bits=(bits, np.int8), scale=((), np.int32), is_video=((), np.bool_)),
        "audio": slots("audio_targets", levels, codes=(levels, np.int32)),
    }
    return inputs, targets


def _append(slots: Slots, used: int, part: Slots, offset: int, name: str) -> int:
    """Copies `part` behind the first `used` slots, its positions moved by `offset`; returns the new count."""
    end = used + len(part.index)
    if end > len(slots.index):
        raise SequenceError(f"row: needs {end} {name}, allowed: config key 'sequence.{name}' = {len(slots.index)}")
    for key, value in part.values.items():
        room = slots.values[key]
        if value.shape[1:] != room.shape[1:]:
            found, allowed = list(value.shape[1:]), list(room.shape[1:])
            raise SequenceError(f"{name} {key}: found {found} per position, allowed: {allowed} of the model config")
        room[used:end] = value
    slots.index[used:end] = part.index + offset
    slots.weight[used:end] = part.weight
    return end


def pack(rows: Sequence[Row], config: SequenceConfig, model: ModelConfig, *, feature_group: int = 1) -> Batch:
    """Joins unpacked documents into one row; positions restart with every document, segments count from 1.

    Args:
      rows: Documents of the row, in order.
      config: Row length and capacities.
      model: Widths of the slots (bits, codec levels, feature width, MTP depth).
      feature_group: K, pre-quantiser features per understood position.

    Returns:
      A `Batch` of numpy arrays without row axis; `denominators` are this row's own sums.

    Raises:
      SequenceError: The documents overflow the row or a slot capacity, or a slot's width is not the model's.
    """
    length, depth = config.length, model.mtp_depth
    total = sum(row.length for row in rows)
    if total > length:
        raise SequenceError(f"row: needs {total} positions, allowed: config key 'sequence.length' = {length}")
    columns = rows[0].bounds.shape[-1] if rows else 2
    token, segment = np.full(length, PAD, np.int32), np.zeros(length, np.int32)
    position, bounds = np.zeros((length, 3), np.float32), np.zeros((length, columns), np.int32)
    mtp_token = np.full((depth, length), -1, np.int32)
    inputs, targets = _empty_slots(config, model, feature_group)
    count = config.capacity("text_targets")
    mtp = [
        Slots(np.full(count, length, np.int32), {"token": np.zeros(count, np.int32)}, np.zeros(count, np.float32))
        for _ in range(depth)
    ]
    used: dict[str, int] = {}
    offset = 0
    for number, row in enumerate(rows):
        if len(row.mtp) != depth:
            raise SequenceError(
                f"row: found {len(row.mtp)} MTP modules, allowed: config key 'model.mtp_depth' = {depth}"
            )
        end = offset + row.length
        token[offset:end], segment[offset:end], position[offset:end] = row.token, number + 1, row.position
        bounds[offset:end] = row.bounds + offset
        mtp_token[:, offset:end] = row.mtp_token
        for kind, slots, parts in (("inputs", inputs, row.inputs), ("targets", targets, row.targets)):
            for name, part in parts.items():
                key = f"{name}_{kind}"
                used[key] = _append(slots[name], used.get(key, 0), part, offset, key)
        for d, part in enumerate(row.mtp):
            used[f"mtp{d}"] = _append(mtp[d], used.get(f"mtp{d}", 0), part, offset, "text_targets")
        offset = end
    targets["mtp"] = Slots(
        np.stack([m.index for m in mtp]) if mtp else np.full((0, count), length, np.int32),
        {"token": np.stack([m.values["token"] for m in mtp]) if mtp else np.zeros((0, count), np.int32)},
        np.stack([m.weight for m in mtp]) if mtp else np.zeros((0, count), np.float32),
    )
    text_bytes = sum(row.text_bytes for row in rows)
    sums = _weight_sums(targets, segment, text_bytes)
    return Batch(token, position, bounds, segment, inputs, targets, mtp_token, sums)


def _weight_sums(targets: dict[str, Slots], segment: np.ndarray, text_bytes: float) -> dict[str, np.ndarray]:
    visual, is_video = targets["visual"].weight, targets["visual"].values["is_video"]
    sums = {
        "text": targets["text"].weight.sum(),
        "image": visual[~is_video].sum(),
        "video": visual[is_video].sum(),
        "audio": targets["audio"].weight.sum(),
        "mtp": targets["mtp"].weight.sum(),
        "tokens": (segment > 0).sum(),
        "text_bytes": text_bytes,
    }
    return {name: np.asarray(value, np.float32) for name, value in sums.items()}


def stack(packed: Sequence[Batch], denominators: Mapping[str, np.ndarray] | None = None) -> Batch:
    """Stacks packed rows into a Batch with a leading row axis.

    Args:
      packed: Rows from `pack`, all of one config.
      denominators: Sums over the *global* batch where `packed` is only a part of it (a host's share, a micro-batch);
        None sums over `packed`.

    Returns:
      The batch, numpy, denominators float32 [].
    """
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *packed)
    sums = {name: total.sum(dtype=np.float32) for name, total in batch.denominators.items()}
    if denominators is not None:
        sums = {name: np.asarray(denominators[name], np.float32) for name in DENOMINATORS}
    return Batch(**{**vars(batch), "denominators": sums})
