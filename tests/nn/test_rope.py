"""Uni-RoPE (components 1.3)."""

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.nn import apply_rope, axis_of_pair, uni_rope


class UniRopeTest(parameterized.TestCase):
    def test_sections_of_64_pairs(self):
        axes = axis_of_pair(64)
        self.assertEqual([int((axes == a).sum()) for a in range(3)], [20, 22, 22])
        np.testing.assert_array_equal(axes[:4], [1, 2, 1, 2])
        np.testing.assert_array_equal(axes[44:], np.zeros(20))

    @parameterized.parameters("interleaved", "half")
    def test_equal_axes_give_one_dimensional_rope(self, pairing):
        rng = np.random.default_rng(0)
        width, length = 16, 12
        x = rng.normal(size=(1, length, 2, width)).astype(np.float32)
        position = np.repeat(np.arange(length, dtype=np.float32)[None, :, None], 3, axis=-1)
        out = apply_rope(jnp.asarray(x), *uni_rope(jnp.asarray(position), width, 1e4), pairing)
        angle = np.arange(length)[:, None] * 1e4 ** (-np.arange(0, width, 2) / width)
        turn = np.exp(1j * angle)[None, :, None]
        first, second = (x[..., ::2], x[..., 1::2]) if pairing == "interleaved" else np.split(x, 2, axis=-1)
        turned = (first + 1j * second) * turn
        expected = np.empty_like(x)
        if pairing == "interleaved":
            expected[..., ::2], expected[..., 1::2] = turned.real, turned.imag
        else:
            expected = np.concatenate([turned.real, turned.imag], axis=-1)
        chex.assert_trees_all_close(out, expected.astype(np.float32), atol=2e-6)  # float32 sines of angles up to 11

    @parameterized.parameters(1e4, 5e5, 1e6)
    def test_degeneracy_in_the_precision_of_the_model(self, base):
        """Components 1.3: t = h = w is 1-D interleaved RoPE, at any index of a long sequence (<= 1e-6)."""
        length, width = 4096, 128
        index = jnp.arange(length, dtype=jnp.float32)
        cos, sin = uni_rope(jnp.broadcast_to(index[:, None], (length, 3)), width, base)
        angle = index[:, None] * jnp.asarray(base ** (-np.arange(0, width, 2) / width), jnp.float32)
        chex.assert_trees_all_close((cos, sin), (jnp.cos(angle), jnp.sin(angle)), rtol=0, atol=1e-6)

    def test_pairs_turn_with_their_own_axis(self):
        position = jnp.asarray([[[2.0, 3.0, 5.0]]])
        cos, _ = uni_rope(position, 128, 10_000.0)
        frequency = 10_000.0 ** (-np.arange(64) / 64)
        chex.assert_trees_all_close(cos[0, 0, 0], np.float32(np.cos(3.0 * frequency[0])), atol=1e-6)
        chex.assert_trees_all_close(cos[0, 0, 1], np.float32(np.cos(5.0 * frequency[1])), atol=1e-6)
        chex.assert_trees_all_close(cos[0, 0, 50], np.float32(np.cos(2.0 * frequency[50])), atol=1e-6)


if __name__ == "__main__":
    absltest.main()
