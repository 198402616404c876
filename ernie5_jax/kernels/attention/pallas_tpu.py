"""FlashMask attention as Pallas kernels for TPUs: forward and backward, masked blocks neither computed nor fetched.

Scores are held transposed, [keys, queries]: maxima, sums and log-sums of a query then lie along the lanes. What decides
about a pair comes as int32 tiles: rows and segments of queries as lines [8, queries], those of keys with their bounds
as columns [keys, 128]. Per block of queries the blocks of keys that may hold an allowed pair are listed beforehand
(`needed_blocks`); steps beyond the list repeat its last block, which the pipeline does not fetch again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ernie5_jax.kernels.attention.mask import allowed_pairs, block_visits, needed_blocks

_FLOOR = -1e30
_BLOCK = 128
_LINES, _LANES = 8, 128
_NN, _NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static facts of one call."""

    block: int
    bounds: int
    causal: bool
    interpret: bool


def pallas_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bounds: jax.Array,
    q_segment: jax.Array,
    k_segment: jax.Array,
    q_rows: jax.Array,
    k_rows: jax.Array,
    causal: bool = False,
    block: int = _BLOCK,
    interpret: bool = False,
) -> jax.Array:
    """`attention`, arguments and result as there.

    Args:
      block: Queries and keys looked at together, a multiple of 128.
      interpret: Whether the kernels are emulated, on any device.
    """
    queries = q.shape[1]

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2)))

    q, k, v = padded(q).swapaxes(1, 2), padded(k).swapaxes(1, 2), padded(v).swapaxes(1, 2)
    q_rows, q_segment = padded(q_rows), padded(q_segment)
    k_rows, k_segment, bounds = padded(k_rows), padded(k_segment), padded(bounds)

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, block, *x.shape[2:])

    needed = needed_blocks(blocks(q_rows), blocks(q_segment), blocks(k_rows), blocks(k_segment), blocks(bounds), causal)
    q_info = jnp.stack([q_rows, q_segment], 1)
    q_info = jnp.pad(q_info, ((0, 0), (0, _LINES - 2), (0, 0)))
    k_info = jnp.concatenate([k_rows[..., None], k_segment[..., None], bounds], -1)
    k_info = jnp.pad(k_info, ((0, 0), (0, 0), (0, _LANES - k_info.shape[-1])))
    settings = _Settings(block, bounds.shape[-1], causal, interpret)
    visits = (*block_visits(needed), *block_visits(needed.swapaxes(1, 2)))
    lists = tuple(x.reshape(-1) for x in visits)
    out: jax.Array = _attend(settings, q * q.shape[-1] ** -0.5, k, v, q_info, k_info, lists)
    return out.swapaxes(1, 2)[:, :queries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: _Settings, q, k, v, q_info, k_info, lists):
    """[B, N, Sq, H] (scaled) over [B, K, Sk, H] -> [B, N, Sq, H]."""
    return _forward(settings, q, k, v, q_info, k_info, lists)[0]


def _forward(settings: _Settings, q, k, v, q_info, k_info, lists):
    call = _QueryLoop(settings, q, k, lists[:2])
    width, block = q.shape[-1], settings.block
    out, log_sum = call(
        functools.partial(_forward_kernel, settings=settings),
        [("q_info", q_info), ("k_info", k_info), ("q", q), ("k", k), ("k_columns", v.swapaxes(2, 3))],
        [("q_columns", (width, v.dtype)), ("q_columns", (1, jnp.float32))],
        [(1, block), (1, block), (width, block)],
    )
    return out.swapaxes(2, 3), (q, k, v, q_info, k_info, lists, out, log_sum)


def _backward(settings: _Settings, residuals, g):
    q, k, v, q_info, k_info, lists, out, log_sum = residuals
    width, block = q.shape[-1], settings.block
    mean = (g.swapaxes(2, 3) * out).astype(jnp.float32).sum(2, keepdims=True)
    (dq,) = _QueryLoop(settings, q, k, lists[:2])(
        functools.partial(_dq_kernel, settings=settings),
        [
            ("q_info", q_info), ("k_info", k_info), ("q", q), ("k", k), ("k_columns", k.swapaxes(2, 3)), ("k", v),
            ("q", g), ("q_columns", log_sum), ("q_columns", mean),
        ],
        [("q_columns", (width, q.dtype))],
        [(width, block)],
    )  # fmt: skip
    dk, dv = _key_loop(settings, q, k, v, g, q_info, k_info, log_sum, mean, lists[2:])
    return dq.swapaxes(2, 3), dk, dv, None, None, None


