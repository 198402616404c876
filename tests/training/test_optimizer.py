"""AdamW against optax, schedules against their definitions."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from ernie5_jax.config import OptimizerConfig
from ernie5_jax.model import logical_axes
from ernie5_jax.parallel import path_name
from ernie5_jax.testing import tiny_model_config
from ernie5_jax.training import learning_rate
from ernie5_jax.training.optimizer import adamw_update, average, decay_labels, global_norm, init_optimizer


class AdamWTest(chex.TestCase):
    @parameterized.parameters(0.0, 0.5)
    def test_equals_optax(self, clip):
        config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, clip_norm=clip, beta2=0.98)
        axes = {"w": ("embed", "mlp"), "stack": ("layers", "norm"), "scale": ("norm",)}
        labels = decay_labels(axes)
        self.assertEqual(labels, {"w": True, "stack": False, "scale": False})
        params = {
            "w": jax.random.normal(jax.random.key(0), (4, 3)),
            "stack": jnp.ones((2, 3)),
            "scale": jnp.full(3, 2.0),
        }
        adam = optax.adamw(0.01, config.beta1, config.beta2, config.eps, weight_decay=0.1, mask=labels)
        oracle = optax.chain(optax.clip_by_global_norm(clip), adam) if clip else adam
        state, expected, expected_state = init_optimizer(params), params, oracle.init(params)
        for step in range(5):
            grads = jax.tree.map(lambda p, s=step: jnp.sin(p * (s + 1)), params)
            updates, expected_state = oracle.update(grads, expected_state, expected)
            expected = optax.apply_updates(expected, updates)
            params, state = adamw_update(
                params,
                grads,
                state,
                step=jnp.int32(step),
                rate=jnp.float32(0.01),
                norm=global_norm(grads),
                accepted=jnp.asarray(True),
                labels=labels,
                config=config,
            )
            grads_of_both_must_agree = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, expected)
            self.assertLess(max(jax.tree.leaves(grads_of_both_must_agree)), 1e-6)

    def test_only_matrices_decay_in_the_model(self):
        labels = decay_labels(logical_axes(tiny_model_config()))
        for path, decays in jax.tree_util.tree_leaves_with_path(labels):
            self.assertEqual(decays, not path_name(path).endswith("/scale"), path_name(path))

    def test_average_warms_up(self):
        ema, params = {"w": jnp.zeros(())}, {"w": jnp.ones(())}
        self.assertAlmostEqual(float(average(ema, params, jnp.int32(0), 0.99)["w"]), 0.9, places=6)
        self.assertAlmostEqual(float(average(ema, params, jnp.int32(10**6), 0.99)["w"]), 0.01, places=6)


class ScheduleTest(parameterized.TestCase):
    def rates(self, steps: int = 20, **config) -> np.ndarray:
        config = OptimizerConfig(learning_rate=1.0, end_learning_rate=0.1, warmup_steps=4, **config)
        return np.array([float(learning_rate(step, config, steps)) for step in range(steps + 3)])

    def test_wsd(self):
        rates = self.rates(schedule="wsd", decay_fraction=0.5)
        np.testing.assert_allclose(rates[:10], [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1], rtol=1e-6)
        np.testing.assert_allclose(rates[10:20], 1 - 0.09 * np.arange(1, 11), rtol=1e-5)
        np.testing.assert_allclose(rates[19:], 0.1, rtol=1e-5)

    def test_wsd_without_decay(self):
        rates = self.rates(schedule="wsd", decay_fraction=0.0)
        np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1, 1], rtol=1e-6)
        self.assertEqual(rates[-1], 1)

    def test_wsd_where_warm_up_and_decay_would_overlap(self):
        rates = self.rates(schedule="wsd", decay_fraction=1.0)
        np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1], rtol=1e-6)
        np.testing.assert_allclose(rates[3:20], 1 - 0.9 / 16 * np.arange(17), rtol=1e-5)

    def test_cosine(self):
        rates = self.rates(schedule="cosine")
        np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1], rtol=1e-6)
        np.testing.assert_allclose(rates[11], 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)), rtol=1e-5)
        np.testing.assert_allclose(rates[19:], 0.1, rtol=1e-5)

    def test_no_warm_up(self):
        config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, decay_fraction=0.0)
        self.assertEqual(float(learning_rate(0, config, 10)), 1.0)


if __name__ == "__main__":
    absltest.main()
