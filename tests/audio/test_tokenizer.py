"""The codec end to end: training, frame counts, batches, padding, saving, bad input."""

import dataclasses
import json
import tempfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

from ernie5_jax.audio import AudioError, load_audio_tokenizer, stft, train_audio_tokenizer, training
from ernie5_jax.config import AudioTokenizerConfig, TokenizerTrainingConfig

CONFIG = AudioTokenizerConfig(
    fft_size=128,
    hop_length=40,
    fold=4,
    levels=3,
    bins=16,
    code_dim=8,
    hidden_size=32,
    griffin_lim_iterations=8,
    max_seconds=0.2,
    training=TokenizerTrainingConfig(steps=150, batch_size=8, warmup_steps=10, learning_rate=5e-3, log_every=25),
)
FRAME = CONFIG.samples_per_frame


def tone(frequency, samples, phase=0.0):
    """A tone with soft ends."""
    wave = 0.5 * np.sin(2 * np.pi * frequency * np.arange(samples) / CONFIG.sample_rate + phase)
    return (wave * np.hanning(samples)).astype(np.float32)


def clips():
    rng = np.random.default_rng(0)
    return [tone(rng.choice([400, 900, 1700, 2900]), rng.integers(800, 1600), rng.uniform(0, 6)) for _ in range(64)]


