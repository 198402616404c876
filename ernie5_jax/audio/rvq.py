"""Residual vector quantisation with codebooks that follow moving averages (SoundStream; EnCodec's corrected form).

Level n quantises what the levels before it left over. With `split` (Mimi, arXiv 2410.00037) the first
level stands alone: it quantises the first half of a vector, the other levels together the second half, so that what
the first one says need not serve the details. (The linear maps of Mimi before and after each part are those of the
encoder's and the decoder's next layer.)

Pure functions over a `Codebooks` dict, so that the state can live in a training state and travel through `jax.jit`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

SMOOTHING = 1e-5
"""Keeps the mean of an unused code finite."""
KMEANS_ITERATIONS = 50


class Codebooks(TypedDict):
    """State of Q levels of K codes.

    codes [Q, K, D] = sums / counts; counts [Q, K] and sums [Q, K, D] are moving averages of the usage per step.
    """

    codes: jax.Array
    counts: jax.Array
    sums: jax.Array


class Quantized(NamedTuple):
    """What `quantize` returns.

    Attributes:
      codes: int32 [..., Q].
      quantized: [..., D] in value the sum of the chosen codes; its gradient to the input is the identity.
      residuals: [..., Q, D], the input of every level, without gradient.
      commit: [..., Q], squared error per level (mean over D) whose gradient goes to the input only.
      codebook: [..., Q], the same value with its gradient to the codes only.
    """

    codes: jax.Array
    quantized: jax.Array
    residuals: jax.Array
    commit: jax.Array
    codebook: jax.Array


def nearest(codes: jax.Array, x: jax.Array) -> jax.Array:
    """Index of the nearest of `codes` [K, D] in squared distance for x [..., D]: int32 [...]."""
    distance = jnp.sum(codes * codes, -1) - 2 * x @ codes.T
    return jnp.argmin(distance, axis=-1).astype(jnp.int32)


def quantize(codes: jax.Array, x: jax.Array, levels: jax.Array | None = None, *, split: bool = False) -> Quantized:
    """Quantises x [..., D], or [..., 2 D] where `split`, with codes [Q, K, D].

    Args:
      codes: Codebooks, coarse to fine.
      x: Encoder output.
      levels: int32 [...] number of levels that `quantized` sums for each vector (quantiser dropout); None = all.
        `codes`, `commit` and `codebook` always cover all levels.
      split: Whether level 1 has a half of x for itself.
    """
    if not split:
        return _residual(codes, x, levels)
    first, rest = jnp.split(x, 2, axis=-1)
    a, b = _residual(codes[:1], first, levels), _residual(codes[1:], rest, None if levels is None else levels - 1)
    join = lambda name, axis: jnp.concatenate([getattr(a, name), getattr(b, name)], axis)  # noqa: E731
    return Quantized(
        codes=join("codes", -1),
        quantized=join("quantized", -1),
        residuals=join("residuals", -2),
        commit=join("commit", -1),
        codebook=join("codebook", -1),
    )


def _residual(codes: jax.Array, x: jax.Array, levels: jax.Array | None) -> Quantized:
    residual, total = x, jnp.zeros_like(x)
    indices, residuals, commit, codebook = [], [], [], []
    for level in range(codes.shape[0]):
        index = nearest(codes[level], lax.stop_gradient(residual))
        chosen = codes[level][index]
        fixed = lax.stop_gradient(chosen)
        indices.append(index)
        residuals.append(lax.stop_gradient(residual))
        commit.append(jnp.mean((residual - fixed) ** 2, -1))
        codebook.append(jnp.mean((lax.stop_gradient(residual) - chosen) ** 2, -1))
        # The code is detached, the input is not: a straight-through code here would cancel the input, and the commit
        # losses of all later levels would have no gradient (encodec issue 25).
        residual = residual - fixed
        used = 1.0 if levels is None else (level < levels)[..., None]
        total = total + fixed * used
    quantized = x + lax.stop_gradient(total - x)  # straight through, once
    stack = lambda parts: jnp.stack(parts, axis=-1)  # noqa: E731
    return Quantized(stack(indices), quantized, jnp.stack(residuals, -2), stack(commit), stack(codebook))


def dequantize(codes: jax.Array, indices: jax.Array, *, split: bool = False) -> jax.Array:
    """Sum of the chosen codes: codes [Q, K, D], int32 [..., n] with 1 <= n <= Q levels -> [..., D], 2 D if `split`."""
    chosen = [codes[level][indices[..., level]] for level in range(indices.shape[-1])]
    if not split:
        return functools.reduce(jnp.add, chosen)
    rest = functools.reduce(jnp.add, chosen[1:], jnp.zeros_like(chosen[0]))
    return jnp.concatenate([chosen[0], rest], axis=-1)


def draw_levels(key: jax.Array, shape: tuple[int, ...], levels: int, probability: float = 1.0) -> jax.Array:
    """Quantiser dropout: with `probability` n ~ U{1 ... levels}, both ends included, else n = levels. int32 [shape]."""
    draw, choose = jax.random.split(key)
    n = jax.random.randint(draw, shape, 1, levels + 1)
    return jnp.where(jax.random.bernoulli(choose, probability, shape), n, levels)


def draw_weighted(key: jax.Array, weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Indices into weight [N] >= 0, each in proportion to its weight: int32 [shape]; one of weight 0 is never drawn."""
    ends = jnp.cumsum(weight)
    # side="right" steps over entries whose end equals the draw, which are those without weight.
    drawn = jnp.searchsorted(ends, jax.random.uniform(key, shape, weight.dtype) * ends[-1], side="right")
    last = weight.shape[0] - 1 - jnp.argmax(weight[::-1] > 0)  # where rounding would step over the end
    return jnp.minimum(drawn, last).astype(jnp.int32)


