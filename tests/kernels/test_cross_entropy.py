"""Loss of a linear readout in chunks, against the plain formula."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import ParallelConfig
from ernie5_jax.kernels.cross_entropy import dense_cross_entropy, linear_cross_entropy
from ernie5_jax.parallel import make_mesh, sum_over_tokens


def case(seed: int, rows: int, width: int, vocabulary: int, dtype=jnp.float32):
    """Some rows of weight 0; logits far from 0."""
    rng = np.random.default_rng(seed)
    weight = rng.random(rows) * (rng.random(rows) < 0.8)
    hidden, kernel = rng.normal(size=(rows, width)), 2 * rng.normal(size=(width, vocabulary))
    labels = jnp.asarray(rng.integers(vocabulary, size=rows))
    return jnp.asarray(hidden, dtype), labels, jnp.asarray(weight, dtype), jnp.asarray(kernel, dtype)


def value_and_gradients(loss, hidden, labels, weight, kernel):
    function = lambda hidden, kernel: 3 * loss(hidden, labels, weight, kernel)  # noqa: E731
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(hidden, kernel)


class LinearCrossEntropyTest(parameterized.TestCase):
    @parameterized.parameters(
        *((seed, int(rows), int(width), int(vocabulary), int(chunk))
          for seed, (rows, width, vocabulary, chunk) in enumerate(
              np.random.default_rng(5).integers((1, 1, 1, 1), (70, 9, 40, 80), (60, 4))))
    )  # fmt: skip
    def test_values_and_gradients_equal_the_plain_formula(self, seed, rows, width, vocabulary, chunk):
        arguments = case(seed, rows, width, vocabulary)
        chunked = functools.partial(linear_cross_entropy, chunk=chunk)
        found, wanted = (value_and_gradients(f, *arguments) for f in (chunked, dense_cross_entropy))
        chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(chunked(*arguments) * 3, wanted[0], rtol=1e-5, atol=1e-5)

    def test_double_precision(self):
        with jax.enable_x64(True):
            arguments = case(1, 50, 8, 30, jnp.float64)
            found, wanted = (value_and_gradients(f, *arguments) for f in (linear_cross_entropy, dense_cross_entropy))
            chex.assert_trees_all_close(found, wanted, rtol=1e-12)

    def test_half_precision_sums_in_float32(self):
        arguments = case(2, 600, 16, 30)
        halves = [a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a for a in arguments]
        halves[2] = arguments[2]
        loss, (dhidden, dkernel) = value_and_gradients(linear_cross_entropy, *halves)
        self.assertEqual((loss.dtype, dhidden.dtype, dkernel.dtype), (jnp.float32, jnp.bfloat16, jnp.bfloat16))
        wide = [h.astype(jnp.float32) if h.dtype == jnp.bfloat16 else h for h in halves]
        wanted = value_and_gradients(dense_cross_entropy, *wide)
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(dkernel.astype(jnp.float32), wanted[1][1], atol=0.02 * np.abs(wanted[1][1]).max())

    def test_rows_that_do_not_count_may_hold_anything(self):
        hidden, labels, weight, kernel = case(3, 40, 8, 30)
        poisoned = jnp.where((weight > 0)[:, None], hidden, jnp.nan)
        wanted = value_and_gradients(linear_cross_entropy, hidden, labels, weight, kernel)
        found = value_and_gradients(linear_cross_entropy, poisoned, labels, weight, kernel)
        chex.assert_trees_all_equal(found, wanted)

    @parameterized.parameters(37, 40)
    def test_rows_over_devices(self, rows):
        arguments = case(4, rows, 8, 30)
        with jax.set_mesh(make_mesh(ParallelConfig(data=8))):
            found = value_and_gradients(sum_over_tokens(linear_cross_entropy, 3), *arguments)
        wanted = value_and_gradients(dense_cross_entropy, *arguments)
        chex.assert_trees_all_close(jax.device_get(found), wanted, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    absltest.main()
