"""A submodel saved as a checkpoint of its own, and a run that starts from a checkpoint."""

import dataclasses
import json
import tempfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from ernie5_jax.config import ConfigError, RouterConfig
from ernie5_jax.elastic import submodel_mask
from ernie5_jax.model import init_params, make_apply
from ernie5_jax.testing import dummy_batch, tiny_model_config
from ernie5_jax.training import CheckpointError, Checkpoints, abstract_state, load_run
from ernie5_jax.training.accounting import parameter_totals, submodel_totals
from ernie5_jax.training.identity import check_start, config_json
from ernie5_jax.training.loop import start_from
from ernie5_jax.training.state import state_from
from ernie5_jax.training.submodel import describe_mask, save_submodel
from tests.training.helpers import small_experiment, with_training

MODEL = tiny_model_config(num_moe_layers=4, router=RouterConfig(num_experts=8, top_k=3), init_scale=0.15)
CONFIG = small_experiment(MODEL)


@pytest.mark.slow
class SaveSubmodelTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        params, bias = jax.jit(lambda: init_params(MODEL, 3))()
        cls.params, cls.bias = params, bias + 0.05 * jax.random.normal(jax.random.key(1), bias.shape)
        files: dict[str, bytes | Path] = {
            "config.json": config_json(CONFIG),
            "run.json": json.dumps({"tokenizers": {"text": "abc"}}).encode(),
            "tokenizers/text/vocabulary.json": b"[]",
        }
        checkpoints = Checkpoints(cls.folder / "full", 1, files)
        checkpoints.save(5, state_from(CONFIG, cls.params, cls.bias, 5))
        checkpoints.wait()
        checkpoints.close()
        cls.mask = submodel_mask(MODEL, 5, 5, 2, expert_scores=np.random.default_rng(0).random((MODEL.num_layers, 8)))
        cls.config = save_submodel(cls.folder / "full", cls.mask, cls.folder / "small")

    def test_loads_as_the_masked_model(self):
        run = load_run(self.folder / "small")
        self.assertEqual((run.step, run.config), (5, self.config))
        self.assertFalse(run.config.model.elastic)
        batch = dummy_batch(MODEL, seed=2)
        mask = jax.tree.map(jnp.asarray, self.mask)
        full = jax.jit(make_apply(MODEL))(self.params, self.bias, batch, mask)
        small = jax.jit(make_apply(run.config.model))(run.params, run.router_bias, batch)
        for name in ("text_logits", "mtp_logits", "visual_logits", "audio_logits"):
            wanted = getattr(full, name)
            chex.assert_trees_all_close(getattr(small, name), wanted, atol=1e-5 * float(jnp.abs(wanted).max()))

    def test_is_self_contained_and_says_where_it_comes_from(self):
        files = self.folder / "small" / "checkpoints" / "5" / "files"
        self.assertEqual((files / "tokenizers" / "text" / "vocabulary.json").read_bytes(), b"[]")
        facts = json.loads((files / "run.json").read_text())
        self.assertEqual(facts["tokenizers"], {"text": "abc"})
        self.assertEqual(facts["extracted_from"], {"step": 5, "submodel": describe_mask(self.mask)})
        self.assertLen(facts["extracted_from"]["submodel"]["layers"], 5)

    def test_an_occupied_folder_is_refused(self):
        with self.assertRaisesRegex(CheckpointError, "small.*without"):
            save_submodel(self.folder / "full", self.mask, self.folder / "small")

    def test_totals_are_those_of_the_built_model(self):
        self.assertEqual(submodel_totals(MODEL, self.mask), parameter_totals(self.config.model))

    def test_a_run_starts_from_it(self):
        config = with_training(self.config, init_from=str(self.folder / "small"))
        check_start(config)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        state = start_from(config, jax.tree.map(lambda _: here, abstract_state(config)))
        run = load_run(self.folder / "small")
        self.assertEqual(int(state["step"]), 0)
        chex.assert_trees_all_equal(state["params"], run.params)
        chex.assert_trees_all_equal(state["ema_params"], run.params)
        chex.assert_trees_all_equal(state["router_bias"], run.router_bias)
        self.assertEqual(float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(state["opt_state"]))), 0)

    def test_a_run_of_another_model_cannot_start_from_it(self):
        config = with_training(CONFIG, init_from=str(self.folder / "small"))
        with self.assertRaisesRegex(ConfigError, r"'model\.num_moe_layers': found 4, allowed: 3 as in"):
            check_start(config)
        text = dataclasses.replace(self.config.text, dropout=0.25)
        other = dataclasses.replace(with_training(self.config, init_from=str(self.folder / "small")), text=text)
        with self.assertRaisesRegex(ConfigError, r"'text\.dropout'"):
            check_start(other)


if __name__ == "__main__":
    absltest.main()
