"""Properties over many random documents and models; minutes."""

import itertools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ernie5_jax.config import ElasticSamplingConfig, ModelConfig, RouterConfig
from ernie5_jax.model import init_params, make_apply
from ernie5_jax.sequence import EncodedDocument, Row, SequenceError, layout, pack, stack
from ernie5_jax.testing import (
    KINDS,
    dummy_batch,
    random_encoded_span,
    square_scales,
    tiny_model_config,
    tiny_sequence_config,
)
from ernie5_jax.training.state import abstract_state
from ernie5_jax.training.step import make_train_step, masks_of_step, split_micro_batches
from ernie5_jax.vision.pyramid import ScalePyramid
from tests.generation import test_teacher_forcing as forcing
from tests.training.helpers import small_experiment, with_training

CONFIG = tiny_model_config(init_scale=0.15)
SEQUENCE = tiny_sequence_config(160)
ROWS = 8


def _documents(seed: int) -> list[Row]:
    """Every ordered pair of kinds side by side at least once, among up to two more spans; shuffled."""
    rng = np.random.default_rng(seed)
    scales = square_scales(CONFIG.visual_scales)
    pyramid = ScalePyramid(scales, CONFIG.visual_bits)
    rows = []
    for pair in itertools.product(KINDS, repeat=2):
        others = [KINDS[i] for i in rng.integers(0, len(KINDS), rng.integers(0, 3))]
        before = rng.integers(0, len(others) + 1)
        kinds = [*others[:before], *pair, *others[before:]]
        spans = tuple(random_encoded_span(rng, kind, CONFIG, scales) for kind in kinds)
        rows.append(
            layout(EncodedDocument(spans), SEQUENCE, pyramid, audio_bins=CONFIG.audio_bins, mtp_depth=CONFIG.mtp_depth)
        )
    return [rows[i] for i in rng.permutation(len(rows))]


def _packed(documents: list[Row]) -> list[list[Row]]:
    """The documents in order, as many per row as fit."""
    rows: list[list[Row]] = [[]]
    for document in documents:
        try:
            pack([*rows[-1], document], SEQUENCE, CONFIG)
        except SequenceError:
            rows.append([])
        rows[-1].append(document)
    return rows


@pytest.mark.slow
class InterleavingTest(parameterized.TestCase):
    @parameterized.parameters(*range(3))
    def test_packed_equals_unpacked(self, seed):
        apply = jax.jit(make_apply(CONFIG))
        params, bias = jax.jit(lambda: init_params(CONFIG, seed))()
        bias = bias + 0.05 * jax.random.normal(jax.random.key(seed), bias.shape)
        documents = _documents(seed)
        rows = _packed(documents)
        self.assertLess(len(rows), len(documents) / 2)
        together = self._results(apply, params, bias, rows)
        alone = iter(self._results(apply, params, bias, [[document] for document in documents]))
        for row, batch in zip(rows, together, strict=True):
            offset = 0
            for document in row:
                found = self._of_document(batch, offset, offset + document.length)
                expected = self._of_document(next(alone), 0, document.length)
                chex.assert_trees_all_close(found, expected, atol=1e-5)
                offset += document.length

    def _results(self, apply, params, bias, rows):
        """Per row: hidden states, and (positions, logits) of every head; batches of one shape compile once."""
        results = []
        for start in range(0, len(rows), ROWS):
            part = [*rows[start : start + ROWS], *([[]] * ROWS)][:ROWS]
            batch = stack([pack(row, SEQUENCE, CONFIG) for row in part])
            output = jax.device_get(apply(params, bias, batch))
            for i in range(min(ROWS, len(rows) - start)):
                index = {kind: batch.targets[kind].index[i] for kind in ("text", "visual", "audio")}
                heads = {
                    "text": (index["text"], output.text_logits[i]),
                    **{
                        f"mtp {d}": (batch.targets["mtp"].index[i, d], output.mtp_logits[i, d])
                        for d in range(CONFIG.mtp_depth)
                    },
                    "visual": (index["visual"], output.visual_logits[i]),
                    "audio": (index["audio"], output.audio_logits[i]),
                }
                results.append((output.hidden[i], heads))
        return results

    def _of_document(self, result, first, end):
        hidden, heads = result
        parts = {name: logits[(index >= first) & (index < end)] for name, (index, logits) in heads.items()}
        return {"hidden": hidden[first:end], **parts}