_attend.defvjp(_forward, _backward)


class _QueryLoop:
    """Calls a kernel for every block of queries, over the blocks of keys on its list: grid (B, N, nq, nk)."""

    def __init__(self, settings: _Settings, q: jax.Array, k: jax.Array, lists: tuple[jax.Array, jax.Array]):
        self.settings, self.lists = settings, lists
        self.batch, self.heads, self.queries = q.shape[0], q.shape[1], q.shape[2]
        self.groups = q.shape[1] // k.shape[1]
        self.grid = (*q.shape[:2], q.shape[2] // settings.block, k.shape[2] // settings.block)

    def _key_block(self, b, i, t, order, count):
        number = b * self.grid[2] + i
        return order[number * self.grid[3] + jnp.minimum(t, jnp.maximum(count[number] - 1, 0))]

    def _spec(self, kind: str, width: int) -> pl.BlockSpec:
        block, key = self.settings.block, self._key_block

        def shared(h: jax.Array) -> jax.Array:
            """The key head of a query head."""
            return lax.div(h, self.groups)

        shapes: dict[str, tuple[tuple[int | None, ...], Callable]] = {
            "q_info": ((None, _LINES, block), lambda b, h, i, t, *s: (b, 0, i)),
            "k_info": ((None, block, _LANES), lambda b, h, i, t, *s: (b, key(b, i, t, *s), 0)),
            "q": ((None, None, block, width), lambda b, h, i, t, *s: (b, h, i, 0)),
            "q_columns": ((None, None, width, block), lambda b, h, i, t, *s: (b, h, 0, i)),
            "k": ((None, None, block, width), lambda b, h, i, t, *s: (b, shared(h), key(b, i, t, *s), 0)),
            "k_columns": ((None, None, width, block), lambda b, h, i, t, *s: (b, shared(h), 0, key(b, i, t, *s))),
        }
        return pl.BlockSpec(*shapes[kind])

    def __call__(self, kernel: Callable, inputs: list[tuple[str, jax.Array]], outputs: list[Any], scratch: list[Any]):
        def width(kind: str, array: jax.Array) -> int:
            return array.shape[2] if kind.endswith("columns") else array.shape[-1]

        shapes = [jax.ShapeDtypeStruct((self.batch, self.heads, w, self.queries), t) for _, (w, t) in outputs]
        return pl.pallas_call(
            kernel,
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=self.grid,
                in_specs=[self._spec(kind, width(kind, array)) for kind, array in inputs],
                out_specs=[self._spec(kind, w) for kind, (w, _) in outputs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            compiler_params=_parallel_but_last(),
            interpret=self.settings.interpret,
        )(*self.lists, *(array for _, array in inputs))


def _parallel_but_last() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


def _allowed(q_info, k_info, settings: _Settings) -> jax.Array:
    """bool [Kb, Qb]."""
    column = lambda i: k_info[:, i : i + 1]  # noqa: E731
    bounds = tuple(column(2 + i) for i in range(settings.bounds))
    return allowed_pairs(q_info[0:1], q_info[1:2], column(0), column(1), bounds, settings.causal)


def _dot(a: jax.Array, b: jax.Array, dims: Any = _NN) -> jax.Array:
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _is_visit(count) -> jax.Array:
    """Whether this step's block is on the list."""
    return pl.program_id(3) < count[pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)]


def _forward_kernel(order, count, q_info, k_info, q, k, v_columns, out, log_sum, largest, total, weighted, *, settings):
    del order

    @pl.when(pl.program_id(3) == 0)
    def _start():
        largest[...] = jnp.full_like(largest, _FLOOR)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    @pl.when(_is_visit(count))
    def _visit():
        allowed = _allowed(q_info, k_info, settings)
        scores = jnp.where(allowed, _dot(k[...], q[...], _NT), _FLOOR)
        before = largest[...]
        larger = jnp.maximum(before, scores.max(0, keepdims=True))
        weights = jnp.where(allowed, jnp.exp(scores - larger), 0.0)
        shrink = jnp.exp(before - larger)
        largest[...] = larger
        total[...] = total[...] * shrink + weights.sum(0, keepdims=True)
        weighted[...] = weighted[...] * shrink + _dot(v_columns[...], weights.astype(v_columns.dtype))

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _finish():
        safe = jnp.where(total[...] == 0, 1.0, total[...])
        out[...] = (weighted[...] / safe).astype(out.dtype)
        log_sum[...] = largest[...] + jnp.log(safe)


def _weights(q_info, k_info, q, k, log_sum, settings: _Settings) -> jax.Array:
    """Softmax weights [Kb, Qb], computed again."""
    scores = _dot(k[...], q[...], _NT)
    return jnp.where(_allowed(q_info, k_info, settings), jnp.exp(scores - log_sum[...]), 0.0)


def _dq_kernel(order, count, q_info, k_info, q, k, k_columns, v, g, log_sum, mean, dq, total, *, settings):
    del order

    @pl.when(pl.program_id(3) == 0)
    def _start():
        total[...] = jnp.zeros_like(total)

    @pl.when(_is_visit(count))
    def _visit():
        weights = _weights(q_info, k_info, q, k, log_sum, settings)
        dscores = weights * (_dot(v[...], g[...], _NT) - mean[...])
        total[...] += _dot(k_columns[...], dscores.astype(k_columns.dtype))

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _finish():
        dq[...] = total[...].astype(dq.dtype)


def _dkv_kernel(order, count, q_info, k_info, q, k, v, g, log_sum, mean, dk, dv, k_total, v_total, *, settings, blocks):
    del order
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        k_total[...] = jnp.zeros_like(k_total)
        v_total[...] = jnp.zeros_like(v_total)

    @pl.when(lax.rem(step, blocks) < count[pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)])
    def _visit():
        weights = _weights(q_info, k_info, q, k, log_sum, settings)
        dscores = weights * (_dot(v[...], g[...], _NT) - mean[...])
        v_total[...] += _dot(weights.astype(g.dtype), g[...])
        k_total[...] += _dot(dscores.astype(q.dtype), q[...])

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        dk[...] = k_total[...].astype(dk.dtype)
        dv[...] = v_total[...].astype(dv.dtype)


