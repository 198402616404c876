"""The tokenizer as a whole: frame rule, chunks, pictures as videos, saving, and a short training."""

import dataclasses
import json
import pathlib

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from ernie5_jax.config import TokenizerTrainingConfig, VisualTokenizerConfig
from ernie5_jax.vision import CausalVisualTokenizer, VisionError, load_visual_tokenizer, train_visual_tokenizer
from ernie5_jax.vision.autoencoder import init_variables
from ernie5_jax.vision.tokenizer import _flatten
from ernie5_jax.vision.training import compiled_train_step, init_state

CONFIG = VisualTokenizerConfig(
    channels=(8, 12), bits=6, image_size=8, scales=(1, 2), training=TokenizerTrainingConfig(steps=2, batch_size=4)
)


def _random_variables(config):
    """Every parameter non-zero, time slices included, so that nothing is equal by accident."""
    rng = np.random.default_rng(0)
    draw = lambda x: (0.5 * x + 0.2 * rng.normal(size=x.shape)).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, init_variables(config, 0))


def _video(*shape):
    return np.random.default_rng(1).integers(0, 256, (*shape, 8, 8, 3)).astype(np.uint8)


class CausalTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Convolutions over time at every resolution, so that every kind of state is handed on.
        config = dataclasses.replace(CONFIG, temporal_kernels=(2, 3))
        cls.tokenizer = CausalVisualTokenizer(config, _random_variables(config))

    @parameterized.parameters(*([1, 4, 4], [1, 8], [5, 4]))
    def test_chunks_equal_the_whole(self, *plan):
        tokenizer = self.tokenizer
        video = _video(2, 9)
        latents, features = tokenizer.encode(video)
        past, parts, start = None, [], 0
        for frames in plan:
            *out, past = tokenizer.encode_chunk(video[:, start : start + frames], past)
            parts.append(out)
            start += frames
        np.testing.assert_allclose(np.concatenate([p[0] for p in parts], 1), latents, atol=1e-5)
        np.testing.assert_allclose(np.concatenate([p[1] for p in parts], 1), features, atol=1e-5)

    @parameterized.parameters(*([1, 2], [1, 1, 1], [2, 1]))
    def test_streamed_decoding_equals_the_whole(self, *plan):
        tokenizer = self.tokenizer
        quantized = np.random.default_rng(2).normal(size=(2, 3, 2, 2, 6)).astype(np.float32)
        whole = tokenizer.decode(quantized)
        chex.assert_shape(whole, (2, 9, 8, 8, 3))
        past, parts, start = None, [], 0
        for frames in plan:
            out, past = tokenizer.decode_chunk(quantized[:, start : start + frames], past)
            parts.append(out.astype(int))
            start += frames
        self.assertLessEqual(np.abs(np.concatenate(parts, 1) - whole).max(), 1)  # rounding to uint8

    def test_a_clip_alone_is_not_the_rest_of_a_video(self):
        """Report 19: a clip that is encoded on its own begins with another latent than inside its video."""
        video = _video(1, 9)
        whole, alone = self.tokenizer.encode(video)[0], self.tokenizer.encode(video[:, 4:])[0]
        self.assertGreater(np.abs(whole[:, 1] - alone[:, 0]).max(), 1e-2)

    def test_states_of_encoder_and_decoder_are_apart_and_never_changed(self):
        """Reports 17 and 18."""
        video, quantized = _video(1, 5), np.zeros((1, 2, 2, 2, 6), np.float32)
        *_, past = self.tokenizer.encode_chunk(video[:, :1], None)
        before = jax.tree.map(np.array, past)
        first = self.tokenizer.encode_chunk(video[:, 1:], past)[0]
        _, decoding = self.tokenizer.decode_chunk(quantized[:, :1], None)
        self.tokenizer.decode_chunk(quantized[:, 1:], decoding)
        chex.assert_trees_all_equal(past, before)
        np.testing.assert_array_equal(self.tokenizer.encode_chunk(video[:, 1:], past)[0], first)

    def test_a_picture_is_the_first_frame_of_a_video(self):
        video = _video(3, 9)
        np.testing.assert_allclose(
            self.tokenizer.encode(video[:, :1])[0], self.tokenizer.encode(video)[0][:, :1], atol=1e-5
        )
        quantized = np.random.default_rng(2).normal(size=(3, 3, 2, 2, 6)).astype(np.float32)
        picture, clip = self.tokenizer.decode(quantized[:, :1]), self.tokenizer.decode(quantized)[:, :1]
        self.assertLessEqual(np.abs(picture.astype(int) - clip).max(), 1)

    def test_latents_never_depend_on_later_frames_but_on_all_earlier_ones(self):
        apply, params = self.tokenizer._encode, self.tokenizer.variables
        video = _video(1, 9)
        base = np.asarray(apply(params, video, None)[0])
        for changed in range(9):
            other = video.copy()
            other[:, changed] = 255 - other[:, changed]
            moved = np.abs(np.asarray(apply(params, other, None)[0]) - base).max((0, 2, 3, 4)) > 1e-4
            first = (changed + 3) // 4  # latent that the frame belongs to
            self.assertEqual(moved.tolist(), [y >= first for y in range(3)])

    @parameterized.parameters((1, 1), (5, 2), (17, 5), (81, 21))
    def test_frames_of_latents(self, frames, latents):
        self.assertEqual(self.tokenizer.latent_frames(frames), latents)

    @parameterized.parameters(0, 2, 6, 72)
    def test_other_numbers_of_frames_are_refused(self, frames):
        with self.assertRaisesRegex(VisionError, f"found {frames} frames, allowed: T = 1 mod 4"):
            self.tokenizer.encode(np.zeros((1, frames, 8, 8, 3), np.uint8))

    def test_seventeen_latents_decode_to_65_frames(self):
        shape = jax.eval_shape(self.tokenizer._decode, self.tokenizer.variables, jnp.zeros((1, 17, 2, 2, 6)), None)[
            0
        ].shape
        self.assertEqual(shape, (1, 65, 8, 8, 3))

    def test_wrong_input_is_named(self):
        with self.assertRaisesRegex(VisionError, "found float32"):
            self.tokenizer.encode(np.zeros((1, 1, 8, 8, 3), np.float32))
        with self.assertRaisesRegex(VisionError, r"allowed: uint8 \[B, T, 8, 8, 3\]"):
            self.tokenizer.encode(np.zeros((1, 1, 8, 4, 3), np.uint8))
        _, _, past = self.tokenizer.encode_chunk(_video(1, 1))
        with self.assertRaisesRegex(VisionError, "a multiple of 4"):
            self.tokenizer.encode_chunk(_video(1, 3), past)
        with self.assertRaisesRegex(VisionError, "quantized latents"):
            self.tokenizer.decode(np.zeros((1, 1, 4, 4, 6), np.float32))

    @parameterized.parameters(0, 3, 70)
    def test_rows_do_not_depend_on_their_batch(self, rows):
        video = _video(70, 1)
        latents, features = self.tokenizer.encode(video[:rows])
        chex.assert_shape(latents, (rows, 1, 2, 2, 6))
        chex.assert_shape(features, (rows, 1, 2, 2, 12))
        if rows:
            np.testing.assert_allclose(latents[-1:], self.tokenizer.encode(video[rows - 1 : rows])[0], atol=1e-5)


class FileTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path) / "visual"
        self.tokenizer = CausalVisualTokenizer(CONFIG, _random_variables(CONFIG))
        self.tokenizer.save(self.folder)

    def test_round_trip(self):
        loaded = load_visual_tokenizer(self.folder)
        self.assertEqual(loaded.config, CONFIG)
        self.assertEqual(loaded.fingerprint(), self.tokenizer.fingerprint())
        self.assertRegex(loaded.fingerprint(), "^[0-9a-f]{16}$")
        video = _video(2, 1)
        np.testing.assert_array_equal(loaded.encode(video)[0], self.tokenizer.encode(video)[0])
        self.assertCountEqual([p.name for p in self.folder.iterdir()], ["config.json", "arrays.npz"])

    def test_fingerprint_follows_parameters_not_training_settings(self):
        changed = jax.tree.map(np.asarray, self.tokenizer.variables)
        changed["mean"] = changed["mean"] + 1e-3
        self.assertNotEqual(CausalVisualTokenizer(CONFIG, changed).fingerprint(), self.tokenizer.fingerprint())
        config = dataclasses.replace(CONFIG, training=TokenizerTrainingConfig(steps=9))
        same = CausalVisualTokenizer(config, self.tokenizer.variables)
        self.assertEqual(same.fingerprint(), self.tokenizer.fingerprint())

    def test_damaged_folders_are_refused_by_name(self):
        path = self.folder / "config.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "fingerprint": "0" * 16}))
        with self.assertRaisesRegex(VisionError, "visual': found fingerprint"):
            load_visual_tokenizer(self.folder)
        path.write_text(json.dumps({**content, "config": {**content["config"], "bits": 7}}))
        with self.assertRaisesRegex(VisionError, "other names or shapes"):
            load_visual_tokenizer(self.folder)
        path.write_text("{")
        with self.assertRaisesRegex(VisionError, "visual'"):
            load_visual_tokenizer(self.folder)
        with self.assertRaisesRegex(VisionError, "nowhere"):
            load_visual_tokenizer(self.folder.parent / "nowhere")