class TrainedTest(parameterized.TestCase):
    """Everything that needs a trained codec shares one."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.history = []
        cls.tokenizer = train_audio_tokenizer(clips(), CONFIG, seed=3, progress=False, log=cls.history.append)

    def test_training_learns_and_uses_the_codes(self):
        self.assertEqual([entry["step"] for entry in self.history], list(range(25, 151, 25)))
        self.assertLess(self.history[-1]["log_magnitude_l1"], 0.6 * self.history[0]["log_magnitude_l1"])
        self.assertGreater(self.history[-1]["codes_in_use"], 0.5)

    def test_tones_come_back_and_later_levels_help(self):
        waves = [tone(f, 8 * FRAME) for f in (400, 900, 1700, 2900)]
        spectra = lambda clips: np.abs(stft.stft(jnp.asarray(np.stack(clips)), 128, 40))  # noqa: E731
        codes, real = self.tokenizer.encode(waves), spectra(waves)
        one, full = (spectra(self.tokenizer.decode([code[:, :n] for code in codes])) for n in (1, CONFIG.levels))
        np.testing.assert_array_equal(full.sum(1).argmax(-1), real.sum(1).argmax(-1))
        self.assertLess(np.abs(full - real).mean(), np.abs(one - real).mean())

    @parameterized.parameters(-FRAME, -FRAME // 4 - 1, -FRAME // 4, -1, 0, 1, FRAME // 4, FRAME // 4 + 1)
    def test_frames_cover_the_clip_exactly(self, extra):
        samples = 5 * FRAME + extra
        expected = -(-samples // FRAME)
        wave = tone(900, samples)
        (codes,), (features,) = self.tokenizer.encode([wave]), self.tokenizer.features([wave])
        chex.assert_shape(codes, (expected, CONFIG.levels))
        chex.assert_shape(features, (expected, CONFIG.code_dim))
        self.assertEqual(self.tokenizer.frames(samples), expected)
        self.assertLen(self.tokenizer.decode([codes])[0], expected * FRAME)

    def test_batch_equals_single(self):
        waves = [tone(400, 3 * FRAME), tone(900, 40 * FRAME - 7), tone(1700, 1), tone(2900, 12 * FRAME + 1)]
        codes, features = self.tokenizer.encode(waves), self.tokenizer.features(waves)
        decoded = self.tokenizer.decode(codes)
        for i, wave in enumerate(waves):
            np.testing.assert_array_equal(self.tokenizer.encode([wave])[0], codes[i])
            np.testing.assert_array_equal(self.tokenizer.features([wave])[0], features[i])
            np.testing.assert_allclose(self.tokenizer.decode([codes[i]])[0], decoded[i], atol=1e-4)

    def test_what_fills_a_batch_does_not_change_a_clip(self):
        # The padding of a batch is no input of the network: the same clip in a wider program.
        codec = training.codec_from(training.codec_structure(CONFIG), self.tokenizer._arrays["params"])
        wave = jnp.asarray(tone(900, 5 * FRAME))[None]
        scale = self.tokenizer._arrays["scale"]
        alone = codec.encode(training.spectral_features(wave, scale, CONFIG), jnp.ones((1, 5), bool))
        wide = jnp.pad(wave, ((0, 0), (0, 6 * FRAME)))
        features = training.spectral_features(wide, scale, CONFIG).at[:, 20:].set(99.0)
        padded = codec.encode(features, jnp.arange(11)[None] < 5)
        np.testing.assert_allclose(padded[:, :5], alone, atol=1e-5)
        latents = jnp.zeros((1, 11, CONFIG.code_dim)).at[:, 5:].set(99.0).at[:, :5].set(alone)
        decoded = codec.decode(latents, jnp.arange(11)[None] < 5)
        np.testing.assert_allclose(decoded[:, :5], codec.decode(alone, jnp.ones((1, 5), bool)), atol=1e-5)

    def test_the_waveform_is_padded_not_the_features(self):
        wave = tone(900, 5 * FRAME - 100)
        padded = np.pad(wave, (0, 100))
        np.testing.assert_array_equal(self.tokenizer.encode([wave])[0], self.tokenizer.encode([padded])[0])

    def test_codes_are_those_of_the_features(self):
        wave = tone(1700, 6 * FRAME)
        (features,), (codes,) = self.tokenizer.features([wave]), self.tokenizer.encode([wave])
        left = features
        for level, book in enumerate(np.asarray(self.tokenizer._arrays["codes"])):
            left = left - book[codes[:, level]]
        self.assertLess((left**2).mean(), 0.5 * (features**2).mean())

    def test_saved_folder_is_self_contained(self):
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(Path(folder) / "audio")
            self.assertCountEqual([p.name for p in (Path(folder) / "audio").iterdir()], ["config.json", "arrays.npz"])
            loaded = load_audio_tokenizer(Path(folder) / "audio")
        self.assertEqual(loaded.config, CONFIG)
        self.assertEqual(loaded.fingerprint(), self.tokenizer.fingerprint())
        self.assertRegex(loaded.fingerprint(), "^[0-9a-f]{16}$")
        wave = tone(900, 5 * FRAME)
        np.testing.assert_array_equal(loaded.encode([wave])[0], self.tokenizer.encode([wave])[0])
        other = type(loaded)(CONFIG, {**loaded._arrays, "codes": loaded._arrays["codes"].at[0, 0, 0].add(1e-6)})
        self.assertNotEqual(other.fingerprint(), loaded.fingerprint())

    def test_a_folder_older_than_a_key_is_the_same_tokenizer(self):
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(Path(folder))
            content = json.loads((Path(folder) / "config.json").read_text())
            self.assertNotIn("split", content["config"])
            loaded = load_audio_tokenizer(folder)
        self.assertEqual(loaded.config, CONFIG)
        self.assertEqual(loaded.fingerprint(), self.tokenizer.fingerprint())

    def test_damaged_folder_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(AudioError, "audio tokenizer '.*': cannot be read"):
                load_audio_tokenizer(folder)
            self.tokenizer.save(Path(folder))
            arrays = Path(folder) / "arrays.npz"
            whole = arrays.read_bytes()
            arrays.write_bytes(whole[: len(whole) // 2])
            with self.assertRaisesRegex(AudioError, "cannot be read"):
                load_audio_tokenizer(folder)
            arrays.write_bytes(whole)
            config = Path(folder) / "config.json"
            content = json.loads(config.read_text())
            config.write_text(json.dumps(content | {"config": content["config"] | {"bins": 17}}))
            with self.assertRaisesRegex(AudioError, "arrays do not fit"):
                load_audio_tokenizer(folder)
            config.write_text(json.dumps(content | {"kind": "visual"}))
            with self.assertRaisesRegex(AudioError, "found kind and format"):
                load_audio_tokenizer(folder)

    @parameterized.parameters(
        ("encode", np.zeros(0, np.float32), "audio clip 1: found shape"),
        ("encode", np.zeros((2, 100), np.float32), "audio clip 1: found shape"),
        ("features", np.full(100, np.nan, np.float32), "audio clip 1: found samples that are not finite"),
        ("decode", np.full((5, 3), 16), "audio codes 1: found codes 16 ... 16, allowed: 0 ... 15"),
        ("decode", np.full((5, 3), -1), "audio codes 1: found codes -1"),
        ("decode", np.zeros((5, 4), int), "audio codes 1: found shape"),
    )
    def test_bad_input_is_named(self, method, bad, message):
        good = np.zeros((2, 3), int) if method == "decode" else tone(900, FRAME)
        with self.assertRaisesRegex(AudioError, message):
            getattr(self.tokenizer, method)([good, bad])

    def test_no_frames_is_no_sound(self):
        self.assertEqual(self.tokenizer.decode([np.zeros((0, 3), np.int32)])[0].shape, (0,))
        self.assertEqual(self.tokenizer.decode([]), [])


@pytest.mark.slow
class SplitTest(absltest.TestCase):
    def test_a_split_codec_learns_and_is_saved(self):
        history = []
        config = dataclasses.replace(CONFIG, split=True)
        tokenizer = train_audio_tokenizer(clips(), config, seed=3, progress=False, log=history.append)
        self.assertLess(history[-1]["log_magnitude_l1"], 0.6 * history[0]["log_magnitude_l1"])
        waves = [tone(400, 5 * FRAME), tone(1700, 7 * FRAME)]
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            loaded = load_audio_tokenizer(Path(folder))
        codes = loaded.encode(waves)
        chex.assert_shape(codes, [(5, 3), (7, 3)])
        chex.assert_shape(loaded.features(waves)[0], (5, 2 * CONFIG.code_dim))
        chex.assert_trees_all_equal(codes, tokenizer.encode(waves))
        # Level 1 reads the first half of the features and no other.
        book = np.asarray(loaded._arrays["codes"][0])
        first = loaded.features(waves)[0][:, : CONFIG.code_dim]
        np.testing.assert_array_equal(codes[0][:, 0], ((first[:, None] - book) ** 2).sum(-1).argmin(-1))
        self.assertTrue(all(np.isfinite(wave).all() for wave in loaded.decode(codes)))


class TrainingTest(absltest.TestCase):
    def test_the_result_is_a_function_of_data_config_and_seed(self):
        config = dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, steps=6))
        prints = [train_audio_tokenizer(clips(), config, seed=seed, progress=False).fingerprint() for seed in (1, 1, 2)]
        self.assertEqual(prints[0], prints[1])
        self.assertNotEqual(prints[0], prints[2])

    def test_gradient_over_silence_stays_small(self):
        # Norms with a tiny eps multiply the gradient of silent frames about a thousandfold each.
        data = training.Clips(clips()[:8], CONFIG, seed=0)
        state = training.initial_state(CONFIG, data.waves, data.lengths, seed=0)
        graph = training.codec_structure(CONFIG)
        mask = jnp.ones((8, data.frames), bool)
        levels = jnp.full(mask.shape, CONFIG.levels)

        @jax.jit
        def norm(waves):
            gradient = jax.grad(lambda p: training.loss_fn(p, state, waves, mask, levels, graph, CONFIG)[0])
            return jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient(state["params"]))))

        loud, silent = norm(jnp.asarray(data.waves)), norm(jnp.zeros_like(data.waves))
        self.assertLess(float(silent), 10 * float(loud))

    def test_parameters_name_their_axes(self):
        codec = nnx.eval_shape(lambda: training.Codec(CONFIG, nnx.Rngs(0)))
        for path, variable in nnx.to_flat_state(nnx.state(codec, nnx.Param)):
            self.assertIn("axes", variable.get_metadata(), path)

    def test_no_clips_or_an_empty_clip_is_refused(self):
        with self.assertRaisesRegex(AudioError, "audio clips: found none"):
            train_audio_tokenizer([], CONFIG, progress=False)
        with self.assertRaisesRegex(AudioError, "audio clip 1: found shape"):
            train_audio_tokenizer([tone(400, 900), np.zeros(0, np.float32)], CONFIG, progress=False)


if __name__ == "__main__":
    absltest.main()
