"""Speech synthesis: pure in its arguments, clear about bad ones, and resampled without aliasing."""

import os
import time
from unittest import mock

import espeakng_loader
import numpy as np
from absl.testing import absltest, parameterized
from scipy import signal

from ernie5_jax.data import espeak


class EspeakTest(parameterized.TestCase):
    def test_rendering_does_not_depend_on_what_was_said_before(self):
        synthesizer = espeak.EspeakSynthesizer(8000)
        first, rate = synthesizer.render("six", "en-us+f2", rate=150, pitch=40)
        time.sleep(1.1)  # the library would seed its noise from the clock, in seconds
        synthesizer.render("nine", "en+m8", rate=200, pitch=70)
        second, _ = synthesizer.render("six", "en-us+f2", rate=150, pitch=40)
        np.testing.assert_array_equal(first, second)
        self.assertEqual(rate, 8000)
        self.assertBetween(first.size / rate, 0.2, 1.0)
        self.assertBetween(np.abs(first).max(), 0.05, 1.0)

    def test_threads_do_not_hear_each_other(self):
        synthesizer = espeak.EspeakSynthesizer(8000)
        requests = [(word, "en+m1", 150, pitch) for word in ("six", "seven", "nine") for pitch in range(30, 50)]
        together = list(synthesizer.render_all(requests))
        for samples, request in zip(together, requests, strict=True):
            np.testing.assert_array_equal(samples, synthesizer.render(*request)[0])

    def test_the_linked_part_of_the_data_speaks_like_the_whole(self):
        synthesizer = espeak.EspeakSynthesizer()
        voices = ("en-us", "en+f1", "en-029+m8", "en-gb-scotland+f5", "en-gb-x-rp+m7")
        linked = [synthesizer.render("zero", voice)[0] for voice in voices]
        whole = os.fsencode(espeakng_loader.get_data_path())
        with mock.patch.object(espeak._own_copy(), "data", whole):
            for voice, samples in zip(voices, linked, strict=True):
                np.testing.assert_array_equal(samples, synthesizer.render("zero", voice)[0], err_msg=voice)

    def test_voice_rate_and_pitch_take_effect(self):
        synthesizer = espeak.EspeakSynthesizer(8000)
        slow, _ = synthesizer.render("seven", "en+m1", rate=100)
        fast, _ = synthesizer.render("seven", "en+m1", rate=220)
        self.assertGreater(slow.size, 1.5 * fast.size)
        clips = [synthesizer.render("seven", voice)[0] for voice in ("en+m1", "en+f4", "en-gb-scotland+m1")]
        clips.append(synthesizer.render("seven", "en+m1", pitch=80)[0])
        self.assertLen({clip.tobytes() for clip in clips}, 4)

    @parameterized.parameters(
        ({"text": " "}, "not blank"),
        ({"text": "one", "voice": "nobody"}, "en-gb-scotland"),
        ({"text": "one", "rate": 1}, "80 ... 450"),
        ({"text": "one", "pitch": 100}, "0 ... 99"),
    )
    def test_bad_arguments_are_named(self, arguments, allowed):
        with self.assertRaisesRegex(espeak.SpeechSynthesisError, allowed):
            espeak.EspeakSynthesizer().render(**arguments)

    def test_resampling_keeps_low_tones_and_removes_those_above_half_the_rate(self):
        seconds = np.arange(22050) / 22050
        low = espeak.resample(np.sin(2 * np.pi * 1000 * seconds).astype(np.float32), 22050, 8000)
        high = espeak.resample(np.sin(2 * np.pi * 5500 * seconds).astype(np.float32), 22050, 8000)
        self.assertLen(low, 8000)
        expected = np.sin(2 * np.pi * 1000 * np.arange(8000) / 8000)
        np.testing.assert_allclose(low[200:-200], expected[200:-200], atol=2e-3)
        self.assertLess(np.abs(high[200:-200]).max(), 2e-3)

    def test_resampling_equals_the_library_default(self):
        samples = np.random.default_rng(0).normal(size=999).astype(np.float32)
        expected = signal.resample_poly(samples, 160, 441)
        np.testing.assert_allclose(espeak.resample(samples, 22050, 8000), expected, atol=1e-6)

    def test_trimming_cuts_both_ends_only(self):
        samples = np.array([0, 1e-4, 0.5, 0, 0, -0.5, 1e-4, 0], np.float32)
        np.testing.assert_array_equal(espeak.trim_silence(samples), samples[2:6])
        self.assertEqual(espeak.trim_silence(np.zeros(5, np.float32)).size, 0)


if __name__ == "__main__":
    absltest.main()