def _key_loop(settings: _Settings, q, k, v, g, q_info, k_info, log_sum, mean, lists):
    """Gradients of keys and values: grid (B, K, nk, heads of the group x blocks of queries on the list)."""
    batch, key_heads, keys, width = k.shape
    block, groups, blocks = settings.block, q.shape[1] // key_heads, q.shape[2] // settings.block
    grid = (batch, key_heads, keys // block, groups * blocks)

    def query_block(b, j, u, order, count):
        number = b * grid[2] + j
        return order[number * blocks + jnp.minimum(lax.rem(u, blocks), jnp.maximum(count[number] - 1, 0))]

    def head(h, u):
        return h * groups + lax.div(u, blocks)

    of_keys = pl.BlockSpec((None, None, block, width), lambda b, h, j, u, *s: (b, h, j, 0))
    of_queries = pl.BlockSpec(
        (None, None, block, width), lambda b, h, j, u, *s: (b, head(h, u), query_block(b, j, u, *s), 0)
    )
    line = pl.BlockSpec((None, None, 1, block), lambda b, h, j, u, *s: (b, head(h, u), 0, query_block(b, j, u, *s)))
    return pl.pallas_call(
        functools.partial(_dkv_kernel, settings=settings, blocks=blocks),
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                pl.BlockSpec((None, _LINES, block), lambda b, h, j, u, *s: (b, 0, query_block(b, j, u, *s))),
                pl.BlockSpec((None, block, _LANES), lambda b, h, j, u, *s: (b, j, 0)),
                of_queries,
                of_keys,
                of_keys,
                of_queries,
                line,
                line,
            ],
            out_specs=[of_keys, of_keys],
            scratch_shapes=[pltpu.VMEM((block, width), jnp.float32)] * 2,
        ),
        compiler_params=_parallel_but_last(),
        interpret=settings.interpret,
    )(*lists, q_info, k_info, q, k, v, g, log_sum, mean)
