"""The public dummies keep the promises of the Protocols they stand in for."""

from __future__ import annotations

import tempfile
from pathlib import Path

import chex
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.audio.protocol import AudioTokenizer
from ernie5_jax.errors import UserError
from ernie5_jax.sequence import layout
from ernie5_jax.testing import (
    KINDS,
    DummyAudioTokenizer,
    DummyTextTokenizer,
    DummyVisualTokenizer,
    dummy_batch,
    random_document,
    random_encoded_document,
    tiny_model_config,
    tiny_sequence_config,
)
from ernie5_jax.text.protocol import TextTokenizer
from ernie5_jax.text.special_tokens import NUM_SPECIAL_TOKENS
from ernie5_jax.vision.protocol import VisualTokenizer
from ernie5_jax.vision.pyramid import ScalePyramid

TEXT: TextTokenizer = DummyTextTokenizer()
VISUAL: VisualTokenizer = DummyVisualTokenizer()
AUDIO: AudioTokenizer = DummyAudioTokenizer()


class TokenizerTest(parameterized.TestCase):
    @parameterized.parameters("", "plain", "äöü 語 🙂", "\ud800 lone")
    def test_text_round_trip(self, text):
        ids = TEXT.encode(text)
        self.assertTrue((ids >= NUM_SPECIAL_TOKENS).all() and (ids < TEXT.vocab_size).all())
        self.assertEqual(TEXT.decode(ids), text)
        self.assertEqual(TEXT.decode(np.concatenate([[1], ids, [2]])), text)

    def test_picture_of_patches_round_trips(self):
        rng = np.random.default_rng(0)
        video = rng.integers(0, 256, (2, 3, 2, 2, 3), dtype=np.uint8).repeat(4, 2).repeat(4, 3)
        video = np.concatenate([video[:, :1], video[:, 1:].repeat(4, 1)], axis=1)
        latents, features = VISUAL.encode(video)
        chex.assert_shape(latents, (2, 3, 2, 2, VISUAL.bits))
        chex.assert_shape(features, (2, 3, 2, 2, VISUAL.feature_dim))
        chex.assert_trees_all_equal(VISUAL.decode(latents), video)
        with self.assertRaisesRegex(UserError, "T = 6"):
            VISUAL.encode(np.zeros((1, 6, 8, 8, 3), np.uint8))

    def test_audio_round_trip(self):
        rng = np.random.default_rng(0)
        waves = [rng.uniform(-1, 1, n).astype(np.float32).repeat(40) for n in (1, 5)]
        codes = AUDIO.encode(waves)
        self.assertEqual([code.shape for code in codes], [(1, 3), (5, 3)])
        for wave, decoded in zip(waves, AUDIO.decode(codes), strict=True):
            chex.assert_trees_all_close(decoded, wave, atol=16**-3 + 1e-6)
        self.assertLen(AUDIO.encode([waves[1][:-1]])[0], 5)  # a part frame is padded
        with self.assertRaisesRegex(UserError, "0 samples"):
            AUDIO.encode([np.zeros(0, np.float32)])

    @parameterized.parameters(DummyTextTokenizer(400), DummyVisualTokenizer(bits=5), DummyAudioTokenizer(levels=2))
    def test_save_and_load(self, tokenizer):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder) / "t")
            loaded = type(tokenizer).load(Path(folder) / "t")
        self.assertEqual(loaded.fingerprint(), tokenizer.fingerprint())
        self.assertNotEqual(type(tokenizer)().fingerprint(), tokenizer.fingerprint())


class RandomTest(parameterized.TestCase):
    def test_documents_hold_every_kind(self):
        rng = np.random.default_rng(0)
        documents = [random_document(rng) for _ in range(40)]
        self.assertEqual({(s.modality, s.role) for d in documents for s in d.spans}, set(KINDS))
        for span in (s for d in documents for s in d.spans):
            if span.modality == "video":
                self.assertEqual(span.value.shape[0] % 4, 1)
            if span.modality == "audio":
                AUDIO.encode([span.value])

    def test_encoded_documents_lay_out(self):
        model = tiny_model_config(visual_scales=3)
        pyramid = ScalePyramid(((1, 1), (2, 2), (4, 4)), model.visual_bits)
        rng = np.random.default_rng(0)
        for kind in KINDS:
            document = random_encoded_document(rng, model, [kind], max_spans=1)
            row = layout(document, tiny_sequence_config(256), pyramid, audio_bins=model.audio_bins, mtp_depth=1)
            self.assertGreater(row.length, 2)

    def test_batch_is_deterministic_and_of_the_asked_size(self):
        model = tiny_model_config()
        batch = dummy_batch(model, rows=3, sequence=tiny_sequence_config(48, understand_inputs=20))
        chex.assert_shape(batch.token, (3, 48))
        chex.assert_shape(batch.inputs["understand"].values["features"], (3, 20, 1, model.vision_feature_dim))
        again = dummy_batch(model, rows=3, sequence=tiny_sequence_config(48, understand_inputs=20))
        chex.assert_trees_all_equal(batch, again)
        self.assertTrue((batch.segment > 0).any(axis=1).all())


if __name__ == "__main__":
    absltest.main()