def initialize(key: jax.Array, x: jax.Array, levels: int, bins: int, *, split: bool = False) -> Codebooks:
    """k-means over x [N, D], or [N, 2 D] where `split`, level n on what the finished levels before it left over.

    Codes start at distinct vectors of x where N >= bins; an empty cluster takes a random vector.
    """
    if split:
        first, rest = jnp.split(x, 2, axis=-1)
        keys = jax.random.split(key)
        parts = initialize(keys[0], first, 1, bins), initialize(keys[1], rest, levels - 1, bins)
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    size = x.shape[0]

    def level(residual, key):
        start_key, refill_key = jax.random.split(key)
        start = residual[jax.random.choice(start_key, size, (bins,), replace=size < bins)]
        refills = residual[jax.random.randint(refill_key, (KMEANS_ITERATIONS, bins), 0, size)]

        def iterate(codes, refill):
            counts, sums = _assign(nearest(codes, residual), residual, jnp.ones(size), bins)
            means = sums / jnp.maximum(counts, 1)[:, None]
            return jnp.where(counts[:, None] > 0, means, refill), None

        codes, _ = lax.scan(iterate, start, refills)
        index = nearest(codes, residual)
        counts, _ = _assign(index, residual, jnp.ones(size), bins)
        return residual - codes[index], (codes, jnp.maximum(counts, 1e-3))

    _, (codes, counts) = lax.scan(level, x, jax.random.split(key, levels))
    return Codebooks(codes=codes, counts=counts, sums=codes * counts[..., None])


def update(
    state: Codebooks, key: jax.Array, quantized: Quantized, weight: jax.Array, decay: float, revive: jax.Array | float
) -> Codebooks:
    """One moving-average step, then revival of dead codes.

    Args:
      state: Codebooks before.
      key: Chooses the vectors that replace dead codes.
      quantized: Of this batch, leading shape [...].
      weight: [...], 0 for padding.
      decay: Of the averages.
      revive: A code whose usage is below this share of its level's mean usage is replaced by a vector of the batch;
        0 switches revival off for this step.
    """
    levels, bins, width = state["codes"].shape
    index = quantized.codes.reshape(-1, levels).T
    x = quantized.residuals.reshape(-1, levels, width).transpose(1, 0, 2)
    flat = weight.reshape(-1).astype(x.dtype)
    batch_counts, batch_sums = jax.vmap(lambda i, v: _assign(i, v, flat, bins))(index, x)
    counts = decay * state["counts"] + (1 - decay) * batch_counts
    sums = decay * state["sums"] + (1 - decay) * batch_sums
    mean = counts.mean(-1, keepdims=True)
    dead = counts < revive * mean
    picks = draw_weighted(key, flat, (levels, bins))
    fresh = jnp.take_along_axis(x, picks[..., None], axis=1)
    counts = jnp.where(dead, mean, counts)
    sums = jnp.where(dead[..., None], fresh * mean[..., None], sums)
    return Codebooks(codes=sums / (counts + SMOOTHING)[..., None], counts=counts, sums=sums)


def _assign(index: jax.Array, x: jax.Array, weight: jax.Array, bins: int) -> tuple[jax.Array, jax.Array]:
    """Weighted count [K] and sum [K, D] of the vectors x [N, D] that chose each code."""
    chosen = jax.nn.one_hot(index, bins, dtype=x.dtype) * weight[:, None]
    return chosen.sum(0), chosen.T @ x