def _random_model(rng: np.random.Generator) -> ModelConfig:
    kv_heads, experts = int(rng.integers(1, 4)), int(rng.integers(1, 13))
    return tiny_model_config(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * int(rng.integers(1, 4)),
        head_dim=int(rng.choice([4, 8, 12])),
        num_dense_layers=int(rng.integers(0, 3)),
        num_moe_layers=int(rng.integers(0, 4)),
        router=RouterConfig(
            num_experts=experts,
            top_k=int(rng.integers(1, experts + 1)),
            scoring=str(rng.choice(["softmax", "sigmoid"])),  # type: ignore[arg-type]
            z_loss_weight=float(rng.choice([0.0, 1e-3])),
        ),
        shared_expert_width=int(rng.choice([0, 16])),
        audio_levels=int(rng.integers(1, 6)),
        levels_per_codec_layer=int(rng.integers(1, 4)),
        mtp_depth=int(rng.integers(0, 3)),
        tied_text_head=bool(rng.integers(2)),
        remat=bool(rng.integers(2)),
        elastic=bool(rng.integers(2)),
    )


@pytest.mark.slow
class RandomModelTest(parameterized.TestCase):
    @parameterized.parameters(*range(8))
    def test_a_step_keeps_shapes_and_types(self, seed):
        model = _random_model(np.random.default_rng(seed))
        share = 0.5 if model.elastic else 1.0
        elastic = ElasticSamplingConfig(full_depth=share, full_width=share, full_top_k=share)
        config = with_training(small_experiment(model, elastic=elastic), micro_batches=2)
        batch = split_micro_batches(dummy_batch(model, seed=seed, rows=4, sequence=config.sequence), 2)
        state = abstract_state(config)
        new, metrics = jax.eval_shape(make_train_step(config), state, batch, masks_of_step(config, seed))
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        self.assertEqual((metrics["loss"].shape, metrics["loss"].dtype), ((), jnp.float32))
        routed = model.num_moe_layers + model.num_codec_layers
        self.assertEqual(metrics["counts"].shape, (routed, model.router.num_experts))


class _OtherModel(absltest.TestCase):
    """Exchanges the model of the teacher-forcing tests for the one of `changes`; has no tests of its own."""

    changes: dict

    def setUp(self):
        super().setUp()
        fields = {"vocab_size": 360, "visual_scales": 3, "init_scale": 0.15, **self.changes}
        patch = mock.patch.object(forcing, "CONFIG", tiny_model_config(**fields))
        patch.start()
        self.addCleanup(patch.stop)


@pytest.mark.slow
class DeepMtpTest(_OtherModel, forcing.TeacherForcingTest):
    changes = {
        "num_heads": 6,
        "num_kv_heads": 3,
        "num_dense_layers": 2,
        "num_moe_layers": 1,
        "router": RouterConfig(num_experts=5, top_k=3, scoring="sigmoid"),
        "shared_expert_width": 0,
        "audio_levels": 5,
        "mtp_depth": 2,
        "tied_text_head": False,
    }


@pytest.mark.slow
class StaticSingleExpertTest(_OtherModel, forcing.TeacherForcingTest):
    changes = {
        "num_heads": 1,
        "num_kv_heads": 1,
        "num_moe_layers": 3,
        "router": RouterConfig(num_experts=12, top_k=1),
        "audio_levels": 2,
        "levels_per_codec_layer": 4,
        "mtp_depth": 0,
        "elastic": False,
    }


if __name__ == "__main__":
    absltest.main()
