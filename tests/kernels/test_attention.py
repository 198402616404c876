"""Mask semantics (components 1.4) and dense attention against a naive loop."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ernie5_jax.kernels.attention import attention, attention_mask, blockwise_attention, cached_attention
from ernie5_jax.kernels.attention.mask import needed_blocks
from ernie5_jax.kernels.attention.pallas_tpu import pallas_attention


def _mask(bounds, causal: bool) -> np.ndarray:
    bounds = jnp.asarray(bounds, jnp.int32)[None]
    length = bounds.shape[1]
    rows, segment = jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32)
    mask = attention_mask(q_rows=rows, k_rows=rows, bounds=bounds, q_segment=segment, k_segment=segment, causal=causal)
    return np.asarray(mask[0])


class MaskTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("a_causal_all_5", [[5]] * 10, True, 15),
        ("c_documents", [[10]] * 4 + [[7]] * 3 + [[10]] * 3, True, 46),
        ("d_window", [[10], [4], [5], [6], [7], [8], [9], [10], [10], [10]], True, 34),
        ("f_bidirectional_documents", [[4, 0]] * 4 + [[7, 4]] * 3 + [[10, 7]] * 3, False, 34),
        (
            "nfsp_window_1",
            [[17, 0], [17, 1], [12, 2]] + [[12, 3]] * 4 + [[17, 7]] + [[17, 8]] * 4 + [[17, 12]] + [[17, 13]] * 4,
            False,
            146,
        ),
        (
            "nfsp_window_1_last_scale",
            [[17, 0], [17, 1], [7, 2]] + [[12, 3]] * 4 + [[12, 7]] + [[17, 8]] * 4 + [[17, 12]] + [[17, 13]] * 4,
            False,
            136,
        ),
    )
    def test_golden_number_of_allowed_pairs(self, bounds, causal, allowed):
        self.assertEqual(_mask(bounds, causal).sum(), allowed)

    def test_rows_of_golden_a(self):
        np.testing.assert_array_equal(_mask([[5]] * 10, True).sum(-1), [1, 2, 3, 4, 5, 0, 0, 0, 0, 0])

    @parameterized.parameters((1, True), (2, True), (2, False), (4, False))
    def test_equals_the_definition(self, n, causal):
        rng = np.random.default_rng(n)
        length = 9
        bounds = rng.integers(0, length + 1, (length, n))
        expected = np.ones((length, length), bool)
        for i in range(length):
            for j in range(length):
                b = bounds[j]
                if n == 1:
                    masked = i >= b[0]
                elif n == 2 and causal:
                    masked = b[0] <= i < b[1]
                elif n == 2:
                    masked = i >= b[0] or i < b[1]
                else:
                    masked = b[0] <= i < b[1] or b[2] <= i < b[3]
                expected[i, j] = not (masked or (causal and i < j))
        np.testing.assert_array_equal(_mask(bounds, causal), expected)

    def test_wrong_bounds_are_named(self):
        for n, causal in ((3, False), (3, True), (1, False), (4, True)):
            with self.assertRaisesRegex(ValueError, f"n = {n} with causal = {causal}"):
                _mask([[1] * n], causal)
        with self.assertRaisesRegex(ValueError, "int32"):
            rows = jnp.zeros((1, 2), jnp.int32)
            attention_mask(q_rows=rows, k_rows=rows, bounds=jnp.zeros((1, 2, 2)), q_segment=rows, k_segment=rows)


class AttentionTest(parameterized.TestCase):
    @parameterized.parameters(1, 2, 4)
    def test_equals_a_naive_loop(self, groups):
        rng = np.random.default_rng(groups)
        length, kv_heads, width = 7, 2, 4
        q = rng.normal(size=(1, length, kv_heads * groups, width))
        k, v = rng.normal(size=(2, 1, length, kv_heads, width))
        bounds = np.stack([np.full(length, length), np.arange(length)], -1)[None]
        segment = np.array([[1, 1, 1, 2, 2, 0, 0]])
        rows = np.arange(length)[None]
        out = attention(
            *(jnp.asarray(a, jnp.float32) for a in (q, k, v)),
            bounds=jnp.asarray(bounds, jnp.int32),
            q_segment=jnp.asarray(segment),
            k_segment=jnp.asarray(segment),
            q_rows=jnp.asarray(rows),
            k_rows=jnp.asarray(rows),
        )
        expected = np.zeros_like(q)
        for head in range(q.shape[2]):
            for i in range(length):
                keys = [j for j in range(i + 1) if segment[0, i] == segment[0, j] != 0]
                if keys:
                    score = np.exp([q[0, i, head] @ k[0, j, head // groups] / 2 for j in keys])
                    expected[0, i, head] = score / score.sum() @ v[0, keys, head // groups]
        chex.assert_trees_all_close(out, expected.astype(np.float32), atol=1e-5)

    @parameterized.product(groups=(1, 3), dtype=("float32", "float64", "bfloat16"), lengths=((7, 7), (3, 9)))
    def test_backends_agree_in_values_and_gradients(self, groups, dtype, lengths):
        """Random masks, some queries without any key, against the plain formula."""
        with jax.enable_x64(dtype == "float64"):
            rng = np.random.default_rng(groups)
            queries, keys = lengths
            q, weight = (jnp.asarray(rng.normal(size=(2, queries, 2 * groups, 4)), dtype) for _ in range(2))
            k, v = (jnp.asarray(rng.normal(size=(2, keys, 2, 4)), dtype) for _ in range(2))
            arguments: dict[str, Any] = {
                "bounds": jnp.asarray(rng.integers(0, queries + 1, (2, keys, 4)), jnp.int32),
                "q_segment": jnp.asarray(rng.integers(0, 3, (2, queries)), jnp.int32),
                "k_segment": jnp.asarray(rng.integers(0, 3, (2, keys)), jnp.int32),
                "q_rows": jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), (2, queries)),
                "k_rows": jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32), (2, keys)),
            }

            def total(q, k, v, implementation):
                out = attention(q, k, v, implementation=implementation, **arguments)
                return (out * weight).sum().astype(jnp.float32 if dtype == "bfloat16" else dtype), out

            results = {
                name: jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v, name) for name in ("dense", "xla")
            }
            self.assertGreater(int((results["dense"][0][1] == 0).all((-1, -2)).sum()), 0)
            tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 0.05}[dtype]
            chex.assert_trees_all_close(*results.values(), atol=tolerance, rtol=tolerance)

    def test_unknown_backend(self):
        x, rows = jnp.ones((1, 2, 1, 2)), jnp.zeros((1, 2), jnp.int32)
        with self.assertRaisesRegex(ValueError, "found 'flash', allowed: None, dense, xla, blockwise, pallas"):
            attention(
                x, x, x, bounds=jnp.zeros((1, 2, 2), jnp.int32), q_segment=rows, k_segment=rows, q_rows=rows,
                k_rows=rows, implementation="flash",
            )  # fmt: skip

    def test_fully_masked_rows_give_zero_and_finite_gradients(self):
        q = jnp.ones((1, 3, 2, 4))
        k = jnp.ones((1, 3, 1, 4))
        rows, segment = jnp.arange(3, dtype=jnp.int32)[None], jnp.zeros((1, 3), jnp.int32)
        bounds = jnp.zeros((1, 3, 2), jnp.int32)

        def total(q, k, v):
            out = attention(q, k, v, bounds=bounds, q_segment=segment, k_segment=segment, q_rows=rows, k_rows=rows)
            return out.sum(), out

        (_, out), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, k)
        chex.assert_trees_all_equal(out, jnp.zeros_like(q))
        chex.assert_tree_all_finite(grads)


SHAPES = 25


def random_case(seed: int, dtype: str = "float32") -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Bounds and segments of every kind: empty documents, padding in the middle, permuted rows, some queries only.

    There are `SHAPES` different shapes, so that many masks share a compiled program.
    """
    sizes, rng = np.random.default_rng(seed % SHAPES), np.random.default_rng(seed)
    causal, n = ((True, 1), (True, 2), (False, 2), (False, 4))[sizes.integers(4)]
    batch, key_heads, groups = (int(sizes.integers(1, most)) for most in (3, 3, 4))
    width, keys = 4 * sizes.integers(1, 3), int(sizes.integers(1, 50))
    queries = keys if sizes.random() < 0.7 else int(sizes.integers(1, keys + 1))
    q = jnp.asarray(rng.normal(size=(batch, queries, key_heads * groups, width)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(batch, keys, key_heads, width)), dtype) for _ in range(2))
    segment = np.sort(rng.integers(0, rng.integers(1, 5) + 1, (batch, keys)), axis=-1)
    if rng.random() < 0.3:
        segment = rng.permuted(segment, axis=-1)
    rows = np.broadcast_to(np.arange(keys), (batch, keys))
    if rng.random() < 0.3:
        rows = rng.permuted(rows, axis=-1)  # as a context-parallel shard holds them
    picked = np.sort(rng.permutation(keys)[:queries])
    where: dict[str, Any] = {
        "bounds": jnp.asarray(rng.integers(0, keys + 2, (batch, keys, n)), jnp.int32),
        "q_segment": jnp.asarray(segment[:, picked], jnp.int32),
        "k_segment": jnp.asarray(segment, jnp.int32),
        "q_rows": jnp.asarray(rows[:, picked], jnp.int32),
        "k_rows": jnp.asarray(rows, jnp.int32),
        "causal": causal,
    }
    return (q, k, v), where


