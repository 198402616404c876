"""Resampling matrices, multi-scale residual bits and bitwise self-correction against the sources' golden values."""

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import SelfCorrectionConfig
from ernie5_jax.vision import ScalePyramid, VisionError
from ernie5_jax.vision.pyramid import area_matrix, flip_probabilities, linear_matrix

LATENTS = np.array([(0.9, -0.2), (0.4, 0.1), (-0.6, 0.3), (0.2, -0.8)], np.float32).reshape(1, 4, 1, 2)
PYRAMID = ScalePyramid(((1, 1), (2, 1), (4, 1)), 2)


class MatrixTest(chex.TestCase):
    def test_area_is_adaptive_average(self):
        third = 1 / 3
        expected = [(third, third, third, 0, 0), (0, 0, third, third, third)]
        np.testing.assert_allclose(area_matrix(5, 2), expected, rtol=1e-6)

    def test_linear_has_half_pixel_centres_and_clamped_edges(self):
        np.testing.assert_allclose(linear_matrix(2, 5), [(1, 0), (0.9, 0.1), (0.5, 0.5), (0.1, 0.9), (0, 1)], atol=1e-6)

    @parameterized.parameters(range(1, 9))
    def test_same_size_is_identity(self, size):
        np.testing.assert_array_equal(area_matrix(size, size), np.eye(size))
        np.testing.assert_array_equal(linear_matrix(size, size), np.eye(size))

    def test_two_dimensions_are_the_kronecker_product(self):
        pyramid = ScalePyramid(((2, 3), (5, 7)), 4)
        x = np.random.default_rng(0).normal(size=(3, 5, 7, 4)).astype(np.float32)
        expected = np.einsum("ah,bw,nhwc->nabc", area_matrix(5, 2), area_matrix(7, 3), x)
        np.testing.assert_allclose(pyramid.down(x, 0), expected, atol=1e-6)
        expected = np.einsum("ha,wb,nabc->nhwc", linear_matrix(2, 5), linear_matrix(3, 7), expected)
        np.testing.assert_allclose(pyramid.up(pyramid.down(x, 0), 0), expected, atol=1e-6)


