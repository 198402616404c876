"""Elastic masks: probabilities, ranges, what is never dropped, and purity."""

from typing import Any

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import ConfigError, ElasticSamplingConfig
from ernie5_jax.elastic import sample_mask, step_masks
from ernie5_jax.model import check_mask, full_mask
from ernie5_jax.testing import tiny_model_config

MODEL = tiny_model_config(num_moe_layers=5, levels_per_codec_layer=2)  # 7 layers, the last 2 are codec layers
CONFIG = ElasticSamplingConfig(full_depth=0.75, full_width=0.8, full_top_k=0.6, min_layers=4, min_experts=3)
DRAWS = 4000


def draws(model=MODEL, config=CONFIG, count=DRAWS):
    rng = np.random.default_rng(3)
    masks = [sample_mask(rng, model, config) for _ in range(count)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *masks)


class SamplingTest(chex.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.masks = draws()
        cls.live = cls.masks.layers[:, 0].sum(-1)
        cls.width = cls.masks.experts[:, 0].sum(-1)
        cls.k = cls.masks.top_k[:, 0]

    def test_every_mask_is_legal(self):
        for i in range(0, DRAWS, 40):
            check_mask(jax.tree.map(lambda a, i=i: a[i], self.masks), MODEL)

    def test_first_and_codec_layers_always_run(self):
        self.assertTrue(self.masks.layers[:, 0, [0, 5, 6]].all())

    def test_full_probabilities(self):
        # Four standard deviations of a share of 4000 draws are below 0.032.
        self.assertAlmostEqual((self.live == 7).mean(), 0.75, delta=0.032)
        self.assertAlmostEqual((self.width[:, 0] == 8).mean(), 0.8, delta=0.032)
        self.assertAlmostEqual((self.k[:, 0] == 2).mean(), 0.6, delta=0.032)

    def test_axes_are_independent(self):
        both = ((self.live == 7) & (self.width[:, 0] == 8) & (self.k[:, 0] == 2)).mean()
        self.assertAlmostEqual(both, 0.75 * 0.8 * 0.6, delta=0.032)

    def test_reduced_settings_are_uniform(self):
        depth = np.bincount(self.live[self.live < 7], minlength=8)
        self.assertEqual(set(np.flatnonzero(depth)), {4, 5, 6})
        chex.assert_trees_all_close(depth[4:7] / depth.sum(), np.full(3, 1 / 3), atol=0.065)
        width = self.width[:, 0][self.width[:, 0] < 8]
        self.assertEqual(set(width), {3, 4, 5, 6, 7})

    def test_dropped_layers_and_experts_are_uniform(self):
        dropped = ~self.masks.layers[self.live < 7, 0, 1:5]
        share = dropped.mean(0) / dropped.mean()
        chex.assert_trees_all_close(share, np.ones(4), atol=0.15)
        excluded = ~self.masks.experts[self.width[:, 0] < 8, 0, 2]
        chex.assert_trees_all_close(excluded.mean(0) / excluded.mean(), np.ones(8), atol=0.2)

    def test_layers_share_sizes_but_not_experts(self):
        self.assertTrue((self.width == self.width[:, :1]).all() and (self.k == self.k[:, :1]).all())
        reduced = self.masks.experts[self.width[:, 0] == 4, 0]
        self.assertTrue((reduced[:, 0] != reduced[:, 1]).any())


class LimitsTest(parameterized.TestCase):
    def test_all_full(self):
        mask = sample_mask(np.random.default_rng(0), MODEL, ElasticSamplingConfig())
        chex.assert_trees_all_equal(mask, full_mask(MODEL))

    def test_top_k_never_exceeds_the_experts(self):
        masks = draws(config=ElasticSamplingConfig(full_width=0, min_experts=1), count=200)
        width, k = masks.experts[:, 0].sum(-1), masks.top_k[:, 0]
        self.assertTrue((k <= width).all())
        self.assertTrue(((width == 1) == (k == 1)).all())

    def test_a_model_of_codec_layers_only(self):
        model = tiny_model_config(num_moe_layers=0)
        masks = draws(model, ElasticSamplingConfig(full_depth=0), 20)
        self.assertTrue(masks.layers.all())

    @parameterized.parameters("layers", "experts", "top_k")
    def test_upper_ends(self, axis):
        low, high = {"layers": (4, 5), "experts": (2, 4), "top_k": (1, 1)}[axis]
        ends: dict[str, Any] = {f"min_{axis}": low, f"max_{axis}": high}
        config = ElasticSamplingConfig(0.0, 0.0, 0.0, **ends)
        masks = draws(config=config, count=200)
        found = masks.top_k if axis == "top_k" else getattr(masks, axis).sum(-1)
        self.assertEqual(set(np.unique(found)), set(range(low, high + 1)))

    def test_reduced_width_leaves_top_k_alone(self):
        """Components 1.11: |experts| >= k, so the default k keeps its own probability."""
        masks = draws(config=ElasticSamplingConfig(full_width=0.0, full_top_k=0.8))
        self.assertEqual(masks.experts[:, 0].sum(-1).min(), MODEL.router.top_k)
        self.assertAlmostEqual((masks.top_k[:, 0, 0] == MODEL.router.top_k).mean(), 0.8, delta=0.032)

    def test_a_range_that_fixed_layers_empty_is_refused(self):
        with self.assertRaisesRegex(ConfigError, "elastic.max_layers': found 2, allowed: 0 or at least 3"):
            draws(config=ElasticSamplingConfig(full_depth=0.5, max_layers=2), count=1)

    def test_nested_experts_are_the_first(self):
        masks = draws(config=ElasticSamplingConfig(full_width=0, expert_choice="nested"), count=50)
        width = masks.experts.sum(-1, keepdims=True)
        np.testing.assert_array_equal(masks.experts, np.broadcast_to(np.arange(8) < width, masks.experts.shape))

    def test_evenly_spaced_layers(self):
        masks = draws(config=ElasticSamplingConfig(full_depth=0, layer_choice="even"), count=200)
        found = {int(live.sum()): tuple(np.flatnonzero(live)) for live in masks.layers[:, 0]}
        # One first and two codec layers of seven always run; the rest is spread over layers 1 ... 4.
        self.assertEqual(found, {3: (0, 5, 6), 4: (0, 3, 5, 6), 5: (0, 2, 4, 5, 6), 6: (0, 1, 3, 4, 5, 6)})

    def test_a_range_upside_down_is_refused(self):
        with self.assertRaisesRegex(ConfigError, "max_experts.*found 2.*min_experts = 4"):
            ElasticSamplingConfig(min_experts=4, max_experts=2)


class StepMasksTest(chex.TestCase):
    def test_rows_have_their_own_submodels(self):
        config = ElasticSamplingConfig(0.5, 0.5, 0.5, granularity="row")
        masks = step_masks(1, 5, 2, MODEL, config, rows=6)
        self.assertEqual(masks.experts.shape, (2, 6, 7, 8))
        self.assertEqual(masks.layers.shape, (2, 6, 7))
        whole = masks.layers.reshape(12, 7)
        self.assertGreater(len({tuple(row) for row in whole}), 2)
        check_mask(jax.tree.map(lambda a: a.reshape(12, *a.shape[2:]), masks), MODEL)
        # Rows are numbered through: how they are split into micro-batches changes none.
        other = step_masks(1, 5, 3, MODEL, config, rows=4)
        np.testing.assert_array_equal(other.layers.reshape(12, 7), whole)

    def test_pure_function_of_seed_step_and_micro_batch(self):
        def make(seed: int, step: int):
            return step_masks(seed, step, 3, MODEL, ElasticSamplingConfig(0.0, 0.0, 0.0))

        first, again = make(1, 5), make(1, 5)
        chex.assert_trees_all_equal(first, again)
        self.assertEqual(first.experts.shape, (3, 1, 7, 8))
        for other in (make(2, 5), make(1, 6)):
            self.assertFalse(np.array_equal(first.experts, other.experts))
        self.assertFalse(np.array_equal(first.experts[0], first.experts[1]))


if __name__ == "__main__":
    absltest.main()
