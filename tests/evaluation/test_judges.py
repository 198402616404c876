"""Judges learn easy pictures, clips and tones, repeat bit for bit, and survive saving."""

import chex
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.evaluation import judges, speech_features
from ernie5_jax.evaluation.errors import EvaluationError


def pictures(count: int, seed: int) -> tuple[list[np.ndarray], list[int]]:
    """Bars in one of three rows (class 0, 1, 7), with noise."""
    rng = np.random.default_rng(seed)
    labels = [(0, 1, 7)[i % 3] for i in range(count)]
    images = []
    for label in labels:
        image = rng.integers(0, 60, (8, 8, 3)).astype(np.uint8)
        row = {0: 1, 1: 4, 7: 6}[label]
        image[row] = 220
        images.append(image)
    return images, labels


class JudgesTest(parameterized.TestCase):
    def test_image_judge_learns_and_repeats(self):
        images, labels = pictures(60, 0)
        train = lambda: judges.train_judge("image", images, {"digit": labels}, steps=60, batch_size=16)  # noqa: E731
        judge = train()
        held_out, expected = pictures(30, 1)
        self.assertGreaterEqual(judge.accuracy(held_out, "digit", expected), 0.9)
        chex.assert_trees_all_equal(judge.params, train().params)

    def test_video_judge_has_two_heads(self):
        images, labels = pictures(48, 2)
        directions = ["right" if i % 2 else "left" for i in range(48)]
        videos = []
        for image, direction in zip(images, directions, strict=True):
            video = np.repeat(image[None], 5, 0) // 2
            for t in range(5):
                video[t, :, t + 1 if direction == "right" else 6 - t] = 255
            videos.append(video)
        labels = {"digit": labels, "direction": directions}
        judge = judges.train_judge("video", videos, labels, steps=80, batch_size=16)
        self.assertEqual(judge.labels, {"digit": (0, 1, 7), "direction": ("left", "right")})
        self.assertGreaterEqual(judge.accuracy(videos, "direction", directions), 0.9)
        self.assertGreaterEqual(judge.accuracy(videos, "digit", labels["digit"]), 0.8)

    def test_speech_judge_and_saving(self):
        rng = np.random.default_rng(3)
        t = np.arange(2400) / 8000
        tones = {2: 300, 5: 900, 9: 2400}
        labels = [(2, 5, 9)[i % 3] for i in range(45)]
        waves = [
            np.sin(2 * np.pi * tones[label] * t[: rng.integers(1500, 2400)]).astype(np.float32) for label in labels
        ]
        judge = judges.train_judge("speech", waves, {"digit": labels}, steps=40, batch_size=16, sample_rate=8000)
        quieter = [0.05 * wave for wave in waves]
        self.assertEqual(judge.accuracy(quieter, "digit", labels), 1.0)
        path = self.create_tempdir().full_path
        judge.save(judges.Path(path) / "speech.npz")
        loaded = judges.Judge.load(judges.Path(path) / "speech.npz")
        self.assertEqual((loaded.kind, loaded.labels, loaded.shape, loaded.sample_rate),
                         (judge.kind, judge.labels, judge.shape, judge.sample_rate))  # fmt: skip
        np.testing.assert_array_equal(loaded.predict(waves)["digit"], judge.predict(waves)["digit"])

    def test_refusals(self):
        images, labels = pictures(6, 0)
        with self.assertRaisesRegex(EvaluationError, "found 5 digit labels for 6 items"):
            judges.train_judge("image", images, {"digit": labels[:5]})
        with self.assertRaisesRegex(EvaluationError, r"image 0: found size \(8, 9\), allowed: \(8, 8\)"):
            judges.prepare("image", [np.zeros((8, 9, 3), np.uint8)], (8, 8, 1))
        file = self.create_tempfile(content="no judge")
        with self.assertRaisesRegex(EvaluationError, "unreadable"):
            judges.Judge.load(judges.Path(file.full_path))


class SpeechFeaturesTest(absltest.TestCase):
    def test_a_tone_lights_its_own_band(self):
        t = np.arange(4000) / 8000
        picture = speech_features.log_mel([np.sin(2 * np.pi * 1000 * t)], 8000, 30)[0]
        low, high = 2595 * np.log10(1 + np.array([60.0, 4000.0]) / 700)
        centres = 700 * (10 ** (np.linspace(low, high, 42)[1:-1] / 2595) - 1)
        self.assertEqual(picture[10].argmax(), np.abs(centres - 1000).argmin())
        self.assertAlmostEqual(float(picture.max()), 1.0)
        self.assertAlmostEqual(float(picture.min()), -1.0)

    def test_every_filter_hears_something(self):
        self.assertTrue((speech_features.mel_filters(8000, 256).sum(1) > 0).all())


if __name__ == "__main__":
    absltest.main()