class TrainingTest(parameterized.TestCase):
    def test_loss_falls_and_bits_stay_alive(self):
        """Report 9: no scale collapses to constant bits."""
        config = dataclasses.replace(
            CONFIG,
            res_blocks=0,
            training=TokenizerTrainingConfig(steps=120, batch_size=16, learning_rate=4e-3, log_every=40),
        )
        rng = np.random.default_rng(0)
        corners = rng.integers(0, 255, (64, 2, 2, 3))
        images = corners.repeat(4, 1).repeat(4, 2).astype(np.uint8)
        logged = {}
        tokenizer = train_visual_tokenizer(
            images, None, config, seed=0, log=lambda step, values: logged.update({step: values}), progress=False
        )
        self.assertEqual(sorted(logged), [40, 80, 120])
        self.assertLess(logged[120]["loss"], logged[40]["loss"])
        for k in (1, 2):
            self.assertGreaterEqual(logged[120][f"bit_entropy_{k}"], 0.5)
        error = np.mean((tokenizer.reconstruct(images[:, None])[:, 0].astype(float) - images) ** 2)
        self.assertLess(error, 0.5 * np.var(images))

    def test_images_and_videos_in_one_step_and_reproducible(self):
        images, videos = list(_video(6)), [_video(9), _video(5)]
        runs = [train_visual_tokenizer(images, videos, CONFIG, seed=s, progress=False) for s in (0, 0, 1)]
        self.assertEqual(runs[0].fingerprint(), runs[1].fingerprint())
        self.assertNotEqual(runs[0].fingerprint(), runs[2].fingerprint())

    def test_one_step_moves_the_means_and_reaches_every_parameter(self):
        unravel = jax.flatten_util.ravel_pytree(init_state(CONFIG, 0)["params"])[1]
        state, _ = compiled_train_step(CONFIG)(init_state(CONFIG, 0), _video(4), _video(6, 5))
        gradient = jax.tree.map(np.asarray, unravel(optax.tree.get(state["opt_state"], "mu")))
        self.assertEqual([k for k, g in _flatten(gradient).items() if not np.abs(g).max() > 0], [])
        self.assertGreater(float(jnp.abs(state["mean"]).max(1).min()), 0)
        self.assertEqual(int(state["step"]), 1)

    def test_bad_material_is_named(self):
        with self.assertRaisesRegex(VisionError, "no picture and no video"):
            train_visual_tokenizer([], None, CONFIG)
        with self.assertRaisesRegex(VisionError, "training picture 1: found uint8"):
            train_visual_tokenizer([_video()[...], np.zeros((4, 4, 3), np.uint8)], None, CONFIG)
        with self.assertRaisesRegex(VisionError, "training video 0: .* T = 1 mod 4"):
            train_visual_tokenizer(None, [_video(6)], CONFIG)


if __name__ == "__main__":
    absltest.main()
