"""The loss contract against values worked out by hand and by numpy."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import LossConfig
from ernie5_jax.kernels.cross_entropy import cross_entropy
from ernie5_jax.model import ModelOutput, RouterStats, full_mask
from ernie5_jax.model.heads import Readout
from ernie5_jax.sequence import Batch
from ernie5_jax.testing import dummy_batch, tiny_model_config
from ernie5_jax.training import objective

MODEL = tiny_model_config()


def random_output(batch: Batch, seed: int = 0) -> ModelOutput:
    """Random logits of the model's shapes; those of text are read out by the identity."""
    keys = jax.random.split(jax.random.key(seed), 4)
    rows, slots = batch.targets["text"].index.shape
    depth, visual = batch.targets["mtp"].index.shape[1], batch.targets["visual"].index.shape[1]
    audio = batch.targets["audio"].index.shape[1]
    text = jax.random.normal(keys[0], (rows, slots, MODEL.vocab_size))
    mtp = jax.random.normal(keys[1], (rows, depth, slots, MODEL.vocab_size))
    stats = RouterStats(jnp.ones((4, 8)), jnp.ones((4, 8)), jnp.arange(4.0), jnp.ones(4))
    return ModelOutput(
        hidden=None,
        text=Readout(text, jnp.eye(MODEL.vocab_size)),
        mtp=Readout(mtp, jnp.eye(MODEL.vocab_size)),
        visual_logits=jax.random.normal(keys[2], (rows, visual, MODEL.visual_bits)),
        audio_logits=jax.random.normal(keys[3], (rows, audio, MODEL.audio_levels, MODEL.audio_bins + 1)),
        audio_codes=None,
        router=stats,
        cache=None,
    )


class SumsTest(chex.TestCase):
    def setUp(self):
        super().setUp()
        self.batch = dummy_batch(MODEL, rows=3)
        self.output = random_output(self.batch)
        self.sums = objective.loss_sums(self.output, self.batch)

    def test_text_is_cross_entropy_of_each_slot(self):
        slots, logits = self.batch.targets["text"], np.asarray(self.output.text_logits, np.float64)
        total = 0.0
        for row, slot in zip(*np.nonzero(slots.weight), strict=True):
            p = np.exp(logits[row, slot]) / np.exp(logits[row, slot]).sum()
            total -= slots.weight[row, slot] * math.log(p[slots.values["token"][row, slot]])
        self.assertAlmostEqual(float(self.sums["text"]), total, delta=1e-4 * total)

    def test_bits_are_averaged_and_images_kept_apart_from_videos(self):
        slots, logits = self.batch.targets["visual"], np.asarray(self.output.visual_logits, np.float64)
        p = 1 / (1 + np.exp(-logits))
        loss = -np.log(np.where(slots.values["bits"] > 0, p, 1 - p)).mean(-1) * slots.weight
        video = slots.values["is_video"]
        self.assertAlmostEqual(float(self.sums["image"]), loss[~video].sum(), delta=1e-3)
        self.assertAlmostEqual(float(self.sums["video"]), loss[video].sum(), delta=1e-3)
        self.assertGreater(float(self.sums["video"]), 0)

    def test_every_codec_level_counts(self):
        slots = self.batch.targets["audio"]
        log_p = np.asarray(jax.nn.log_softmax(self.output.audio_logits), np.float64)
        picked = np.take_along_axis(log_p, slots.values["codes"][..., None].astype(int), -1)[..., 0]
        self.assertAlmostEqual(float(self.sums["audio"]), -(picked * slots.weight).sum(), delta=1e-3)

    def test_z_is_summed_over_layers(self):
        self.assertEqual(float(self.sums["z"]), 6.0)

    def test_rows_add_up(self):
        def part(rows: slice) -> dict:
            keep = lambda tree: jax.tree.map(lambda x: x[rows], tree)  # noqa: E731
            fields = {f.name: keep(getattr(self.batch, f.name)) for f in dataclasses.fields(Batch)[:-1]}
            parts = {n: keep(getattr(self.output, n)) for n in ("visual_logits", "audio_logits")}
            for name in ("text", "mtp"):
                readout = getattr(self.output, name)
                parts[name] = dataclasses.replace(readout, hidden=keep(readout.hidden))
            output = dataclasses.replace(self.output, **parts)
            return objective.loss_sums(output, Batch(**fields, denominators=self.batch.denominators))

        first, second = part(slice(0, 1)), part(slice(1, 3))
        for name in (*objective.MODALITIES, "mtp"):
            self.assertAlmostEqual(float(first[name] + second[name]), float(self.sums[name]), delta=2e-3)

    def test_empty_slots_cannot_poison_the_sum(self):
        slots = self.batch.targets["text"]
        logits = jnp.where(jnp.asarray(slots.weight > 0)[..., None], self.output.text_logits, jnp.nan)
        output = dataclasses.replace(self.output, text=Readout(logits, jnp.eye(MODEL.vocab_size)))
        sums = objective.loss_sums(output, self.batch)
        self.assertEqual(float(sums["text"]), float(self.sums["text"]))

    def test_bit_cross_entropy_golden(self):
        logits, bits = jnp.array([[0.0, math.log(3.0)]]), jnp.array([[1, 0]], jnp.int8)
        expected = (math.log(2) + math.log(4)) / 2
        self.assertAlmostEqual(float(objective.bit_cross_entropy(logits, bits)[0]), expected, places=6)

    def test_losses_without_any_knowledge(self):
        """Components 1.6.1: ln 2 = .693147 per bit; ln of the classes elsewhere."""
        self.assertAlmostEqual(float(objective.bit_cross_entropy(jnp.zeros(12), jnp.ones(12, jnp.int8))), 0.693147, 6)
        self.assertAlmostEqual(float(cross_entropy(jnp.zeros(16), jnp.int32(3))), 2.772589, places=6)

    def test_denominators_are_the_weights(self):
        targets, below = self.batch.targets, self.batch.denominators
        self.assertAlmostEqual(float(below["audio"]), float(targets["audio"].weight.sum()), places=3)
        self.assertEqual(targets["audio"].weight.shape[-1], MODEL.audio_levels)


