"""Counts of parameters, operations and memory, and the dry run."""

import jax
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import ParallelConfig
from ernie5_jax.model import init_params
from ernie5_jax.testing import tiny_model_config
from ernie5_jax.training import memory_estimate, parameter_table, parameter_totals
from ernie5_jax.training.accounting import flops_per_token, head_flops
from ernie5_jax.training.dry_run import describe
from tests.training.helpers import small_experiment, with_training

MODEL = tiny_model_config()


class AccountingTest(parameterized.TestCase):
    def test_totals_are_those_of_the_parameters(self):
        shapes, _ = jax.eval_shape(lambda: init_params(MODEL))
        count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
        totals = parameter_totals(MODEL)
        self.assertEqual(totals["total"], count)
        experts = sum(row.count for row in parameter_table(MODEL) if "experts" in row.axes)
        self.assertEqual(count - totals["active"], experts * 6 // 8)  # 2 of 8 run

    def test_flops_by_hand(self):
        # One layer: q, k, v, out; router; 2 routed experts and the shared one.
        attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
        sparse = 32 * 8 + 3 * 32 * (2 * 16 + 16)
        mtp = attention + 3 * 32 * 48 + 2 * 32 * 32
        scores = 12 * 4 * 8 * 64
        expected = 6 * (3 * (attention + sparse) + mtp) + 4 * scores
        self.assertEqual(flops_per_token(MODEL, 64, layers=3, top_k=2), expected)
        self.assertEqual(head_flops(MODEL, {"text": 2, "audio": 1}), 6 * (2 * 32 * 352 + 32 * 3 * 17))

    def test_fsdp_splits_the_state(self):
        config = small_experiment(MODEL)
        whole = memory_estimate(config, 1)
        split = memory_estimate(small_experiment(MODEL, parallel=ParallelConfig(data=4, rules="fsdp")), 4)
        self.assertEqual(whole["state"], 16 * parameter_totals(MODEL)["total"])
        self.assertBetween(split["state"] / whole["state"], 0.25, 0.27)
        less = memory_estimate(with_training(config, micro_batches=4), 1)
        self.assertLess(less["activations"], whole["activations"])

    def test_dry_run(self):
        text = describe(with_training(small_experiment(MODEL), micro_batches=2))
        self.assertRegex(text, r"backbone/moe/ffn/w_in +2x8x32x32 +layers, experts, embed, expert_mlp +16,384")
        self.assertIn("active per token", text)
        self.assertIn("4 rows x 64 positions in 2 micro-batches", text)


if __name__ == "__main__":
    absltest.main()