class QuantizeTest(parameterized.TestCase):
    @parameterized.named_parameters(("numpy", np), ("jax", jnp))
    def test_golden_bits_and_errors(self, xp):
        bits = PYRAMID.quantize(xp.asarray(LATENTS))
        for found, expected in zip(bits, ([[1, 0]], [[0, 1]] * 2, [[1, 0], [1, 1], [0, 1], [1, 0]]), strict=True):
            np.testing.assert_array_equal(np.asarray(found).reshape(-1, 2), expected)
        acc, errors = xp.zeros((1, 4, 1, 2)), []
        for k in range(3):
            acc = PYRAMID.accumulate(acc, bits[k], k)
            errors.append(float(((acc - LATENTS) ** 2).mean()))
        np.testing.assert_allclose(errors, [0.503585, 0.268750, 0.150032], atol=1e-6)
        np.testing.assert_allclose(PYRAMID.dequantize(bits), acc, atol=1e-6)

    def test_self_correction_golden(self):
        flips = [np.array([True, False]).reshape(1, 1, 1, 2), np.zeros((1, 2, 1, 2), bool)]
        result = PYRAMID.teacher_forcing(LATENTS, flips)
        expected = [[1, 0], [1, 1], [1, 1], [1, 0], [1, 1], [0, 1], [1, 0]]
        np.testing.assert_array_equal(result.bits[0], expected)
        # The inputs of scale 2 are the flipped code of scale 1, and the flip is fully recovered at the end.
        np.testing.assert_allclose(result.inputs[0, 1:3], np.full((2, 2), -(0.5**0.5)), atol=1e-6)
        acc, errors = np.zeros_like(LATENTS), []
        for k, bits in enumerate(PYRAMID.split(result.bits)):
            acc = PYRAMID.accumulate(acc, bits ^ flips[k] if k < 2 else bits, k)
            errors.append(((acc - LATENTS) ** 2).mean())
        np.testing.assert_allclose(errors, [0.821783, 0.268750, 0.150032], atol=1e-6)
        np.testing.assert_allclose(result.quantized, acc, atol=1e-6)

    @parameterized.parameters(False, True)
    def test_teacher_forcing_equals_the_decode_loop(self, flip):
        pyramid = ScalePyramid(((1, 1), (2, 2), (3, 2), (5, 4)), 6)
        rng = np.random.default_rng(1)
        latents = rng.normal(size=(3, 5, 4, 6)).astype(np.float32)
        flips = pyramid.sample_flips(3, SelfCorrectionConfig(0.1, 0.4), rng) if flip else None
        result = pyramid.teacher_forcing(latents, flips)
        chex.assert_shape(result.bits, (3, pyramid.tokens, 6))
        acc, inputs = jnp.zeros((3, 5, 4, 6)), pyramid.split(result.inputs)
        for k, bits in enumerate(pyramid.split(result.bits)):
            np.testing.assert_allclose(pyramid.next_input(acc, k), inputs[k], atol=1e-6)
            acc = pyramid.accumulate(acc, jnp.asarray(bits ^ flips[k] if flips and k < 3 else bits), k)
        np.testing.assert_allclose(result.quantized, acc, atol=1e-6)
        np.testing.assert_allclose(result.summary, np.asarray(pyramid.summary(acc)).reshape(3, 1, 6), atol=1e-6)
        if not flip:
            np.testing.assert_array_equal(pyramid.flatten(pyramid.quantize(latents)), result.bits)

    def test_zero_residual_is_bit_zero_and_half_precision_is_widened(self):
        bits = PYRAMID.quantize(np.zeros((1, 4, 1, 2), np.float16))
        self.assertEqual(int(bits[0].sum()), 0)
        self.assertEqual(PYRAMID.teacher_forcing(LATENTS.astype(np.float16)).inputs.dtype, np.float32)

    def test_wrong_grid_and_missing_generator_are_named(self):
        with self.assertRaisesRegex(VisionError, r"found shape \(1, 2, 2, 2\)"):
            PYRAMID.quantize(np.zeros((1, 2, 2, 2), np.float32))
        with self.assertRaisesRegex(VisionError, "rng"):
            PYRAMID.teacher_forcing(LATENTS, SelfCorrectionConfig())
        with self.assertRaisesRegex(VisionError, "scales"):
            ScalePyramid(((2, 2), (1, 1)), 4)


class FlipTest(parameterized.TestCase):
    def test_probabilities_follow_the_ramp_and_inherit(self):
        config = SelfCorrectionConfig(flip_min=0.05, flip_max=0.2, frame_delta=0.03)
        p = np.stack([flip_probabilities(4, 3, config, np.random.default_rng(seed)) for seed in range(4000)])
        for y in range(4):
            low, high = 0.05 + 0.03 * y, 0.2 + 0.03 * y
            np.testing.assert_allclose(p[:, y, 1:].mean(), (low + high) / 2, atol=2e-3)
            self.assertGreaterEqual(p[:, y].min(), low - 0.03)
            self.assertLessEqual(p[:, y].max(), high + 1e-6)
        self.assertTrue((p[:, 1:, 0] >= p[:, :-1, -1] - 1e-6).all())
        np.testing.assert_allclose(p[:, 1, 0].mean(), ((0.05 + 0.2) / 2 + 0.23) / 2, atol=2e-3)

    def test_flips_have_the_asked_rate_and_spare_the_last_scale(self):
        pyramid = ScalePyramid(((1, 1), (2, 2), (4, 4)), 16)
        flips = pyramid.sample_flips(500, SelfCorrectionConfig(0.25, 0.25, 0.0), np.random.default_rng(0))
        self.assertEqual([f.shape for f in flips], [(500, 1, 1, 16), (500, 2, 2, 16)])
        np.testing.assert_allclose([f.mean() for f in flips], 0.25, atol=0.015)

    def test_no_flips_at_rate_zero(self):
        flips = PYRAMID.sample_flips(5, SelfCorrectionConfig(0.0, 0.0, 0.0), np.random.default_rng(0))
        self.assertFalse(any(f.any() for f in flips))


if __name__ == "__main__":
    absltest.main()