class WeightsTest(chex.TestCase):
    def ema(self, **values: float) -> dict:
        return {name: jnp.float32(values.get(name, 0.0)) for name in objective.MODALITIES}

    def test_posterior_weights_bring_losses_to_the_text_loss(self):
        weights = objective.modality_weights(self.ema(text=3.0, image=0.6, video=0.01, audio=60.0), LossConfig())
        chex.assert_trees_all_close(weights, {"text": 1.0, "image": 5.0, "video": 10.0, "audio": 0.1}, rtol=1e-6)

    def test_weighted_losses_become_equal(self):
        """Components 1.2.5: losses (4.0, 0.69, 2.0), text first; the averages follow them within their lag."""
        losses = {"text": 4.0, "image": 0.69, "video": 1.0, "audio": 2.0}
        losses = {name: jnp.float32(value) for name, value in losses.items()}
        present = {name: jnp.asarray(name != "video") for name in losses}
        ema = self.ema(text=8.0, image=0.69, audio=0.5)
        for _ in range(100):
            ema = objective.update_ema(ema, losses, present, 0.9)
        weights = objective.modality_weights(ema, LossConfig())
        for name, weight in (("text", 1.0), ("image", 4.0 / 0.69), ("audio", 2.0)):
            self.assertAlmostEqual(float(weights[name]), weight, delta=1e-3 * weight)
            self.assertAlmostEqual(float(weights[name] * losses[name]), 4.0, delta=4e-3)

    def test_unseen_modalities_weigh_one(self):
        weights = objective.modality_weights(self.ema(image=0.6), LossConfig(fixed_weights={"audio": 0.5}))
        chex.assert_trees_all_close(weights, {"text": 1.0, "image": 1.0, "video": 1.0, "audio": 0.5})

    def test_fixed_weights_ignore_the_averages(self):
        config = LossConfig(modality_weighting="fixed", fixed_weights={"image": 4.0})
        weights = objective.modality_weights(self.ema(text=3.0, image=0.6), config)
        chex.assert_trees_all_close(weights, {"text": 1.0, "image": 4.0, "video": 1.0, "audio": 1.0})

    def test_averages_move_only_where_present(self):
        old = self.ema(text=2.0, image=0.5)
        losses = {name: jnp.float32(1.0) for name in objective.MODALITIES}
        present = {name: jnp.asarray(name in ("text", "video")) for name in objective.MODALITIES}
        new = objective.update_ema(old, losses, present, 0.9)
        chex.assert_trees_all_close(new, {"text": 1.9, "image": 0.5, "video": 1.0, "audio": 0.0}, rtol=1e-6)

    def test_absent_modality_contributes_nothing(self):
        below = {"text": 4.0, "image": 0.0, "video": 2.0, "audio": 1.0, "mtp": 8.0}
        below = {name: jnp.float32(v) for name, v in below.items()}
        weights = {name: jnp.float32(w) for name, w in zip(objective.MODALITIES, (1, 5, 2, 3), strict=True)}
        c = objective.coefficients(weights, below, jnp.float32(10), LossConfig(mtp_weight=0.3), 1e-3)
        expected = {"text": 0.25, "image": 0.0, "video": 1.0, "audio": 3.0, "mtp": 0.0375, "z": 1e-4}
        chex.assert_trees_all_close(c, expected, rtol=1e-6)


class RoutedTokensTest(parameterized.TestCase):
    def test_tokens_times_layers_that_run(self):
        model = tiny_model_config(num_dense_layers=1, num_moe_layers=3)
        batch = dummy_batch(model, rows=2)
        tokens = int((batch.segment > 0).sum())
        self.assertEqual(float(objective.routed_tokens(batch, None, model)), tokens * 5)
        mask = full_mask(model)
        mask = dataclasses.replace(mask, layers=mask.layers.at[:, 2].set(False))
        self.assertEqual(float(objective.routed_tokens(batch, mask, model)), tokens * 4)


if __name__ == "__main__":
    absltest.main()
