"""Mergeable metric states: sums and counts as pytrees.

A state is made from one batch, inside or outside `jax.jit`; states of any number of micro-batches, devices or hosts
merge by addition, and only `compute` divides. So a metric never depends on how the data was cut.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Tree = TypeVar("Tree")


@runtime_checkable
class MetricState(Protocol):
    """A pytree whose leaves are sums."""

    def compute(self) -> Any: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """Weighted mean, of a scalar or element-wise.

    Attributes:
      total: Sum of weight * value.
      count: Sum of weight.
    """

    total: Any
    count: Any

    @classmethod
    def from_values(cls, values: ArrayLike, weight: ArrayLike | None = None) -> Mean:
        """Scalar mean of `values` [...]; `weight` broadcasts against it."""
        values, weight = _weighted(values, weight)
        return cls(jnp.sum(values * weight), jnp.sum(weight))

    @classmethod
    def by_index(cls, values: ArrayLike, index: ArrayLike, num_indices: int, weight: ArrayLike | None = None) -> Mean:
        """One mean per index, e.g. per scale or codec level.

        Args:
          values: [...].
          index: int [...], broadcasts against `values`; entries outside 0 ... num_indices - 1 are left out.
          num_indices: K.
          weight: [...], broadcasts against `values`.

        Returns:
          State with `total` and `count` of shape [K].
        """
        values, weight = _weighted(values, weight)
        index = jnp.broadcast_to(index, values.shape)
        index = jnp.where(index < 0, num_indices, index).reshape(-1)  # negative ones would count from the end
        zeros = jnp.zeros(num_indices, values.dtype)
        total = zeros.at[index].add((values * weight).reshape(-1), mode="drop")
        return cls(total, zeros.at[index].add(weight.reshape(-1), mode="drop"))

    def compute(self) -> Any:
        """Mean; NaN where nothing was counted."""
        return _divide(self.total, self.count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BitsPerByte:
    """Negative log-likelihood of text in bits per UTF-8 byte; does not depend on the tokenizer.

    Attributes:
      nats: Sum of the negative log-likelihoods of tokens.
      num_bytes: UTF-8 bytes of the text they spell.
    """

    nats: Any
    num_bytes: Any

    @classmethod
    def from_losses(cls, losses: ArrayLike, num_bytes: ArrayLike, weight: ArrayLike | None = None) -> BitsPerByte:
        """Args: losses [...] nats per token; num_bytes [...], summed; weight [...] 0 leaves a token out (PAD)."""
        losses, weight = _weighted(losses, weight)
        return cls(jnp.sum(losses * weight), jnp.sum(jnp.asarray(num_bytes, losses.dtype)))

    def compute(self) -> Any:
        """Bits per byte; NaN without any byte."""
        return _divide(self.nats / np.log(2), self.num_bytes)


def accuracy(predicted: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None) -> Mean:
    """Share of `predicted` [...] that equals `target` [...]."""
    return Mean.from_values(jnp.equal(predicted, target), weight)


def accuracy_by_index(
    predicted: ArrayLike, target: ArrayLike, index: ArrayLike, num_indices: int, weight: ArrayLike | None = None
) -> Mean:
    """`accuracy` per index, e.g. per codec level: with [..., Q] codes, `index = jnp.arange(Q)`."""
    return Mean.by_index(jnp.equal(predicted, target), index, num_indices, weight)


def bit_accuracy(
    logits: ArrayLike, bits: ArrayLike, scale: ArrayLike, num_scales: int, weight: ArrayLike | None = None
) -> Mean:
    """Share of right bits per scale.

    Args:
      logits: [..., C], p(bit = 1) = sigmoid(logits); 0 counts as bit 0.
      bits: {0, 1} [..., C].
      scale: int [...].
      num_scales: K.
      weight: [...].

    Returns:
      State of shape [K]; every code counts once (weight), not C times.
    """
    right = jnp.mean(jnp.equal(jnp.asarray(logits) > 0, jnp.asarray(bits) > 0), axis=-1)
    return Mean.by_index(right, scale, num_scales, weight)


def merge(first: Tree, second: Tree) -> Tree:
    """Adds two equal pytrees of states."""
    return jax.tree.map(lambda a, b: a + b, first, second)


def compute(states: Any) -> Any:
    """Replaces every state in a pytree by its value."""
    return jax.tree.map(lambda s: s.compute(), states, is_leaf=lambda s: isinstance(s, MetricState))


def to_host(states: Tree) -> Tree:
    """Copies states into float64 numpy arrays: merged there, long evaluations count exactly."""
    return jax.tree.map(lambda leaf: np.asarray(jax.device_get(leaf), np.float64), states)


def _weighted(values: ArrayLike, weight: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
    values = jnp.asarray(values)
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    weight = jnp.ones((), values.dtype) if weight is None else jnp.asarray(weight, values.dtype)
    weight = jnp.broadcast_to(weight, values.shape)
    return jnp.where(weight != 0, values, 0), weight  # what is left out may be NaN


def _divide(total: Any, count: Any) -> Any:
    if isinstance(total, np.ndarray | np.generic):  # stay in float64 on the host
        return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=np.not_equal(count, 0))[()]
    return jnp.where(count == 0, jnp.nan, total / jnp.where(count == 0, 1, count))