def _cached(q, k, v, **where):
    return cached_attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), **where)


BACKENDS = {
    "cached": _cached,
    "xla": functools.partial(attention, implementation="xla"),
    "blockwise": functools.partial(blockwise_attention, block=8),
    "pallas": functools.partial(pallas_attention, interpret=True),
}


@functools.partial(jax.jit, static_argnames=("backend", "causal"))
def values_and_gradients(backend: str, arrays, weight, where, causal):
    """Output, and gradients of its product with `weight` by q, k and v."""
    attend = BACKENDS.get(backend, functools.partial(attention, implementation=backend))

    def total(*arrays):
        out = attend(*arrays, **where, causal=causal)
        return (out * weight).sum(), out

    (_, out), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*arrays)
    return out, grads


class BackendsTest(parameterized.TestCase):
    """Every backend against the plain formula."""

    def check(self, backend: str, seed: int, dtype: str, tolerance: float):
        arrays, where = random_case(seed, dtype)
        causal = where.pop("causal")
        weight = jnp.asarray(np.random.default_rng(seed + 1).normal(size=arrays[0].shape), dtype)
        wanted = values_and_gradients("dense", arrays, weight, where, causal)
        found = values_and_gradients(backend, arrays, weight, where, causal)
        chex.assert_trees_all_close(found, wanted, atol=tolerance, rtol=tolerance)
        chex.assert_trees_all_equal_dtypes(found, wanted)

    @parameterized.product(backend=("xla", "blockwise"), seed=(0, 1, 2, 3, 4))
    def test_double_precision(self, backend, seed):
        with jax.enable_x64(True):
            self.check(backend, seed, "float64", 1e-11)

    @parameterized.product(backend=tuple(BACKENDS), case=(("float32", 1e-5), ("bfloat16", 0.08)))
    def test_other_types(self, backend, case):
        for seed in (5, 6):
            self.check(backend, seed, *case)

    @parameterized.parameters(*BACKENDS)
    @pytest.mark.slow
    def test_two_hundred_random_cases(self, backend):
        for seed in range(1000, 1200):
            with self.subTest(seed=seed):
                self.check(backend, seed, "float32", 2e-5)


