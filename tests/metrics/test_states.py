"""Mergeable metric states."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax import metrics


class StatesTest(parameterized.TestCase):
    def test_bits_per_byte_golden(self):
        # 2 nats per token, 3.5 bytes per token.
        state = metrics.BitsPerByte.from_losses(jnp.array([2.0, 2.0, 9.0]), 7, weight=jnp.array([1, 1, 0]))
        np.testing.assert_allclose(state.compute(), 0.824397, atol=1e-6)

    def test_weighted_mean(self):
        state = metrics.Mean.from_values(jnp.array([[1.0, 3.0], [jnp.nan, 5.0]]), jnp.array([[1, 2], [0, 1]]))
        self.assertEqual(float(state.compute()), (1 + 6 + 5) / 4)
        self.assertTrue(np.isnan(metrics.Mean.from_values(jnp.zeros(0)).compute()))

    def test_accuracy_per_level(self):
        target = jnp.array([[1, 2, 3], [4, 5, 6]])
        predicted = jnp.array([[1, 2, 0], [4, 0, 0]])
        weight = jnp.array([[1.0], [3.0]])
        state = metrics.accuracy_by_index(predicted, target, jnp.arange(3), 3, weight)
        chex.assert_trees_all_close(state.compute(), jnp.array([1.0, 0.25, 0.0]))
        self.assertEqual(float(metrics.accuracy(predicted, target).compute()), 0.5)

    def test_bit_accuracy_per_scale(self):
        bits = jnp.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
        logits = jnp.array([[2.0, -1, -1, 3], [-1, -1, -1, 5], [1, 1, 1, 1], [-1, 1, 1, 1], [1, 1, 1, 1]])
        scale = jnp.array([0, 0, 2, 3, -1])  # the last two are no scales of a pyramid of three
        state = metrics.bit_accuracy(logits, bits, scale, 3)
        chex.assert_trees_all_equal(state.count, jnp.array([2.0, 0.0, 1.0]))
        np.testing.assert_allclose(state.compute(), [0.75, np.nan, 1.0])

    def test_parts_merge_to_the_whole(self):
        random = np.random.default_rng(0)
        losses, weight = random.random((8, 6)), random.integers(0, 3, (8, 6))
        index = random.integers(0, 4, (8, 6))

        @jax.jit
        def states(losses, weight, index):
            return {
                "loss": metrics.Mean.from_values(losses, weight),
                "text": metrics.BitsPerByte.from_losses(losses, jnp.sum(weight, axis=1), weight),
                "levels": {"accuracy": metrics.accuracy_by_index(index, 2 * index, index, 4, weight)},
            }

        whole = metrics.compute(states(losses, weight, index))
        parts = states(losses[:1], weight[:1], index[:1])
        for cut in (slice(1, 3), slice(3, 8)):
            parts = metrics.merge(parts, states(losses[cut], weight[cut], index[cut]))
        chex.assert_trees_all_close(metrics.compute(parts), whole, rtol=1e-6)
        np.testing.assert_allclose(whole["loss"], (losses * weight).sum() / weight.sum(), rtol=1e-6)
        nats = (losses * weight).sum() / np.log(2) / weight.sum()
        np.testing.assert_allclose(whole["text"], nats, rtol=1e-6)

    def test_host_counts_exactly(self):
        one = metrics.to_host(metrics.Mean.from_values(jnp.ones(())))
        many = metrics.Mean(np.float64(2.0**24), np.float64(2.0**24))  # float32 stops counting here
        self.assertEqual(metrics.merge(many, one).count, 2**24 + 1)
        self.assertEqual(metrics.compute(metrics.merge(many, one)), 1.0)

    def test_low_precision_values_are_summed_in_float32(self):
        state = metrics.Mean.from_values(jnp.ones(1000, jnp.bfloat16))
        self.assertEqual(state.total.dtype, jnp.float32)
        self.assertEqual(float(state.total), 1000.0)


if __name__ == "__main__":
    absltest.main()
