"""Routing by task counts the positions it says, and only those."""

import tempfile
from pathlib import Path

import jax
import numpy as np
from absl.testing import absltest

from ernie5_jax.evaluation import EvaluationError, HeldOut
from ernie5_jax.evaluation.routing import TASKS, analyze, routing_by_task, task_of
from ernie5_jax.evaluation.routing_report import write_routing_report
from ernie5_jax.model import full_mask, init_params
from ernie5_jax.sequence import EncodedDocument
from ernie5_jax.testing import KINDS, random_encoded_span, square_scales, tiny_experiment_config

CONFIG = tiny_experiment_config(training={"evaluate_rows": 2})
MODEL = CONFIG.model


class RoutingTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        rng = np.random.default_rng(0)
        scales = square_scales(MODEL.visual_scales)
        cls.documents = [EncodedDocument((random_encoded_span(rng, kind, MODEL, scales),)) for kind in KINDS] * 2
        cls.held_out = HeldOut(CONFIG, *init_params(MODEL, seed=1))

    def test_all_tasks_are_told_apart(self):
        self.assertSameElements({task_of(document) for document in self.documents}, TASKS)

    def test_shares_add_up_and_follow_the_mask(self):
        use = routing_by_task(self.held_out, self.documents)
        self.assertEqual(tuple(use), TASKS)
        for shares in use.values():
            self.assertEqual(shares.shape, (MODEL.num_routed_layers, MODEL.router.num_experts))
            np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-6)
        mask = jax.tree.map(np.array, full_mask(MODEL))
        mask.experts[..., 3:] = False
        for shares in routing_by_task(self.held_out, self.documents, mask).values():
            self.assertEqual(shares[:, 3:].sum(), 0)

    def test_report(self):
        content = analyze(routing_by_task(self.held_out, self.documents), MODEL.layer_experts)
        self.assertLen(content["iou"], 15)
        for values in content["iou"].values():
            self.assertTrue(all(0 <= value <= 1 for value in values))
        with tempfile.TemporaryDirectory() as folder:
            write_routing_report(Path(folder) / "routing.html", content)
            page = (Path(folder) / "routing.html").read_text()
        self.assertEqual(page.count("<svg"), len(TASKS))
        self.assertIn("image understanding / video understanding", page)

    def test_balance_is_over_the_experts_that_a_layer_has(self):
        even = np.array([[0.25] * 4 + [0.0] * 4, [0.125] * 8])
        content = analyze({"text": even}, (4, 8))
        np.testing.assert_allclose(content["normalized_entropy"]["text"], [1, 1])
        np.testing.assert_allclose(content["max_violation"]["text"], [0, 0], atol=1e-12)
        with self.assertRaisesRegex(EvaluationError, "single expert"):
            analyze({"text": even}, (1, 8))

    def test_no_documents(self):
        with self.assertRaisesRegex(EvaluationError, "no documents"):
            routing_by_task(self.held_out, [])


if __name__ == "__main__":
    absltest.main()
