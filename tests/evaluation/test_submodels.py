"""Submodels of a checkpoint: rules, budgets, losses without compilation."""

import logging
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import absltest, parameterized

from ernie5_jax.elastic import ElasticError, extract_submodel
from ernie5_jax.evaluation import HeldOut
from ernie5_jax.evaluation.submodels import RULES, Submodels, pareto_front
from ernie5_jax.model import check_mask, full_mask, init_params
from ernie5_jax.testing import KINDS, random_encoded_document, tiny_experiment_config, tiny_model_config
from ernie5_jax.training.accounting import parameter_totals, submodel_totals
from experiments import cli

CONFIG = tiny_experiment_config(
    model={"num_moe_layers": 4, "router": {"num_experts": 8, "top_k": 3}, "init_scale": 0.15},
    training={"evaluate_rows": 2},
)
MODEL = CONFIG.model


@pytest.mark.slow
class SubmodelsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        params, bias = init_params(MODEL, seed=1)
        rng = np.random.default_rng(0)
        documents = [random_encoded_document(rng, MODEL, max_spans=2, first=kind) for kind in KINDS]
        cls.held_out = HeldOut(CONFIG, params, bias)
        cls.submodels = Submodels(cls.held_out, documents)
        cls.documents = documents

    @parameterized.parameters(*RULES)
    def test_every_rule_gives_a_legal_submodel(self, rule):
        size = self.submodels.size(4, 5, 2, rule)
        check_mask(size.mask, MODEL)
        self.assertEqual(size.mask.layers.sum(), 4)
        self.assertTrue((size.mask.experts.sum(-1) == 5).all() and (size.mask.top_k == 2).all())
        self.assertGreater(size.loss, 0)

    def test_usage_keeps_the_busiest(self):
        counts = np.sum([np.array(u) for u in self.held_out(self.documents)["expert_use"].values()], axis=0)
        mask = self.submodels.size(MODEL.num_layers, 3, 3, "usage").mask
        for layer, kept in enumerate(mask.experts[0]):
            self.assertGreaterEqual(counts[layer][kept].min(), counts[layer][~kept].max())

    def test_importance_of_an_expert_is_the_slope_of_the_loss(self):
        """Against a central difference on a factor of one expert's output matrix."""
        # One batch: over several the absolute values add up, and would only bound the slope.
        alone = Submodels(self.held_out, self.documents[:1])
        scores = alone.scores("importance", 8)[1]
        assert scores is not None
        layer, expert = 1, int(scores[1].argmax())
        params, bias = self.held_out.weights

        def loss(factor):
            w_out = params["backbone"]["moe"]["ffn"]["w_out"].at[layer, expert].multiply(factor)
            ffn = {**params["backbone"]["moe"]["ffn"], "w_out": w_out}
            moe = {**params["backbone"]["moe"], "ffn": ffn}
            changed = {**params, "backbone": {**params["backbone"], "moe": moe}}
            return Submodels(HeldOut(CONFIG, changed, bias), self.documents[:1])

        whole = full_mask(MODEL)
        slope = (loss(1.1).loss(whole) - loss(0.9).loss(whole)) / 0.2
        self.assertGreater(abs(slope), 1e-3)
        np.testing.assert_allclose(scores[layer, expert], abs(slope), rtol=0.05)

    def test_a_submodel_of_one_expert_can_be_measured(self):
        size = self.submodels.size(6, 1, 1, "nested")
        params, bias = jax.tree.map(np.asarray, self.held_out.weights)
        model, params, bias = extract_submodel(MODEL, params, bias, size.mask)
        config = tiny_experiment_config(model=model, training={"evaluate_rows": 2})
        record = HeldOut(config, params, bias)(self.documents)
        self.assertNotIn("min_normalized_entropy", record)
        names = ("text", "image", "video", "audio")
        np.testing.assert_allclose(size.loss, sum(record[f"loss_{name}"] for name in names), rtol=1e-5)

    def test_the_rules_of_the_scripts_are_these(self):
        holder = cli.define_select()
        parser: Any = flags.FLAGS["select"].parser
        self.assertSameElements(parser.enum_values, RULES)
        self.assertIn(holder.default, RULES)

    def test_one_compilation_for_all_masks(self):
        self.submodels.full()
        with self.assertLogs("jax._src.dispatch", logging.WARNING) as logs, jax.log_compiles():
            logging.getLogger("jax._src.dispatch").warning("at least one record")
            for sizes in ((4, 8, 3), (6, 5, 2), (5, 3, 1)):
                self.submodels.size(*sizes, rule="nested")
        self.assertEmpty([line for line in logs.output if "jit(step)" in line])

    def test_the_budget_is_kept_and_the_best_is_chosen(self):
        chosen, measured = self.submodels.within(0.7, 0.6, "nested")
        whole = submodel_totals(MODEL, full_mask(MODEL))
        for size in measured:
            self.assertLessEqual(size.totals["backbone_active"], 0.7 * whole["backbone_active"])
            self.assertLessEqual(size.totals["backbone_total"], 0.6 * whole["backbone_total"])
        self.assertEqual(chosen.loss, min(size.loss for size in measured))
        self.assertGreater(len(measured), 1)
        sizes = [(s.layers, s.experts, s.top_k) for s in measured]
        for a in sizes:
            for b in sizes:
                self.assertFalse(a != b and all(x <= y for x, y in zip(a, b, strict=True)), "one contains another")

    def test_a_budget_that_nothing_meets_names_the_nearest(self):
        with self.assertRaisesRegex(ElasticError, r"active=0\.01.*nearest.*3 layers, 1 experts, top-1"):
            self.submodels.within(0.01, 0.01, "nested")

    @parameterized.parameters(
        (2, 8, 3, r"layers: found 2, allowed: 3 \.\.\. 6"),
        (6, 9, 3, r"experts: found 9, allowed: 1 \.\.\. 8"),
        (6, 2, 3, r"top_k: found 3, allowed: 1 \.\.\. 2"),
    )
    def test_impossible_sizes(self, layers, experts, top_k, message):
        with self.assertRaisesRegex(ElasticError, message):
            self.submodels.size(layers, experts, top_k, "nested")

    def test_the_loss_is_that_of_the_extracted_model(self):
        size = self.submodels.size(4, 5, 2, "random")
        params, bias = jax.tree.map(np.asarray, self.held_out.weights)
        model, params, bias = extract_submodel(MODEL, params, bias, size.mask)
        self.assertEqual(size.totals, parameter_totals(model))
        config = tiny_experiment_config(model=model, training={"evaluate_rows": 2})
        record = HeldOut(config, params, bias)(self.documents)
        names = ("text", "image", "video", "audio")
        np.testing.assert_allclose(size.loss, sum(record[f"loss_{name}"] for name in names), rtol=1e-5)

    def test_a_static_model_has_no_submodels(self):
        model = tiny_model_config(elastic=False)
        config = tiny_experiment_config(model={"elastic": False})
        self.assertEqual(config.model, model)
        with self.assertRaisesRegex(ElasticError, "elastic"):
            Submodels(HeldOut(config, *init_params(model)), [])


class ParetoTest(absltest.TestCase):
    def test_front(self):
        points = [(3.0, 1.0), (1.0, 5.0), (2.0, 5.5), (2.0, 3.0), (4.0, 1.0)]
        self.assertEqual(pareto_front(points), [1, 3, 0])


if __name__ == "__main__":
    absltest.main()
