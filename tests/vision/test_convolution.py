"""Causal convolutions, frame norms and temporal sampling: golden values and independence of later frames."""

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax import lax

from ernie5_jax.vision.convolution import (
    CausalConv3d,
    FrameNorm,
    Stream,
    TemporalDown,
    TemporalUp,
    depth_to_space,
    space_to_depth,
)


def _fill(module, seed=0):
    rng = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_value(jnp.asarray(rng.normal(size=variable.get_value().shape), jnp.float32))
    return module


def _history(conv: CausalConv3d) -> nnx.Param:
    assert conv.history is not None
    return conv.history


def _random(*shape):
    return jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32)


class CausalConvTest(parameterized.TestCase):
    def test_replicate_padding_golden(self):
        conv = CausalConv3d("c", 1, 1, 3)
        _history(conv).set_value(jnp.zeros((2, 3, 3, 1, 1)).at[:, 1, 1, 0, 0].set(jnp.array([0.5, 0.25])))
        conv.kernel.set_value(jnp.zeros((3, 3, 1, 1)).at[1, 1].set(0.25))
        y = conv(jnp.arange(1.0, 6).reshape(5, 1, 1, 1), Stream([(1, 5)]))
        np.testing.assert_allclose(y.ravel(), [1, 1.25, 1.75, 2.75, 3.75], atol=1e-6)

    def test_equals_a_three_dimensional_convolution(self):
        conv, x = _fill(CausalConv3d("c", 3, 4, 3)), _random(2, 5, 4, 4, 3)
        padded = jnp.concatenate([x[:, :1], x[:, :1], x], axis=1)
        kernel = jnp.concatenate([_history(conv)[...], conv.kernel[...][None]])
        expected = lax.conv_general_dilated(
            padded, kernel, (1, 1, 1), ((0, 0), (1, 1), (1, 1)), dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
        )
        found = conv(x.reshape(10, 4, 4, 3), Stream([(2, 5)])).reshape(2, 5, 4, 4, 4)
        np.testing.assert_allclose(found, expected + conv.bias[...], atol=1e-4)

    def test_inflated_convolution_treats_every_frame_like_a_picture(self):
        conv, x = _fill(CausalConv3d("c", 3, 4, 3)), _random(5, 4, 4, 3)
        picture = np.concatenate([conv(frame[None], Stream([(1, 1)])) for frame in x])
        self.assertGreater(np.abs(conv(x, Stream([(1, 5)])) - picture)[1:].max(), 0.1)
        _history(conv).set_value(jnp.zeros_like(_history(conv)[...]))
        picture = np.concatenate([conv(frame[None], Stream([(1, 1)])) for frame in x])
        np.testing.assert_allclose(conv(x, Stream([(1, 5)])), picture, atol=1e-5)

    def test_groups_do_not_touch_each_other(self):
        conv, x = _fill(CausalConv3d("c", 3, 4, 3)), _random(2 + 3 * 4, 4, 4, 3)
        together = conv(x, Stream([(2, 1), (3, 4)]))
        apart = np.concatenate([conv(x[:2], Stream([(2, 1)])), conv(x[2:], Stream([(3, 4)]))])
        np.testing.assert_allclose(together, apart, atol=1e-5)


class FrameTest(parameterized.TestCase):
    def test_norm_looks_at_one_frame(self):
        norm, x = FrameNorm(3, 0.0), _random(4, 2, 2, 3) * jnp.array([1.0, 10, 0.1, 5]).reshape(4, 1, 1, 1)
        norm.scale.set_value(jnp.ones(3))
        np.testing.assert_allclose(jnp.mean(norm(x) ** 2, axis=(1, 2, 3)), np.ones(4), rtol=1e-5)

    def test_temporal_down_pairs_the_frames_after_the_first(self):
        down = TemporalDown(1)  # parameters are zero: the plain means remain
        stream = Stream([(1, 5)])
        np.testing.assert_allclose(down(jnp.arange(5.0).reshape(5, 1, 1, 1), stream).ravel(), [0, 1.5, 3.5])
        self.assertEqual(stream.clips, ((1, 3),))
        later = Stream([(1, 4)], past={})
        np.testing.assert_allclose(down(jnp.arange(4.0).reshape(4, 1, 1, 1), later).ravel(), [0.5, 2.5])

    @parameterized.parameters((1, 1), (2, 3), (17, 33))
    def test_temporal_up_does_not_double_the_first(self, frames, expected):
        up, stream = TemporalUp(1), Stream([(2, frames)])
        y = up(jnp.tile(jnp.arange(float(frames)), 2).reshape(-1, 1, 1, 1), stream)
        self.assertEqual(stream.clips, ((2, expected),))
        np.testing.assert_allclose(y[:expected].ravel(), np.repeat(np.arange(frames), 2)[1:])

    def test_space_to_depth_round_trip(self):
        x = _random(2, 4, 6, 3)
        chex.assert_shape(space_to_depth(x, 2), (2, 2, 3, 12))
        np.testing.assert_array_equal(space_to_depth(x, 2)[0, 1, 2].reshape(2, 2, 3), x[0, 2:4, 4:6])
        np.testing.assert_array_equal(depth_to_space(space_to_depth(x, 2), 2), x)


if __name__ == "__main__":
    absltest.main()
