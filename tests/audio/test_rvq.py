"""Residual vector quantisation: values by hand, gradients where they belong, moving averages, revival."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from ernie5_jax.audio import rvq

KEY = jax.random.key(0)
quantize, update = jax.jit(rvq.quantize, static_argnames="split"), jax.jit(rvq.update)
initialize = jax.jit(rvq.initialize, static_argnames=("levels", "bins", "split"))
LEVELS, BINS, WIDTH = 4, 16, 8


def books(codes):
    codes = jnp.asarray(codes, jnp.float32)
    return rvq.Codebooks(codes=codes, counts=jnp.ones(codes.shape[:2]), sums=codes)


class QuantizeTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        code_key, x_key = jax.random.split(KEY)
        scale = 0.6 ** jnp.arange(LEVELS)[:, None, None]
        self.codes = scale * jax.random.normal(code_key, (LEVELS, BINS, WIDTH))
        self.x = jax.random.normal(x_key, (2, 5, WIDTH))

    def test_two_levels_by_hand(self):
        codes = jnp.array([[[0.0, 0.0], [4.0, 0.0]], [[0.0, 1.0], [-1.0, 0.0]]])
        found = quantize(codes, jnp.array([3.5, 0.0]))
        # Level 1 takes (4, 0), leaves (-.5, 0); level 2 takes (-1, 0), leaves (.5, 0).
        np.testing.assert_array_equal(found.codes, [1, 1])
        np.testing.assert_allclose(found.quantized, [3.0, 0.0], atol=1e-6)
        np.testing.assert_allclose(found.commit, [0.125, 0.125])
        np.testing.assert_allclose(found.codebook, [0.125, 0.125])
        np.testing.assert_allclose(found.residuals, [[3.5, 0.0], [-0.5, 0.0]])

    def test_every_level_takes_the_nearest_code_of_what_is_left(self):
        found = quantize(self.codes, self.x)
        left = np.asarray(self.x)
        for level, codes in enumerate(np.asarray(self.codes)):
            expected = np.argmin(((left[..., None, :] - codes) ** 2).sum(-1), -1)
            np.testing.assert_array_equal(found.codes[..., level], expected)
            left = left - codes[expected]
        np.testing.assert_allclose(rvq.dequantize(self.codes, found.codes), self.x - left, atol=1e-5)
        np.testing.assert_allclose(found.quantized, self.x - left, atol=1e-5)

    def test_straight_through_gradient_is_the_identity(self):
        jacobian = jax.jacobian(lambda x: quantize(self.codes, x).quantized)(self.x[0, 0])
        np.testing.assert_array_equal(jacobian, np.eye(WIDTH))

    def test_commit_of_every_level_reaches_the_input_and_no_code(self):
        for level in range(LEVELS):
            commit = lambda x, codes, level=level: quantize(codes, x).commit[..., level].sum()  # noqa: E731
            to_x, to_codes = jax.jit(jax.grad(commit, argnums=(0, 1)))(self.x, self.codes)
            left = quantize(self.codes, self.x)
            after = left.residuals[..., level, :] - self.codes[level][left.codes[..., level]]
            np.testing.assert_allclose(to_x, 2 * after / WIDTH, atol=1e-6)
            self.assertGreater(float(jnp.linalg.norm(to_x)), 0.1)
            np.testing.assert_array_equal(to_codes, np.zeros_like(to_codes))

    def test_codebook_loss_reaches_the_codes_and_not_the_input(self):
        loss = lambda x, codes: quantize(codes, x).codebook.sum()  # noqa: E731
        to_x, to_codes = jax.jit(jax.grad(loss, argnums=(0, 1)))(self.x, self.codes)
        np.testing.assert_array_equal(to_x, np.zeros_like(to_x))
        for level in range(LEVELS):
            self.assertGreater(float(jnp.linalg.norm(to_codes[level])), 0.1)

    def test_dropped_levels_are_left_out_of_the_sum_only(self):
        full = quantize(self.codes, self.x)
        for n in range(1, LEVELS + 1):
            some = quantize(self.codes, self.x, jnp.full(self.x.shape[:-1], n))
            chex.assert_trees_all_equal(some.codes, full.codes)
            np.testing.assert_allclose(some.quantized, rvq.dequantize(self.codes, full.codes[..., :n]), atol=1e-5)

    def test_number_of_levels_is_uniform_and_includes_the_last(self):
        draws = np.asarray(rvq.draw_levels(KEY, (10_000,), LEVELS))
        shares = np.bincount(draws, minlength=LEVELS + 1) / draws.size
        self.assertEqual(shares[0], 0)
        np.testing.assert_allclose(shares[1:], 1 / LEVELS, atol=0.02)  # 4.6 standard deviations
        half = np.asarray(rvq.draw_levels(KEY, (10_000,), LEVELS, 0.5))
        np.testing.assert_allclose((half == LEVELS).mean(), 0.5 + 0.5 / LEVELS, atol=0.025)
        np.testing.assert_array_equal(rvq.draw_levels(KEY, (50,), LEVELS, 0.0), np.full(50, LEVELS))

    def test_split_is_a_single_quantiser_beside_a_residual_one(self):
        x = jnp.concatenate([self.x, jax.random.normal(jax.random.key(7), self.x.shape)], -1)
        found = quantize(self.codes, x, split=True)
        first, rest = quantize(self.codes[:1], x[..., :WIDTH]), quantize(self.codes[1:], x[..., WIDTH:])
        np.testing.assert_array_equal(found.codes, jnp.concatenate([first.codes, rest.codes], -1))
        np.testing.assert_allclose(found.quantized, jnp.concatenate([first.quantized, rest.quantized], -1), atol=1e-6)
        np.testing.assert_allclose(found.commit, jnp.concatenate([first.commit, rest.commit], -1), atol=1e-6)
        np.testing.assert_allclose(rvq.dequantize(self.codes, found.codes, split=True), found.quantized, atol=1e-6)
        one = rvq.dequantize(self.codes, found.codes[..., :1], split=True)
        np.testing.assert_allclose(one[..., :WIDTH], first.quantized, atol=1e-6)
        np.testing.assert_array_equal(one[..., WIDTH:], 0)
        np.testing.assert_allclose(quantize(self.codes, x, jnp.ones((2, 5)), split=True).quantized, one, atol=1e-6)
        jacobian = jax.jacobian(lambda x: quantize(self.codes, x, split=True).quantized)(x[0, 0])
        np.testing.assert_array_equal(jacobian, np.eye(2 * WIDTH))
        state = update(books(self.codes), KEY, found, jnp.ones((2, 5)), decay=0.9, revive=0.0)
        alone = update(books(self.codes[1:]), KEY, rest, jnp.ones((2, 5)), decay=0.9, revive=0.0)
        chex.assert_trees_all_close(jax.tree.map(lambda a: a[1:], state), alone, atol=1e-6)


class CodebookTest(absltest.TestCase):
    def test_moving_average_by_hand(self):
        state = books([[[0.0], [10.0]]])
        x = jnp.array([[1.0], [2.0], [9.0], [100.0]])
        weight = jnp.array([1, 1, 1, 0])  # the last vector is padding
        after = update(state, KEY, quantize(state["codes"], x), weight, decay=0.9, revive=0.0)
        # counts .9 * 1 + .1 * (2, 1); sums .9 * (0, 10) + .1 * (3, 9).
        np.testing.assert_allclose(after["counts"], [[1.1, 1.0]], rtol=1e-6)
        np.testing.assert_allclose(after["sums"], [[[0.3], [9.9]]], rtol=1e-6)
        np.testing.assert_allclose(after["codes"], [[[0.3 / 1.1], [9.9]]], rtol=1e-4)

    def test_dead_code_is_replaced_by_a_vector_of_the_batch_and_never_by_padding(self):
        state = books([[[0.0], [1.0], [500.0]]])
        state["counts"] = jnp.array([[10.0, 10.0, 0.1]])
        state["sums"] = state["codes"] * state["counts"][..., None]
        x = jnp.array([[0.0], [1.0], [-7.0], [-7.0]])
        quantized, weight = quantize(state["codes"], x), jnp.array([1, 1, 0, 0])
        for seed in range(5):
            after = update(state, jax.random.key(seed), quantized, weight, decay=0.99, revive=0.1)
            self.assertIn(round(float(after["codes"][0, 2, 0]), 3), (0.0, 1.0))
            np.testing.assert_allclose(after["counts"][0, 2], after["counts"][0].sum() / 3, rtol=0.5)
            np.testing.assert_allclose(after["codes"][0, :2, 0], [0, 1], atol=0.01)
        kept = update(state, KEY, quantized, weight, decay=0.99, revive=0.0)
        np.testing.assert_allclose(kept["codes"][0, 2], 500, rtol=1e-3)

    def test_weighted_draws_follow_the_weights(self):
        draws = np.asarray(rvq.draw_weighted(KEY, jnp.array([0.0, 1.0, 0.0, 3.0, 0.0]), (10_000,)))
        np.testing.assert_allclose(np.bincount(draws, minlength=5) / 10_000, [0, 0.25, 0, 0.75, 0], atol=0.02)
        self.assertEqual(set(draws), {1, 3})

    def test_initialisation_finds_the_clusters_level_after_level(self):
        # Four far clusters; inside each the same two offsets: level 2 must find the offsets.
        centres = np.array([[0, 0], [50, 0], [0, 50], [50, 50]], np.float32)
        offsets = np.array([[2, 1], [-2, -1]], np.float32)
        points = (centres[:, None] + offsets[None]).reshape(-1, 2).repeat(20, 0)
        found = initialize(jax.random.key(1), jnp.asarray(points), levels=2, bins=4)
        nearest = lambda targets, codes: np.abs(targets[:, None] - codes[None]).sum(-1).min(1)  # noqa: E731
        np.testing.assert_allclose(nearest(centres, np.asarray(found["codes"][0])), 0, atol=1e-3)
        np.testing.assert_allclose(nearest(offsets, np.asarray(found["codes"][1])), 0, atol=1e-3)
        quantized = quantize(found["codes"], jnp.asarray(points))
        np.testing.assert_allclose(quantized.quantized, points, atol=1e-3)
        np.testing.assert_allclose(found["counts"][0], np.full(4, 40))

    def test_split_initialisation_gives_each_part_its_half(self):
        centres = np.array([[0, 0, 9, 0], [50, 0, 9, 50]], np.float32)
        found = initialize(jax.random.key(1), jnp.asarray(centres.repeat(20, 0)), levels=3, bins=2, split=True)
        chex.assert_shape(found["codes"], (3, 2, 2))
        for level, half in enumerate((centres[:, :2], centres[:, 2:])):
            distance = np.abs(half[:, None] - np.asarray(found["codes"][level])[None]).sum(-1).min(1)
            np.testing.assert_allclose(distance, 0, atol=1e-3)
        np.testing.assert_allclose(found["codes"][2], 0, atol=1e-3)

    def test_few_vectors_do_not_break_initialisation(self):
        found = initialize(KEY, jax.random.normal(KEY, (3, 2)), levels=2, bins=8)
        chex.assert_tree_all_finite(found)


if __name__ == "__main__":
    absltest.main()
