"""The optimiser step: router bias rule, accumulation, NaN guard, precision; on a stand-in model."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import OptimizerConfig, TrainingConfig
from ernie5_jax.testing import dummy_batch, tiny_model_config
from ernie5_jax.training import init_state, make_train_step, split_micro_batches
from ernie5_jax.training.metrics import summarize
from ernie5_jax.training.precision import cast_params
from ernie5_jax.training.step import update_router_bias
from tests.training.helpers import bag_of_tokens, small_experiment

MODEL = tiny_model_config(num_moe_layers=1, levels_per_codec_layer=3, mtp_depth=0, elastic=False)


class RouterBiasTest(chex.TestCase):
    def test_golden(self):
        bias = jnp.zeros((2, 4))
        counts = jnp.array([[13.0, 1, 1, 1], [0, 0, 0, 0]])
        new = update_router_bias(bias, counts, 1e-3)
        np.testing.assert_allclose(new, [[-1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3], [0] * 4], rtol=1e-5)

    def test_a_layer_without_eligible_rows_keeps_its_bias(self):
        bias = jnp.array([[0.3, -0.1]])
        np.testing.assert_array_equal(update_router_bias(bias, jnp.zeros((1, 2)), 1e-3), bias)

    def test_recentring_keeps_the_mean_at_zero_and_the_selection(self):
        """Report 23."""
        random = np.random.default_rng(0)
        bias, plain = jnp.zeros((3, 8)), np.zeros((3, 8))
        for _ in range(50):
            counts = random.integers(0, 9, (3, 8)).astype(np.float32)
            bias = update_router_bias(bias, jnp.asarray(counts), 1e-2)
            plain = plain + 1e-2 * np.sign(counts.mean(-1, keepdims=True) - counts)
        np.testing.assert_allclose(bias.mean(-1), 0, atol=1e-7)
        self.assertGreater(np.abs(plain.mean(-1)).max(), 1e-2)  # without it the mean drifts
        scores = random.random((100, 3, 8))
        np.testing.assert_array_equal((scores + np.asarray(bias)).argmax(-1), (scores + plain).argmax(-1))

    def test_the_bias_is_no_parameter(self):
        """Report 25: the optimiser never sees it."""
        state = jax.eval_shape(lambda: init_state(small_experiment(MODEL)))
        for tree in (state["params"], state["ema_params"], *state["opt_state"].values()):
            for path, _ in jax.tree_util.tree_leaves_with_path(tree):
                self.assertNotIn("bias", jax.tree_util.keystr(path))
        self.assertEqual(state["router_bias"].shape, (2, 8))

    def test_balanced_load_moves_nothing(self):
        np.testing.assert_array_equal(update_router_bias(jnp.zeros((1, 2)), jnp.full((1, 2), 5.0), 1e-3), [[0, 0]])


class StepTest(chex.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # eps keeps the first update proportional to the gradient, so that gradients are compared and not their signs.
        optimizer = OptimizerConfig(learning_rate=0.1, warmup_steps=0, decay_fraction=0.0, eps=1.0, clip_norm=0.0)
        cls.config = small_experiment(MODEL, optimizer=optimizer)
        cls.batch = dummy_batch(MODEL, rows=4)
        cls.step = staticmethod(jax.jit(make_train_step(cls.config, bag_of_tokens(MODEL))))
        cls.state = jax.jit(lambda: init_state(cls.config))()
        cls.new, cls.metrics = cls.step(cls.state, split_micro_batches(cls.batch, 1), None)

    def test_micro_batches_change_nothing(self):
        new, metrics = self.step(self.state, split_micro_batches(self.batch, 2), None)
        chex.assert_trees_all_close(new, self.new, atol=1e-6)
        chex.assert_trees_all_close(metrics, self.metrics, rtol=1e-5, atol=1e-6)

    def test_the_loss_is_the_weighted_mean_and_its_gradient_moves_the_parameters(self):
        apply = bag_of_tokens(MODEL)
        below = self.batch.denominators

        def loss(params):
            output = apply(params, jnp.zeros(()), self.batch)
            slots = self.batch.targets["text"]
            picked = jnp.take_along_axis(jax.nn.log_softmax(output.text_logits), slots.values["token"][..., None], -1)
            text = -(picked[..., 0] * slots.weight).sum() / below["text"]
            slots = self.batch.targets["visual"]
            sign = jnp.where(slots.values["bits"] > 0, 1, -1)
            bits = -jax.nn.log_sigmoid(sign * output.visual_logits).mean(-1) * slots.weight
            video = slots.values["is_video"]
            image = jnp.where(video, 0, bits).sum() / below["image"]
            return text + image + jnp.where(video, bits, 0).sum() / below["video"]

        value, grads = jax.value_and_grad(loss)(self.state["params"])
        self.assertAlmostEqual(float(self.metrics["loss"]), float(value), places=4)
        mu = jax.tree.map(lambda m: m / 0.1, self.new["opt_state"]["mu"])
        chex.assert_trees_all_close(mu, grads, atol=1e-6)

    def test_running_losses_and_bias(self):
        ema = self.new["loss_weight_ema"]
        text = self.metrics["sums"]["text"] / self.batch.denominators["text"]
        self.assertAlmostEqual(float(ema["text"]), float(text), places=5)
        self.assertEqual(float(ema["audio"]), 0.0)  # the stand-in has no such head: its sum is 0
        np.testing.assert_allclose(self.new["router_bias"].mean(-1), 0, atol=1e-9)
        self.assertLess(float(self.new["router_bias"][0, 0]), 0)

    def test_weights_are_read_before_the_step(self):
        _, second = self.step(self.new, split_micro_batches(self.batch, 1), None)
        self.assertEqual(float(self.metrics["modality_weights"]["image"]), 1.0)
        ema = self.new["loss_weight_ema"]
        expected = min(10.0, float(ema["text"] / ema["image"]))
        self.assertAlmostEqual(float(second["modality_weights"]["image"]), expected, places=4)

    @parameterized.parameters(float("nan"), float("inf"))
    def test_a_step_that_is_not_finite_is_rejected_whole(self, value):
        table = self.state["params"]["embedding"]["text"]
        embedding = {**self.state["params"]["embedding"], "text": table.at[-1].set(value).at[70:].set(value)}
        bad = {**self.state, "params": {**self.state["params"], "embedding": embedding}}
        new, metrics = self.step(bad, split_micro_batches(self.batch, 1), None)
        self.assertFalse(bool(metrics["accepted"]))
        chex.assert_trees_all_equal(new, bad)

    def test_an_accepted_step_counts(self):
        self.assertTrue(bool(self.metrics["accepted"]))
        self.assertEqual(int(self.new["step"]), 1)

    def test_summary(self):
        record = summarize(jax.device_get(self.metrics), self.config.model)
        self.assertEqual((record["live_layers"], record["live_experts"], record["top_k"]), (2, 8, 2))
        self.assertLen(record["bit_accuracy"], MODEL.visual_scales)
        np.testing.assert_allclose(record["normalized_entropy"], [0, 0], atol=1e-9)
        np.testing.assert_allclose(record["max_violation"], [7, 7])
        self.assertNotIn("code_accuracy", record)
        text = float(self.metrics["sums"]["text"])
        per_byte = text / np.log(2) / float(self.batch.denominators["text_bytes"])
        self.assertAlmostEqual(record["bits_per_byte"], per_byte, places=4)


class PrecisionTest(chex.TestCase):
    def test_router_and_norms_stay_in_float32(self):
        axes = {"norm": ("norm",), "router": ("layers", "embed", "router_experts"), "w": ("embed", "mlp")}
        params = {"norm": jnp.ones(2), "router": jnp.ones((1, 2, 2)), "w": jnp.ones((2, 2))}
        cast = cast_params(params, axes, "bfloat16")
        self.assertEqual(
            {k: v.dtype.name for k, v in cast.items()}, {"norm": "float32", "router": "float32", "w": "bfloat16"}
        )
        self.assertIs(cast_params(params, axes, "float32"), params)

    def test_master_parameters_and_gradients_are_float32(self):
        config = small_experiment(MODEL, training=TrainingConfig(batch_rows=4, precision="bfloat16"))
        batch = split_micro_batches(dummy_batch(MODEL, rows=4), 1)
        state = jax.eval_shape(lambda: init_state(config))
        new, metrics = jax.eval_shape(make_train_step(config), state, batch, None)
        for leaf in jax.tree.leaves((new["params"], new["opt_state"], new["ema_params"], metrics["loss"])):
            self.assertEqual(leaf.dtype, jnp.float32)


if __name__ == "__main__":
    absltest.main()
