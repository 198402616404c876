"""The loop on a stand-in model: exact resume, identity keys, NaN guard, metrics."""

import dataclasses
import json
import tempfile
from pathlib import Path
from unittest import mock

import chex
import numpy as np
from absl.testing import absltest

from ernie5_jax.config import ConfigError, OptimizerConfig, ParallelConfig
from ernie5_jax.testing import dummy_batch, tiny_model_config
from ernie5_jax.training import PROCESS_FIELDS, CheckpointError, RunData, TrainingError, load_run, read_metrics, train
from tests.training.helpers import bag_of_tokens, small_experiment, with_training

MODEL = tiny_model_config(num_moe_layers=1, levels_per_codec_layer=3, mtp_depth=0)
CONFIG = with_training(
    small_experiment(MODEL, parallel=ParallelConfig(data=2)), checkpoint_every=3, evaluate_every=4, keep_checkpoints=1
)
BATCHES = [dummy_batch(MODEL, rows=4, seed=i) for i in range(5)]
DATA = RunData(
    batches=lambda step: (BATCHES[i % 5] for i in range(step, 10**6)),
    held_out=lambda: BATCHES[:1],
    files={"tokenizers/text/config.json": b"{}"},
)


def records(workdir: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in PROCESS_FIELDS} for r in read_metrics(workdir)]


class LoopTest(chex.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.enter_context(mock.patch("ernie5_jax.training.step.make_apply", bag_of_tokens))

    def test_a_resumed_run_is_the_same_run(self):
        whole, parts = self.root / "whole", self.root / "parts"
        self.assertEqual(train(CONFIG, whole, DATA), 8)
        self.assertEqual(train(CONFIG, parts, DATA, stop_at=2), 2)
        # What a killed process leaves behind: records past the checkpoint, and half a line.
        with (parts / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
        self.assertEqual(train(CONFIG, parts, DATA, stop_at=5), 5)
        self.assertEqual(train(CONFIG, parts, DATA), 8)
        self.assertEqual([r["step"] for r in records(whole)], list(range(1, 9)))
        self.assertEqual(records(parts), records(whole))
        first, second = load_run(whole), load_run(parts)
        chex.assert_trees_all_equal(first.params, second.params)
        self.assertEqual((first.step, first.config), (8, CONFIG))
        self.assertTrue((first.tokenizers / "text" / "config.json").is_file())
        # The newest, and the best by held-out loss (the later of the two evaluations).
        self.assertEqual({f.name for f in (whole / "checkpoints").iterdir()}, {"8"})
        self.assertEqual(train(CONFIG, whole, DATA), 8)  # nothing left to do
        self.assertEqual(records(parts), records(whole))

    def test_fields_of_a_record(self):
        train(CONFIG, self.root, DATA, stop_at=4)
        record = read_metrics(self.root)[-1]
        self.assertContainsSubset(
            ("step", "loss", "tokens_per_second", "compilations", "live_layers", "live_experts", "top_k", "mfu",
             "loss_text", "loss_image", "loss_video", "bits_per_byte", "bit_accuracy", "normalized_entropy",
             "max_violation", "held_out_loss", "held_out_loss_text"),
            record,
        )  # fmt: skip
        self.assertEqual(record["compilations"], 1)
        self.assertAlmostEqual(
            record["held_out_loss"], sum(record[f"held_out_loss_{m}"] for m in ("text", "image", "video")), delta=1e-4
        )
        run = json.loads((self.root / "checkpoints" / "4" / "files" / "run.json").read_text())
        self.assertEqual(run["devices"], 2)

    def test_identity_keys_may_not_change_and_run_keys_may(self):
        train(CONFIG, self.root, DATA, stop_at=1)
        other = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, beta1=0.8))
        with self.assertRaisesRegex(ConfigError, "config key 'optimizer.beta1': found 0.8, allowed: 0.9"):
            train(other, self.root, DATA)
        self.assertEqual(train(with_training(CONFIG, log_every=2, keep_checkpoints=3), self.root, DATA, stop_at=2), 2)

    def test_nan_stops_the_run_and_keeps_the_batch(self):
        optimizer = OptimizerConfig(learning_rate=1e30, warmup_steps=0, clip_norm=0.0, weight_decay=0.0)
        config = dataclasses.replace(CONFIG, optimizer=optimizer)
        with self.assertRaisesRegex(TrainingError, "allowed: finite numbers; the state was kept, the batch is in"):
            train(config, self.root, DATA)
        (path,) = self.root.glob("rejected_batch_*.npz")
        step = int(path.stem.rpartition("_")[2])
        with np.load(path) as saved:
            np.testing.assert_array_equal(saved["token"], BATCHES[(step - 1) % 5].token)
            np.testing.assert_array_equal(saved["targets/text/weight"], BATCHES[(step - 1) % 5].targets["text"].weight)

    def test_bad_arguments(self):
        with self.assertRaisesRegex(TrainingError, "stop_at: found 0, allowed: >= 1"):
            train(CONFIG, self.root, DATA, stop_at=0)
        with self.assertRaisesRegex(ConfigError, "training.batch_rows"):
            train(dataclasses.replace(CONFIG, parallel=ParallelConfig(data=3)), self.root, DATA)
        (self.root / "checkpoints" / "5" / "files").mkdir(parents=True)
        with self.assertRaises(CheckpointError):
            train(CONFIG, self.root, DATA)


if __name__ == "__main__":
    absltest.main()
