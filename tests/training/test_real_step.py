"""The step of the real model: eight devices equal one, and one program serves every submodel."""

import dataclasses
import logging

import chex
import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ernie5_jax.config import ElasticSamplingConfig, ExperimentConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from ernie5_jax.parallel import make_mesh, preset
from ernie5_jax.testing import dummy_batch, tiny_model_config
from ernie5_jax.training import TrainProgram, make_state, split_micro_batches
from ernie5_jax.training.step import masks_of_step
from tests.training.helpers import small_experiment

MODEL = tiny_model_config(num_moe_layers=2, levels_per_codec_layer=3)
CONFIG = small_experiment(
    MODEL,
    optimizer=OptimizerConfig(clip_norm=0.0, warmup_steps=0, decay_fraction=0.0),
    training=TrainingConfig(steps=100, batch_rows=8),
    elastic=ElasticSamplingConfig(full_depth=0.5, full_width=0.3, full_top_k=0.5, min_experts=3),
)


def run(devices: int, rules: str, steps: int, config: ExperimentConfig = CONFIG):
    mesh = make_mesh(ParallelConfig(data=devices))
    batch = split_micro_batches(dummy_batch(MODEL, rows=8), 1)
    state = make_state(config, mesh, preset(rules))
    program = TrainProgram(config, mesh, preset(rules))
    metrics = []
    for step in range(steps):
        state, result = program(state, batch, masks_of_step(config, step))
        metrics.append(result)
    return state, jax.device_get(metrics), program


class _CompileLog(logging.Handler):
    """JAX's own record of what it compiles."""

    def __init__(self):
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class RealStepTest(parameterized.TestCase):
    @parameterized.parameters(
        ("fsdp", "microbatch", (1, 1, 8, 1)),
        ("replicated", "microbatch", (1, 1, 1, 1)),
        ("expert", "microbatch", (1, 8, 1, 1)),
        ("expert", "row", (1, 8, 1, 1)),
    )
    @pytest.mark.slow
    def test_eight_devices_equal_one(self, rules, granularity, parts):
        config = dataclasses.replace(CONFIG, elastic=dataclasses.replace(CONFIG.elastic, granularity=granularity))
        one, (metrics,), _ = run(1, "replicated", 1, config)
        eight, (other,), _ = run(8, rules, 1, config)
        kernel = eight["params"]["backbone"]["moe"]["ffn"]["w_in"]
        held = tuple(size // part for size, part in zip(kernel.shape, parts, strict=True))
        self.assertEqual(kernel.sharding.shard_shape(kernel.shape), held)
        np.testing.assert_allclose(other["loss"], metrics["loss"], rtol=1e-5)
        np.testing.assert_array_equal(other["counts"], metrics["counts"])
        # After the first step without clipping the first moment is 0.1 times the gradient.
        for name, tolerance in (("opt_state", 1e-6), ("router_bias", 0)):
            chex.assert_trees_all_close(jax.device_get(eight[name]), jax.device_get(one[name]), atol=tolerance)
        largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(jax.device_get(one["opt_state"]["mu"])))
        self.assertGreater(largest, 1e-3)

    def test_one_program_serves_all_masks(self):
        steps = 56
        log = _CompileLog()
        logger = logging.getLogger("jax")
        logger.addHandler(log)
        try:
            with jax.log_compiles():
                state, metrics, program = run(1, "replicated", steps)
        finally:
            logger.removeHandler(log)
        compiled = [m for m in log.messages if "Compiling" in m and "unified_train_step" in m]
        self.assertLen(compiled, 1, log.messages[:20])
        self.assertEqual(program.compilations, 1)
        masks = [masks_of_step(CONFIG, i) for i in range(steps)]
        different = {b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(mask)) for mask in masks}
        self.assertGreaterEqual(len(different), 32)
        self.assertEqual(int(state["step"]), steps)
        for mask, result in zip(masks, metrics, strict=True):
            assert mask is not None
            self.assertEqual(result["mask"]["live_layers"], np.asarray(mask.layers).sum())
            self.assertEqual(result["mask"]["top_k"], np.asarray(mask.top_k).mean())
        self.assertLess(metrics[-1]["loss"], metrics[1]["loss"])


if __name__ == "__main__":
    absltest.main()