class CachedTest(parameterized.TestCase):
    @parameterized.parameters(1, 300)
    def test_few_and_many_queries(self, queries):
        rng, keys = np.random.default_rng(queries), 320
        q = jnp.asarray(rng.normal(size=(2, queries, 4, 8)), jnp.float32)
        k, v = (jnp.asarray(rng.normal(size=(2, keys, 2, 8)), jnp.float32) for _ in range(2))
        where: dict[str, Any] = {
            "bounds": jnp.asarray(rng.integers(0, keys, (2, keys, 2)), jnp.int32),
            "q_segment": jnp.ones((2, queries), jnp.int32),
            "k_segment": jnp.asarray(rng.integers(0, 2, (2, keys)), jnp.int32),
            "q_rows": jnp.asarray(rng.integers(0, keys, (2, queries)), jnp.int32),
            "k_rows": jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32), (2, keys)),
        }
        expected = attention(q, k, v, implementation="dense", **where)
        chex.assert_trees_all_close(_cached(q, k, v, **where), expected, atol=1e-5)
        with self.assertRaisesRegex(ValueError, "bounds: found float32"):
            _cached(q, k, v, **{**where, "bounds": where["bounds"].astype(jnp.float32)})


class BlockwiseTest(parameterized.TestCase):
    def test_blocks_that_are_masked_whole_are_skipped(self):
        """Packed documents of 16 under a causal mask in blocks of 8: of 8 x 8 blocks three per document remain."""
        segment = jnp.asarray(np.repeat(np.arange(1, 5), 16)[None], jnp.int32).reshape(1, 8, 8)
        rows = jnp.arange(64, dtype=jnp.int32).reshape(1, 8, 8)
        unbounded = jnp.full((1, 8, 8, 1), 64, jnp.int32)
        needed = needed_blocks(rows, segment, rows, segment, unbounded, True)
        self.assertEqual(int(needed.sum()), 12)
        # The same documents expressed by bounds alone.
        end = jnp.asarray(np.repeat(np.arange(16, 65, 16), 16), jnp.int32).reshape(1, 8, 8, 1)
        one = jnp.ones_like(segment)
        np.testing.assert_array_equal(needed_blocks(rows, one, rows, one, end, True), needed)

    @parameterized.parameters(*range(6))
    def test_no_needed_block_is_skipped(self, seed):
        _, where = random_case(seed)
        mask = np.asarray(attention_mask(**where))
        size = 4

        def blocks(x):
            x = np.asarray(x)
            x = np.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))
            return jnp.asarray(x.reshape(x.shape[0], -1, size, *x.shape[2:]))

        names = ("q_rows", "q_segment", "k_rows", "k_segment", "bounds")
        parts: list[Any] = [blocks(where[name]) for name in names]
        needed = np.asarray(needed_blocks(*parts, causal=where["causal"]))
        batch, queries, keys = mask.shape
        whole = np.pad(mask, ((0, 0), (0, -queries % size), (0, -keys % size)))
        whole = whole.reshape(batch, needed.shape[1], size, needed.shape[2], size).any((2, 4))
        self.assertFalse((whole & ~needed).any())

    def test_fully_masked_rows_give_zero_and_finite_gradients(self):
        q, k = jnp.ones((1, 20, 2, 4)), jnp.ones((1, 20, 1, 4))
        rows, segment = jnp.arange(20, dtype=jnp.int32)[None], jnp.ones((1, 20), jnp.int32)
        bounds = jnp.zeros((1, 20, 2), jnp.int32)

        def total(q, k, v):
            out = blockwise_attention(
                q, k, v, bounds=bounds, q_segment=segment, k_segment=segment, q_rows=rows, k_rows=rows, block=8
            )
            return out.sum(), out

        (_, out), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, k)
        chex.assert_trees_all_equal(out, jnp.zeros_like(q))
        chex.assert_tree_all_finite(grads)

    def test_memory_is_linear_in_the_length(self):
        def temporary(length: int) -> int:
            q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
            k = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
            rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
            bounds = jax.ShapeDtypeStruct((1, length, 1), jnp.int32)

            def loss(q, k, v, rows, bounds):
                where = {"q_segment": rows, "k_segment": rows, "q_rows": rows, "k_rows": rows, "causal": True}
                return attention(q, k, v, bounds=bounds, **where).sum()

            compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, rows, bounds).compile()
            memory = compiled.memory_analysis()
            assert memory is not None
            return memory.temp_size_in_bytes

        short, long = temporary(2048), temporary(8192)
        self.assertLess(long, 5 * short)
        self.assertLess(long, 8192 * 8192)


if __name__ == "__main__":
    absltest.main()
