"""Sparse feed-forward backends against the dense oracle."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ernie5_jax.kernels.grouped_matmul import dense_moe, moe_ffn, stacked_moe_ffn
from ernie5_jax.kernels.grouped_matmul.blocks import block_moe, block_rows
from ernie5_jax.kernels.grouped_matmul.grouped import grouped_moe, megablox_product


def _case(seed: int, tokens: int, width: int, hidden: int, experts: int, k: int, drop: float):
    rng = np.random.default_rng(seed)
    index = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
    index = np.where(rng.random((tokens, k)) < drop, experts, index)
    arrays = (
        rng.normal(size=(tokens, width)),
        rng.random((tokens, k)),
        rng.normal(size=(experts, width, 2 * hidden)) / np.sqrt(width),
        rng.normal(size=(experts, hidden, width)) / np.sqrt(hidden),
    )
    x, gates, w_in, w_out = (jnp.asarray(a, jnp.float32) for a in arrays)
    return x, gates, jnp.asarray(index, jnp.int32), w_in, w_out


class MoeFfnTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, 37, 8, 6, 5, 2, 0.0),
        (1, 200, 16, 12, 3, 1, 0.3),
        (2, 1, 4, 3, 4, 4, 0.0),
        (3, 65, 8, 4, 16, 3, 0.5),
        (4, 10, 8, 4, 6, 2, 1.0),
    )
    def test_values_and_gradients_equal_the_oracle(self, *case):
        x, gates, index, w_in, w_out = _case(*case)
        target = jnp.asarray(np.random.default_rng(9).normal(size=x.shape), jnp.float32)

        def loss(implementation, *args):
            x, gates, w_in, w_out = args
            y = moe_ffn(x, gates, index, w_in, w_out, implementation=implementation)
            return jnp.sum(y * target), y

        args = (x, gates, w_in, w_out)
        results = {
            name: jax.jit(jax.value_and_grad(lambda *a, n=name: loss(n, *a), (0, 1, 2, 3), has_aux=True))(*args)
            for name in ("dense", "blocks", "ragged", None)
        }
        scale = 1 + max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(results["dense"]))
        for name in ("blocks", "ragged", None):
            chex.assert_trees_all_close(results[name], results["dense"], atol=2e-6 * scale, rtol=1e-5)

    @pytest.mark.slow
    def test_two_hundred_random_cases(self):
        """10 shapes, 20 routings and shares of dropped ranks each; gradients of every argument."""
        rng = np.random.default_rng(17)
        for shape in range(10):
            experts = int(rng.integers(1, 20))
            k = int(rng.integers(1, min(experts, 5) + 1))
            tokens, width, hidden = (int(n) for n in rng.integers((1, 1, 1), (150, 20, 20)))

            def both(name, x, gates, index, w_in, w_out, target):
                def loss(x, gates, w_in, w_out):
                    y = moe_ffn(x, gates, index, w_in, w_out, implementation=name)
                    return jnp.sum(y * target), y

                return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, gates, w_in, w_out)

            programs = {name: jax.jit(functools.partial(both, name)) for name in ("dense", "blocks", "ragged")}
            for number in range(20):
                case = _case(1000 * shape + number, tokens, width, hidden, experts, k, rng.choice([0.0, 0.3, 0.9]))
                target = jnp.asarray(rng.normal(size=case[0].shape), jnp.float32)
                found = {name: program(*case, target) for name, program in programs.items()}
                scale = 1 + max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(found["dense"]))
                for name in ("blocks", "ragged"):
                    chex.assert_trees_all_close(found[name], found["dense"], atol=2e-6 * scale, rtol=1e-5)

    @parameterized.parameters(1, 7, 8, 64)
    def test_the_size_of_a_block_changes_nothing(self, block):
        arguments = _case(6, 90, 8, 4, 6, 2, 0.2)
        chex.assert_trees_all_close(block_moe(*arguments, block), block_moe(*arguments), atol=1e-5)

    def test_blocks_are_about_as_long_as_an_expert_has_rows(self):
        sizes = {(4, 32): 1, (16, 32): 1, (17, 32): 8, (256, 32): 8, (257, 32): 16, (512, 32): 16, (5120, 32): 64}
        self.assertEqual({case: block_rows(*case) for case in sizes}, sizes)

    def test_unused_ranks_do_not_reach_any_expert(self):
        x, gates, index, w_in, w_out = _case(5, 12, 8, 4, 6, 2, 0.0)
        dropped = index.at[:, 1].set(6)
        alone = moe_ffn(x, gates[:, :1], index[:, :1], w_in, w_out)
        chex.assert_trees_all_close(moe_ffn(x, gates, dropped, w_in, w_out), alone, atol=1e-6)

    def test_megablox_equals_the_oracle(self):
        """Emulated; some ranks are dropped, and the pairs fill no whole tile."""
        x, gates, index, w_in, w_out = _case(7, 37, 8, 6, 5, 2, 0.3)
        product = functools.partial(megablox_product, interpret=True)

        def loss(layer, x, gates, w_in, w_out):
            y = layer(x, gates, index, w_in, w_out)
            return jnp.sum(y * jnp.cos(y)), y

        results = [
            jax.value_and_grad(functools.partial(loss, layer), (0, 1, 2, 3), has_aux=True)(x, gates, w_in, w_out)
            for layer in (dense_moe, functools.partial(grouped_moe, product=product))
        ]
        chex.assert_trees_all_close(*results, atol=2e-5, rtol=1e-5)

    @parameterized.parameters(0, 1, 2)
    def test_one_layer_of_a_stack(self, layer):
        cases = [_case(seed, 9, 8, 4, 6, 2, 0.2) for seed in range(3)]
        w_in, w_out = (jnp.stack([case[i] for case in cases]) for i in (3, 4))
        x, gates, index = cases[0][:3]
        found = jax.jit(stacked_moe_ffn)(x, gates, index, w_in, w_out, jnp.int32(layer))
        wanted = moe_ffn(x, gates, index, w_in[layer], w_out[layer], implementation="dense")
        chex.assert_trees_all_close(found, wanted, atol=1e-5)

    def test_unknown_backend_is_named(self):
        with self.assertRaisesRegex(ValueError, "'fast'.*dense, blocks, ragged, megablox"):
            moe_ffn(*_case(0, 3, 4, 2, 2, 1, 0.0), implementation="fast")

    def test_too_many_pairs_for_one_sort_key_are_refused(self):
        shapes = ((2**26, 2), (2**26, 1), (2**26, 1), (64, 2, 2), (64, 1, 2))
        arguments = [jax.ShapeDtypeStruct(s, jnp.int32 if i == 2 else jnp.float32) for i, s in enumerate(shapes)]
        with self.assertRaisesRegex(ValueError, "found 67108864 .* for 64 experts, allowed: at most 33038209"):
            jax.eval_shape(lambda *a: moe_ffn(*a, implementation="blocks"), *arguments)


if __name__ == "__main__":
    absltest.main()
