"""One group of positions per forward, over a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.model import ElasticMask, KVCache, ModelOutput, Params
from ernie5_jax.sequence import UNBOUNDED, Batch, Prompt, Slots
from ernie5_jax.text.special_tokens import PAD

Apply = Callable[..., ModelOutput]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """What a forward needs besides positions; one pytree, so that decode functions take one argument for it."""

    params: Params
    router_bias: Any
    mask: ElasticMask | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where each sequence stands.

    Attributes:
      cache: Keys and values so far.
      row: int32 [B], next row of each sequence.
      index: int32 [B], running index of what comes next.
    """

    cache: KVCache
    row: Any
    index: Any


def group(
    position: jax.Array,
    row: jax.Array,
    *,
    token: jax.Array | None = None,
    inputs: dict[str, Slots] | None = None,
    targets: dict[str, Slots] | None = None,
) -> tuple[Batch, jax.Array]:
    """A bidirectional group of n positions starting at `row` of each sequence.

    Args:
      position: float32 [B, n, 3].
      row: int32 [B].
      token: int32 [B, n] of a text group.
      inputs, targets: Slots local to the group.

    Returns:
      The `Batch` of these positions and their row indices int32 [B, n].
    """
    size, length = position.shape[:2]
    start = jnp.broadcast_to(row[:, None], (size, length)).astype(jnp.int32)
    bounds = jnp.stack([jnp.full_like(start, UNBOUNDED), start], axis=-1)
    batch = Batch(
        token=jnp.full((size, length), PAD, jnp.int32) if token is None else token,
        position=position.astype(jnp.float32),
        bounds=bounds,
        segment=jnp.ones((size, length), jnp.int32),
        inputs=inputs or {},
        targets=targets or {},
        mtp_token=jnp.zeros((size, 0, length), jnp.int32),
        denominators={},
    )
    return batch, start + jnp.arange(length, dtype=jnp.int32)


def slots(size: int, count: int, values: dict[str, jax.Array] | None = None) -> Slots:
    """Slots at local positions 0 ... count - 1 of every sequence."""
    index = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (size, count))
    return Slots(index, values or {}, jnp.ones((size, count), jnp.float32))


def prompt_batch(prompts: list[Prompt], length: int, head: str) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """Pads prompts of unequal length to one batch.

    Generated audio among the spans keeps its targets, whose codes are fed back between the codec layers as in training.

    Args:
      prompts: Prefixes from `layout_prompt`.
      length: Padded length.
      head: Kind of the target read at each prompt's last position: text, visual or audio; its slot is number 0.

    Returns:
      Batch (numpy), rows int32 [B, length] (a huge number at padding, which no cache holds), lengths int32 [B],
      running indices int32 [B].
    """
    size = len(prompts)
    token = np.full((size, length), PAD, np.int32)
    position = np.zeros((size, length, 3), np.float32)
    bounds = np.zeros((size, length, 2), np.int32)
    segment = np.zeros((size, length), np.int32)
    rows = np.full((size, length), UNBOUNDED, np.int32)
    lengths = np.asarray([prompt.row.length for prompt in prompts], np.int32)
    for i, prompt in enumerate(prompts):
        n = prompt.row.length
        token[i, :n], position[i, :n], bounds[i, :n] = prompt.row.token, prompt.row.position, prompt.row.bounds
        segment[i, :n], rows[i, :n] = 1, np.arange(n)
    targets = {head: Slots((lengths - 1)[:, None], {}, np.ones((size, 1), np.float32))}
    given = _merge([prompt.row.targets.get("audio") for prompt in prompts], length)
    if given is not None:
        targets["audio"] = _joined(targets["audio"], given) if head == "audio" else given
    batch = Batch(
        token=token,
        position=position,
        bounds=bounds,
        segment=segment,
        inputs=_merge_inputs(prompts, length),
        targets=targets,
        mtp_token=np.zeros((size, 0, length), np.int32),
        denominators={},
    )
    return batch, rows, lengths, np.asarray([prompt.index for prompt in prompts], np.int32)


def _merge_inputs(prompts: list[Prompt], length: int) -> dict[str, Slots]:
    names = sorted({name for prompt in prompts for name in prompt.row.inputs})
    merged = {name: _merge([prompt.row.inputs.get(name) for prompt in prompts], length) for name in names}
    return {name: found for name, found in merged.items() if found is not None}


def _merge(parts: list[Slots | None], length: int) -> Slots | None:
    """Slots of one kind of several rows as those of a batch; None where no row has any."""
    example = next((part for part in parts if part is not None), None)
    if example is None:
        return None
    # A fixed capacity: other prompts of the same padded length reuse the compiled program.
    index = np.full((len(parts), length), length, np.int32)
    weight = np.zeros((len(parts), length), np.float32)
    values = {k: np.zeros((len(parts), length, *v.shape[1:]), v.dtype) for k, v in example.values.items()}
    for i, part in enumerate(parts):
        if part is not None:
            n = len(part.index)
            index[i, :n], weight[i, :n] = part.index, part.weight.reshape(n, -1)[:, 0]
            for key, value in part.values.items():
                values[key][i, :n] = value
    return Slots(index, values, weight)


def _joined(last: Slots, given: Slots) -> Slots:
    """`given` after the slot to be read, whose values are not known yet."""
    size = len(last.index)
    values = {k: np.concatenate([np.zeros((size, 1, *v.shape[2:]), v.dtype), v], 1) for k, v in given.values.items()}
    index, weight = (np.concatenate(pair, 1) for pair in ((last.index, given.index), (last.weight, given.weight)))
    return Slots(index, values, weight)


def advance(
    apply: Apply, weights: Weights, cursor: Cursor, batch: Batch, rows: jax.Array, **kwargs: Any
) -> tuple[ModelOutput, KVCache]:
    """One forward over the cache."""
    output = apply(weights.params, weights.router_bias, batch, weights.mask, cache=cursor.cache, rows=rows, **kwargs)
    assert output.cache is not None, "a cache was given"
    return output, output.cache
