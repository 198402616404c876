"""Binary spherical quantisation against golden values, and its residual form against the scale pyramid."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.vision import ScalePyramid
from ernie5_jax.vision.quantizer import bit_probabilities, residual_bsq
from ernie5_jax.vision.quantizer import bsq as eager_bsq

bsq = jax.jit(eager_bsq, static_argnames="temperature")
Z = jnp.array([0.3, -0.1, 0.2, -0.4])
PYRAMID = ScalePyramid(((1, 1), (2, 2), (4, 4)), 6)


class BsqTest(parameterized.TestCase):
    def test_golden(self):
        out = bsq(Z, temperature=1.0)
        np.testing.assert_allclose(out.quantized, (0.5, -0.5, 0.5, -0.5), atol=1e-6)
        np.testing.assert_array_equal(out.bits, (1, 0, 1, 0))
        self.assertEqual(int("".join(map(str, out.bits.tolist())), 2), 10)
        np.testing.assert_allclose(out.commit, 0.0435645, atol=1e-7)
        np.testing.assert_allclose(out.sample_entropy, 2.354277, atol=1e-6)
        p = bit_probabilities(Z / jnp.linalg.norm(Z), 1.0)
        np.testing.assert_allclose(p, (0.749406, 0.409714, 0.674870, 0.188377), atol=1e-6)

    def test_zero_is_minus(self):
        np.testing.assert_array_equal(bsq(jnp.zeros((4,))).bits, np.zeros(4))

    @parameterized.parameters((4, 0.302347), (16, 0.379118), (32, 0.391717), (48, 0.395899), (64, 0.397985))
    def test_error_of_random_directions(self, width, expected):
        z = np.random.default_rng(0).normal(size=(40000, width))
        np.testing.assert_allclose(bsq(jnp.asarray(z)).commit * width, expected, rtol=6e-3)

    def test_straight_through_gradient_is_that_of_the_direction(self):
        weights = jnp.array([1.0, -2.0, 0.5, 3.0])
        found = jax.grad(lambda z: bsq(z).quantized @ weights)(Z)
        expected = jax.grad(lambda z: z / jnp.linalg.norm(z) @ weights)(Z)
        np.testing.assert_allclose(found, expected, atol=1e-5)

    def test_entropy_terms_tell_collapse_from_balance(self):
        signs = np.sign(np.random.default_rng(0).normal(size=(4096, 8))).astype(np.float32)
        balanced, collapsed = bsq(jnp.asarray(signs)), bsq(jnp.ones((4096, 8)))
        np.testing.assert_allclose(balanced.batch_entropy, [8 * math.log(2)], rtol=1e-3)
        np.testing.assert_allclose(collapsed.batch_entropy, [0], atol=2e-4)
        np.testing.assert_allclose([balanced.sample_entropy, collapsed.sample_entropy], 0, atol=1e-5)
        self.assertLess(balanced.entropy_loss(), collapsed.entropy_loss())

    def test_gradients_are_finite_for_sure_bits_and_zeros(self):
        def loss(z):
            out = bsq(z)
            return out.entropy_loss() + out.commit

        chex.assert_tree_all_finite(jax.jit(jax.grad(loss))(jnp.array([[100.0, -3, 1e-9], [0, 0, 0]])))


class ResidualTest(parameterized.TestCase):
    def test_same_bits_and_sum_as_the_pyramid(self):
        latents = np.random.default_rng(0).normal(size=(5, 4, 4, 6)).astype(np.float32) * 0.5
        out = jax.jit(lambda z: residual_bsq(z, PYRAMID))(latents)
        chex.assert_trees_all_equal([np.asarray(b) for b in out.bits], PYRAMID.quantize(latents))
        np.testing.assert_allclose(out.quantized, PYRAMID.dequantize(PYRAMID.quantize(latents)), atol=1e-6)
        np.testing.assert_allclose(out.commit, 6 * np.mean((latents - out.quantized) ** 2), rtol=1e-5)
        chex.assert_shape(out.batch_entropy, (3,))

    def test_gradient_of_the_sum_is_the_identity(self):
        latents = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 4, 6)))
        weights = jnp.asarray(np.random.default_rng(2).normal(size=latents.shape))
        gradient = jax.jit(jax.grad(lambda z: jnp.sum(residual_bsq(z, PYRAMID).quantized * weights)))(latents)
        np.testing.assert_allclose(gradient, weights, atol=1e-6)


if __name__ == "__main__":
    absltest.main()
