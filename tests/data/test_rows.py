"""Packed rows and batches: a pure function of (seed, number), with the shares that were asked for."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax import data
from ernie5_jax.data.mixture import BLOCK, Mixture
from ernie5_jax.sequence import DENOMINATORS, Document, EncodedText, Span
from ernie5_jax.testing import (
    DummyAudioTokenizer,
    DummyTextTokenizer,
    DummyVisualTokenizer,
    tiny_experiment_config,
)
from ernie5_jax.text.special_tokens import NULL, NUM_SPECIAL_TOKENS


class DroppingTokenizer(DummyTextTokenizer):
    """Joins pairs of equal bytes unless a keyed coin says otherwise: 'aa' has one token, or two."""

    def encode(self, text):
        return np.asarray(self._tokens(text, lambda: True), np.int32)

    def encode_dropout(self, text, key, rate):
        rng = np.random.default_rng(key)
        return np.asarray(self._tokens(text, lambda: rng.random() >= rate), np.int32)

    def _tokens(self, text, keep):
        tokens, i = [], 0
        while i < len(text):
            pair = text[i : i + 2] == text[i] * 2 and keep()
            tokens.append(NUM_SPECIAL_TOKENS + ord(text[i]) + (128 if pair else 0))
            i += 1 + pair
        return tokens


TOKENIZERS = data.Tokenizers(DummyTextTokenizer(), DummyVisualTokenizer(), DummyAudioTokenizer())


def prepared(folder: Path, config, tokenizers=TOKENIZERS):
    documents = data.prepare_documents(config, folder, "train", progress=False)
    return data.prepare_encoded(config, folder, "train", documents, tokenizers, progress=False)


def tiny_config(**sections):
    sources = {"tiny": {"world": "tiny"}}
    return tiny_experiment_config(**{"data": {"sources": sources}, "sequence": {"length": 192}, **sections})


class MixtureTest(absltest.TestCase):
    def test_shares_hold_in_every_block_and_epochs_are_permutations(self):
        groups = [np.arange(100), np.arange(100, 130), np.arange(130, 137)]
        mixture = Mixture(groups, [5.0, 3.0, 2.0], seed=3)
        seen = []
        for number in range(3):
            draws = mixture.block(number)
            self.assertAlmostEqual(len(draws), BLOCK, delta=3)
            counts = Counter(np.searchsorted([100, 130, 137], draw.document, side="right").item() for draw in draws)
            np.testing.assert_allclose([counts[i] / BLOCK for i in range(3)], [0.5, 0.3, 0.2], atol=2 / BLOCK)
            seen += draws
        self.assertEqual(mixture.block(1), Mixture(groups, [5.0, 3.0, 2.0], seed=3).block(1))
        self.assertNotEqual(mixture.block(1), Mixture(groups, [5.0, 3.0, 2.0], seed=4).block(1))
        for group in groups:  # every full epoch has every document once
            members = [draw for draw in seen if draw.document in group]
            last = max(draw.epoch for draw in members)
            for epoch in range(last):
                self.assertCountEqual([draw.document for draw in members if draw.epoch == epoch], group.tolist())


class RowsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)

    def test_any_order_of_access_gives_the_same_rows(self):
        config = tiny_config()
        encoded = prepared(self.folder, config)
        numbers = [0, 5, 1500, 3, 700]
        first = data.RowSource(encoded, config, TOKENIZERS)
        rows = {i: first[i] for i in numbers}
        other = data.RowSource(encoded, config, TOKENIZERS)
        for i in sorted(numbers, reverse=True):
            chex.assert_trees_all_equal(rows[i], other[i])
        moved = data.RowSource(encoded, tiny_config(seed=1), TOKENIZERS)
        self.assertFalse(np.array_equal(rows[0].token, moved[0].token))

    def test_every_document_of_the_stream_is_in_one_row(self):
        config = tiny_config()
        rows = data.RowSource(prepared(self.folder, config), config, TOKENIZERS)
        counts = Counter(draw for i in range(600) for draw in rows.draws(i))
        self.assertEqual(set(counts.values()), {1})
        epochs = Counter(draw.epoch for draw in counts)
        self.assertEqual(epochs[0], 268)  # the first epoch is complete

    def test_task_weights(self):
        shares = {"text": 0.5, "image_caption": 0.25, "video_generation": 0.25}
        config = tiny_config(data={"sources": {"tiny": {"world": "tiny"}}, "task_weights": shares})
        encoded = prepared(self.folder, config)
        rows = data.RowSource(encoded, config, TOKENIZERS)
        draws = list(itertools.chain.from_iterable(rows.draws(i) for i in range(500)))
        counts = Counter(str(encoded["tiny"].tasks[draw.document]) for draw in draws)
        self.assertEqual(set(counts), set(shares))
        for task, share in shares.items():
            self.assertAlmostEqual(counts[task] / len(draws), share, delta=0.02)
        config = tiny_config(data={"sources": {"tiny": {"world": "tiny"}}, "task_weights": {"smell": 1.0}})
        with self.assertRaisesRegex(data.DataError, "'data.task_weights.smell': found no document"):
            data.RowSource(encoded, config, TOKENIZERS)

    def test_task_weights_are_checked_before_anything_is_encoded(self):
        config = tiny_config()
        documents = data.prepare_documents(config, self.folder, "train", progress=False).values()
        known = ", ".join(sorted({data.infer_task(d) for shards in documents for d in shards}))
        wrong = dataclasses.replace(config.data, task_weights={"text": 1.0, "smell": 0.5})
        with self.assertRaisesRegex(data.DataError, f"'data.task_weights.smell': found no document, allowed: {known}"):
            data.check_tasks(documents, wrong)
        right = dataclasses.replace(config.data, task_weights={"text": 1.0, "smell": 0.0})
        data.check_tasks(documents, right)

    def test_batches_have_global_denominators(self):
        config = tiny_config()
        rows = data.RowSource(prepared(self.folder, config), config, TOKENIZERS)
        batch = rows.batch(2, 4)
        chex.assert_shape(batch.token, (4, 192))
        parts = [rows[i].denominators for i in range(8, 12)]
        for name in DENOMINATORS:
            np.testing.assert_allclose(batch.denominators[name], sum(part[name] for part in parts), rtol=1e-6)
        self.assertEqual(batch.denominators["tokens"], (batch.segment > 0).sum())

    def test_loader_goes_on_where_it_stopped(self):
        config = tiny_config()
        encoded = prepared(self.folder, config)
        loader = data.make_loader(data.RowSource(encoded, config, TOKENIZERS), 3, prefetch=2)
        batches = [next(loader) for _ in range(4)]
        self.assertEqual(loader.step, 4)
        loader.close()
        resumed = data.make_loader(data.RowSource(encoded, config, TOKENIZERS), 3, step=2, prefetch=0)
        chex.assert_trees_all_equal(next(resumed), batches[2])
        chex.assert_trees_all_equal(next(resumed), batches[3])
        resumed.seek(0)
        chex.assert_trees_all_equal(next(resumed), batches[0])

    def test_training_draws_differ_between_epochs_and_not_between_runs(self):
        config = tiny_config(
            sequence={"length": 192, "condition_dropout": 0.5},
            data={"sources": {"tiny": {"world": "tiny"}}, "task_weights": {"image_generation": 1.0}},
        )
        encoded = prepared(self.folder, config)
        rows = data.RowSource(encoded, config, TOKENIZERS)
        found = [rows[i] for i in range(60)]
        nulls = [
            bool((row.token[row.segment == segment] == NULL).any())
            for row in found
            for segment in range(1, int(row.segment.max()) + 1)
        ]
        # Half of the conditions are dropped, four standard deviations.
        self.assertAlmostEqual(np.mean(nulls), 0.5, delta=4 * 0.5 / np.sqrt(len(nulls)))
        draws = {}
        for i, row in enumerate(found):
            for segment, draw in enumerate(rows.draws(i), 1):
                draws.setdefault(draw.document, []).append(row.token[row.segment == segment].tolist())
        epochs = [tokens for tokens in draws.values() if len(tokens) > 2]
        self.assertTrue(any(tokens[0] != tokens[1] for tokens in epochs))
        chex.assert_trees_all_equal(data.RowSource(encoded, config, TOKENIZERS)[50], found[50])

    def test_dropped_merges_change_text_within_their_reserve(self):
        tokenizers = data.Tokenizers(DroppingTokenizer(384), DummyVisualTokenizer(), DummyAudioTokenizer())
        sections = {
            "text": {"vocab_size": 384, "dropout": 0.1},
            "model": {"vocab_size": 384},
            "data": {"sources": {"a": {"path": str(self.folder / "raw")}}},
        }
        config = tiny_experiment_config(**sections)
        text = "aabbccddeeffgg" * 3 + "hi"
        source = data.ListSource([Document((Span("text", "generate", text),), {"task": "text"})] * 4, "texts")
        data.write_shards(source, self.folder / "raw" / "train", 1000, progress=False)
        encoded = prepared(self.folder, config, tokenizers)
        self.assertEqual(encoded["a"].text_tokens[0], 23)
        rows = data.RowSource(encoded, config, tokenizers)
        found = [rows[i] for i in range(200)]
        lengths = [int((row.segment == s).sum()) - 2 for row in found for s in range(1, int(row.segment.max()) + 1)]
        self.assertEqual(max(lengths), 27)  # ceil(1.15 x 23); longer ones fall back to the plain encoding
        self.assertEqual(min(lengths), 23)
        self.assertGreater(len(set(lengths)), 3)
        chex.assert_trees_all_equal(found[7], data.RowSource(encoded, config, tokenizers)[7])

    def test_corrupted_pictures_lose_a_bounded_share_of_their_cells(self):
        sources = {"tiny": {"world": "tiny"}}
        weights = {"image_caption": 1.0, "image_generation": 1.0}
        clean = tiny_config(data={"sources": sources, "task_weights": weights})
        noisy = tiny_config(data={"sources": sources, "task_weights": weights, "visual_corruption": 0.4})
        encoded = prepared(self.folder, clean)
        a, b = (data.RowSource(encoded, config, TOKENIZERS) for config in (clean, noisy))
        lost = total = 0
        for i in range(100):
            before, after = a[i].inputs["understand"], b[i].inputs["understand"]
            chex.assert_trees_all_equal(before.index, after.index)
            used = before.index < clean.sequence.length
            x, y = before.values["features"][used], after.values["features"][used]
            zero, gone = ((z == 0).all((-1, -2)) for z in (x, y))
            chex.assert_trees_all_equal(x[~gone], y[~gone])
            lost += int((gone & ~zero).sum())
            total += int((~zero).sum())
        self.assertBetween(lost / total, 0.15, 0.25)  # mean of U(0, 0.4)

    def test_corrupted_codes_are_a_bounded_share_of_what_is_understood(self):
        sources = {"tiny": {"world": "tiny"}}
        weights = {"speech_caption": 1.0, "speech_generation": 1.0}
        clean = tiny_config(data={"sources": sources, "task_weights": weights})
        noisy = tiny_config(data={"sources": sources, "task_weights": weights, "audio_corruption": 0.4})
        encoded = prepared(self.folder, clean)
        a, b = (data.RowSource(encoded, config, TOKENIZERS) for config in (clean, noisy))
        changed = total = 0
        for i in range(100):
            before, after = a[i], b[i]
            chex.assert_trees_all_equal(before.targets["audio"], after.targets["audio"])
            index = before.inputs["audio"].index
            used = index < 192
            generated = np.isin(index, before.targets["audio"].index)
            x, y = before.inputs["audio"].values["codes"], after.inputs["audio"].values["codes"]
            chex.assert_trees_all_equal(x[used & generated], y[used & generated])
            changed += int((x != y)[used & ~generated].sum())
            total += x[used & ~generated].size
            self.assertLess(int(y.max()), 16)
        # Mean share 0.2, of which 1/16 draws the code that was there.
        self.assertAlmostEqual(changed / total, 0.2 * 15 / 16, delta=0.03)

    def test_held_out_rows_read_everything_once(self):
        config = tiny_config()
        encoded = prepared(self.folder, config)
        rows = data.HeldOutRows(encoded, config, TOKENIZERS, ["text"])
        steps = -(-len(rows) // 3)
        batches = [rows.batch(step, 3) for step in range(steps)]
        total = sum(float(batch.denominators["text_bytes"]) for batch in batches)
        texts = [encoded["tiny"][i] for i in np.flatnonzero(encoded["tiny"].tasks == "text").tolist()]
        expected = sum(
            span.value.num_bytes for text in texts for span in text.spans if isinstance(span.value, EncodedText)
        )
        self.assertEqual(total, expected)
        jax.tree.map(lambda a, b: self.assertEqual(a.shape, b.shape), batches[0], batches[-1])
        self.assertEqual(batches[0].denominators["image"], 0)
        with self.assertRaisesRegex(data.DataError, "found no document of smell"):
            data.HeldOutRows(encoded, config, TOKENIZERS, ["smell"])


if __name__ == "__main__":
    absltest.main()
