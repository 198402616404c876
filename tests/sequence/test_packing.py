"""Packing joins without mixing; the plan is a pure function that respects every capacity."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.sequence import (
    DENOMINATORS,
    SequenceError,
    document_size,
    layout,
    pack,
    plan_rows,
    row_capacity,
    sizes_array,
    stack,
)
from ernie5_jax.testing import (
    KINDS,
    dummy_batch,
    dummy_rows,
    random_encoded_document,
    square_scales,
    tiny_model_config,
    tiny_sequence_config,
)
from ernie5_jax.vision.pyramid import ScalePyramid

MODEL = tiny_model_config(mtp_depth=2)
CONFIG = tiny_sequence_config(128)


def _slots(slots, start: int, end: int) -> dict:
    """Filled slots of one row inside [start, end), positions relative to start."""
    keep = (slots.index >= start) & (slots.index < end)
    values = {name: value[keep] for name, value in slots.values.items()}
    return {"index": slots.index[keep] - start, "weight": slots.weight[keep], **values}


class PackTest(parameterized.TestCase):
    def test_packed_is_the_concatenation(self):
        rows = dummy_rows(MODEL, rows=3, sequence=CONFIG, seed=4)
        for documents in rows:
            packed = pack(documents, CONFIG, MODEL)
            start = 0
            for number, row in enumerate(documents, 1):
                end = start + row.length
                chex.assert_trees_all_equal(packed.token[start:end], row.token)
                chex.assert_trees_all_equal(packed.position[start:end], row.position)
                chex.assert_trees_all_equal(packed.bounds[start:end], row.bounds + start)
                chex.assert_trees_all_equal(packed.mtp_token[:, start:end], row.mtp_token)
                self.assertTrue((packed.segment[start:end] == number).all())
                for group, own in ((packed.inputs, row.inputs), (packed.targets, row.targets)):
                    for name in set(group) - {"mtp"}:
                        found = _slots(group[name], start, end)
                        if name in own:
                            part = own[name]
                            expected = {"index": part.index, "weight": part.weight, **part.values}
                            chex.assert_trees_all_equal(found, expected)
                        else:
                            self.assertEmpty(found["index"])
                for d, part in enumerate(row.mtp):
                    mtp = jax.tree.map(lambda leaf, d=d: leaf[d], packed.targets["mtp"])
                    expected = {"index": part.index, "weight": part.weight, **part.values}
                    chex.assert_trees_all_equal(_slots(mtp, start, end), expected)
                start = end
            self.assertFalse(packed.segment[start:].any() or packed.token[start:].any())

    def test_empty_slots_point_past_the_end_and_weigh_nothing(self):
        packed = pack([], CONFIG, MODEL)
        for slots in (*packed.inputs.values(), *packed.targets.values()):
            self.assertTrue((slots.index == CONFIG.length).all())
            self.assertFalse(slots.weight.any())
        self.assertEqual(
            {name: float(value) for name, value in packed.denominators.items()}, dict.fromkeys(DENOMINATORS, 0)
        )

    def test_denominators(self):
        batch = dummy_batch(MODEL, rows=3, sequence=CONFIG)
        total = batch.denominators
        self.assertEqual(set(total), set(DENOMINATORS))
        self.assertEqual(total["tokens"], (batch.segment > 0).sum())
        for name in ("text", "audio", "mtp"):
            self.assertAlmostEqual(total[name], batch.targets[name].weight.sum(), places=3)
        visual = batch.targets["visual"]
        self.assertAlmostEqual(total["image"] + total["video"], visual.weight.sum(), places=3)
        self.assertAlmostEqual(total["video"], (visual.weight * visual.values["is_video"]).sum(), places=3)
        for name in DENOMINATORS:
            self.assertGreater(total[name], 0)
        part = stack([pack(row, CONFIG, MODEL) for row in dummy_rows(MODEL, rows=1, sequence=CONFIG)], total)
        chex.assert_trees_all_equal(part.denominators, total)
        chex.assert_tree_shape_prefix((part.token, part.inputs, part.targets), (1,))

    @parameterized.parameters(
        {"length": 40}, {"text_targets": 3}, {"visual_inputs": 4}, {"understand_inputs": 1}, {"audio_targets": 1}
    )
    def test_overflow_is_refused(self, **small):
        rows = dummy_rows(MODEL, rows=1, sequence=CONFIG)[0]
        key, value = next(iter(small.items()))
        config = dataclasses.replace(CONFIG, **small)
        with self.assertRaisesRegex(SequenceError, f"row: needs .*'sequence.{key}' = {value}"):
            pack(rows, config, MODEL)

    @parameterized.parameters({"visual_bits": 5}, {"vision_feature_dim": 7}, {"audio_levels": 4}, {"mtp_depth": 1})
    def test_other_widths_are_refused(self, **other):
        rows = dummy_rows(MODEL, rows=1, sequence=CONFIG)[0]
        with self.assertRaisesRegex(SequenceError, "allowed"):
            pack(rows, CONFIG, dataclasses.replace(MODEL, **other))


class PlanTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.scales = square_scales(2)
        self.documents = [random_encoded_document(rng, MODEL, first=KINDS[i % 8]) for i in range(60)]
        self.sizes = sizes_array([document_size(document, self.scales) for document in self.documents])
        self.config = dataclasses.replace(CONFIG, visual_inputs=40, audio_targets=12, understand_inputs=20)

    @parameterized.parameters(1, 4, 100)
    def test_every_document_once_and_every_row_packs(self, open_rows):
        plan = plan_rows(self.sizes, self.config, seed=(3, 1), open_rows=open_rows)
        self.assertEqual(sorted(np.concatenate(plan).tolist()), list(range(60)))
        pyramid = ScalePyramid(self.scales, MODEL.visual_bits)
        for numbers in plan:
            self.assertTrue((self.sizes[numbers].sum(0) <= row_capacity(self.config)).all())
            rows = [layout(self.documents[n], self.config, pyramid, audio_bins=16, mtp_depth=2) for n in numbers]
            pack(rows, self.config, MODEL)

    def test_pure_function_of_seed(self):
        first, again, other = (plan_rows(self.sizes, self.config, seed=s) for s in ((0, 0), (0, 0), (0, 1)))
        chex.assert_trees_all_equal(first, again)
        self.assertNotEqual([row.tolist() for row in first], [row.tolist() for row in other])

    def test_first_fit(self):
        sizes = np.zeros((6, 7), np.int64)
        sizes[:, 0] = [100, 60, 60, 28, 8, 128]
        found = [row.tolist() for row in plan_rows(sizes, CONFIG, open_rows=2)]
        self.assertEqual(found, [[0, 3], [1, 2, 4], [5]])
        # With one open row, a document that does not fit closes it: 4 can no longer join 1 and 2.
        found = [row.tolist() for row in plan_rows(sizes, CONFIG, open_rows=1)]
        self.assertEqual(found, [[0], [1, 2], [3, 4], [5]])

    def test_names_the_document_that_never_fits(self):
        self.sizes[17, 3] = 41
        config = dataclasses.replace(self.config, visual_targets=40)
        with self.assertRaisesRegex(SequenceError, "document 17 .*needs 41 visual_targets.*= 40"):
            plan_rows(self.sizes, config)


if __name__ == "__main__":
    absltest.main()
