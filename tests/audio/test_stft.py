"""Short-time Fourier transform against a direct sum, exact inversion, Griffin-Lim."""

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.audio import stft

RNG = np.random.default_rng(0)


def direct(wave, fft_size, hop_length):
    """The definition: window centred on every hop, silence outside, a sum over samples per frequency."""
    before = (fft_size - hop_length) // 2
    padded = np.concatenate([np.zeros(before), wave, np.zeros(fft_size)])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft_size) / fft_size)
    waves = np.exp(-2j * np.pi * np.outer(np.arange(fft_size), np.arange(fft_size // 2 + 1)) / fft_size)
    starts = range(0, len(wave), hop_length)
    return np.stack([(padded[s : s + fft_size] * window) @ waves for s in starts]) * 2 / window.sum()


class StftTest(parameterized.TestCase):
    @parameterized.parameters((512, 80, 12), (64, 16, 5), (64, 20, 7), (32, 32, 3))
    def test_equals_the_direct_sum(self, fft_size, hop_length, frames):
        wave = RNG.normal(size=frames * hop_length).astype(np.float32)
        found = stft.stft(jnp.asarray(wave), fft_size, hop_length)
        chex.assert_shape(found, (frames, fft_size // 2 + 1))
        np.testing.assert_allclose(found, direct(wave, fft_size, hop_length), atol=2e-5)

    def test_full_scale_sine_has_magnitude_one(self):
        wave = np.sin(2 * np.pi * 1000 * np.arange(8000) / 8000).astype(np.float32)
        magnitude = np.abs(stft.stft(jnp.asarray(wave), 512, 80))
        np.testing.assert_allclose(magnitude[50, 64], 1.0, atol=1e-3)

    @parameterized.parameters((512, 80), (64, 16), (64, 20))
    def test_inverse_is_exact(self, fft_size, hop_length):
        waves = RNG.normal(size=(2, 12 * hop_length)).astype(np.float32)
        back = stft.istft(stft.stft(jnp.asarray(waves), fft_size, hop_length), fft_size, hop_length)
        np.testing.assert_allclose(back, waves, atol=1e-4)

    def test_silence_is_the_floor_everywhere(self):
        found = stft.log_magnitude(jnp.zeros(800), 512, 80, floor=1e-3)
        np.testing.assert_allclose(found, np.full((10, 257), np.log(1e-3)), rtol=1e-6)

    def test_griffin_lim_approaches_the_magnitude(self):
        seconds = np.arange(6400) / 8000
        wave = np.sin(2 * np.pi * (300 + 400 * seconds) * seconds) * np.hanning(6400)
        target = jnp.abs(stft.stft(jnp.asarray(wave, jnp.float32), 512, 80))

        def distance(iterations, momentum):
            rebuilt = stft.griffin_lim(target, 512, 80, iterations, momentum)
            chex.assert_shape(rebuilt, (6400,))
            return float(jnp.linalg.norm(jnp.abs(stft.stft(rebuilt, 512, 80)) - target) / jnp.linalg.norm(target))

        plain, fast = distance(40, 0.0), distance(40, 0.7)
        self.assertLess(plain, 0.7 * distance(1, 0.0))
        self.assertLess(fast, plain)
        self.assertLess(fast, 0.15)


if __name__ == "__main__":
    absltest.main()
