"""Filters, guidance and draws against values worked out by hand; log-probabilities of codec frames on a stand-in."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.generation import Cursor, Weights, bit_log_prob, generate_audio, row_keys, sampling_params
from ernie5_jax.generation import sampling as draws
from ernie5_jax.generation.stepping import group, slots
from ernie5_jax.generation.text import answer_logits
from ernie5_jax.model import KVCache, ModelOutput, RouterStats
from ernie5_jax.sequence import text_position
from ernie5_jax.text import special_tokens

# Probabilities .5, .25, .15, .1 in another order.
PROBABILITIES = (0.15, 0.5, 0.1, 0.25)
LOGITS = jnp.log(jnp.asarray([PROBABILITIES]))


class FilterTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, 1.0, {0, 1, 2, 3}),
        (1, 1.0, {1}),
        (3, 1.0, {0, 1, 3}),
        (9, 1.0, {0, 1, 2, 3}),
        (0, 0.4, {1}),
        (0, 0.6, {1, 3}),
        (0, 0.76, {0, 1, 3}),
        (2, 0.95, {1, 3}),
        (3, 0.6, {1, 3}),
    )
    def test_what_is_kept(self, top_k, top_p, kept):
        found = draws.filter_logits(LOGITS, sampling_params(1.0, top_k, top_p))[0]
        self.assertEqual(set(np.flatnonzero(np.isfinite(found)).tolist()), kept)
        for i in kept:
            self.assertEqual(float(found[i]), float(LOGITS[0, i]))

    def test_text_answers_are_ordinary_tokens_or_the_end(self):
        """Decisions section 1: EOA, PAD and BOS are never sampled by the text head."""
        size = special_tokens.NUM_SPECIAL_TOKENS + 8
        found = np.isfinite(answer_logits(jnp.zeros((1, size)))[0])
        expected = np.arange(size) >= special_tokens.NUM_SPECIAL_TOKENS
        expected[special_tokens.EOS] = True
        np.testing.assert_array_equal(found, expected)
        for token in (special_tokens.EOA, special_tokens.PAD, special_tokens.BOS):
            self.assertFalse(found[token])


class GuidanceTest(parameterized.TestCase):
    @parameterized.parameters(0.0, 1.0, 1.5, 4.0)
    def test_formula(self, scale):
        both = jnp.asarray([[1.0, -2.0], [3.0, 0.5], [0.0, 1.0], [2.0, 0.5]])  # two rows and their unconditional twins
        found = draws.guide(both, sampling_params(1.0, guidance=scale), True)
        c, u = np.asarray(both[:2]), np.asarray(both[2:])
        chex.assert_trees_all_close(found, scale * c + (1 - scale) * u, atol=1e-6)  # Infinity
        chex.assert_trees_all_close(found, (1 + (scale - 1)) * c - (scale - 1) * u, atol=1e-6)  # VAR with t = scale - 1

    def test_var_3_is_infinity_4(self):
        found = draws.guide(jnp.asarray([[1.0, -1.0], [0.5, 2.0]]), sampling_params(1.0, guidance=4.0), True)
        chex.assert_trees_all_close(found, jnp.asarray([[(1 + 3) * 1.0 - 3 * 0.5, (1 + 3) * -1.0 - 3 * 2.0]]))

    def test_without_guidance_nothing_happens(self):
        self.assertIs(draws.guide(LOGITS, sampling_params(1.0, guidance=3.0), False), LOGITS)


class DrawTest(parameterized.TestCase):
    @parameterized.parameters(1.0, 0.5, 2.0)
    def test_tokens_follow_the_tempered_distribution(self, temperature):
        count = 20_000
        keys = jax.random.split(jax.random.key(0), count)
        drawn = draws.sample(keys, jnp.broadcast_to(LOGITS, (count, 4)), sampling_params(temperature))
        expected = np.asarray(PROBABILITIES) ** (1 / temperature)
        shares = np.bincount(drawn, minlength=4) / count
        np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.015)  # 4 standard deviations

    @parameterized.parameters((1.0, 0.75), (0.5, 0.9), (2.0, 0.633975))
    def test_bits_follow_the_tempered_distribution(self, temperature, expected):
        logits = jnp.full((2, 100, 100), math.log(3.0))
        bits = draws.sample_bits(jax.random.split(jax.random.key(1), 2), logits, sampling_params(temperature))
        self.assertAlmostEqual(float(bits.mean()), expected, delta=0.014)  # 4 standard deviations

    def test_temperature_zero_is_greedy(self):
        keys = jax.random.split(jax.random.key(0), 50)
        greedy = sampling_params(0.0)
        self.assertEqual(set(draws.sample(keys, jnp.broadcast_to(LOGITS, (50, 4)), greedy).tolist()), {1})
        bits = draws.sample_bits(keys[:1], jnp.asarray([[[0.1, -0.1, 0.0]]]), greedy)
        np.testing.assert_array_equal(bits[0, 0], [1, 0, 0])

    def test_keys_are_fold_ins_of_seed_prompt_sample_position(self):
        found = draws.position_keys(row_keys(7, jnp.asarray([3, 4]), jnp.asarray([2, 0])), jnp.asarray([11, 5]), 1)
        for i, numbers in enumerate(((3, 2, 11, 1), (4, 0, 5, 1))):
            key = jax.random.key(7)
            for number in numbers:
                key = jax.random.fold_in(key, number)
            np.testing.assert_array_equal(jax.random.key_data(found[i]), jax.random.key_data(key))

    def test_log_probability_of_bits(self):
        logits = jnp.asarray([[0.0, math.log(3.0), -math.log(3.0)]])
        found = bit_log_prob(logits, jnp.asarray([[1, 0, 0]]))
        np.testing.assert_allclose(found, [math.log(0.5) + math.log(0.25) + math.log(0.75)], rtol=1e-6)


LEVELS, BINS = 3, 4


def _codec(table: jax.Array):
    """apply(...) whose codec logits are table[row of the sequence, position, level]."""

    def apply(params, bias, batch, mask, *, cache, rows, choose_code):
        del params, bias, mask
        at = jnp.minimum(rows[:, -1], table.shape[1] - 1)
        logits = jnp.take_along_axis(table, at[:, None, None, None], axis=1)  # [B, 1, Q, bins + 1]
        codes = [choose_code(level, logits[:, :, level]) for level in range(LEVELS)]
        codes = jnp.stack(codes, axis=-1)
        return ModelOutput(None, None, None, None, logits, codes, RouterStats(None, None, None, None), cache)

    return apply


class CodecFramesTest(parameterized.TestCase):
    """Decisions section 1: level 1 decides when to stop."""

    def _run(self, table, *, temperature=1.0, guidance=1.0, guided=False, frames=6):
        size = table.shape[0]
        row = jnp.ones(size, jnp.int32)
        cursor = Cursor(KVCache((), (), jnp.zeros((size, 9, 2), jnp.int32), jnp.zeros((size, 9), jnp.int32)), row, row)
        targets = {"audio": slots(size, 1)}
        prompt = group(text_position(jnp.zeros(size))[:, None], jnp.zeros(size, jnp.int32), targets=targets)
        count = size // 2 if guided else size
        keys = row_keys(0, jnp.arange(count), jnp.zeros(count, jnp.int32))
        weights = Weights({}, jnp.zeros(1), None)

        @jax.jit
        def run(table, params):
            return generate_audio(
                _codec(table), weights, cursor, prompt, keys, params,
                levels=LEVELS, bins=BINS, max_frames=frames, guided=guided,
            )  # fmt: skip

        return run(table, sampling_params(temperature, guidance=guidance))

    def _table(self, size, seed=0):
        return jnp.asarray(np.random.default_rng(seed).normal(size=(size, 9, LEVELS, BINS + 1)), jnp.float32)

    def test_the_first_level_alone_ends_the_sound(self):
        trace = self._run(self._table(8))
        ends = np.asarray(trace.codes) == BINS
        np.testing.assert_array_equal(ends, np.broadcast_to(ends[..., :1], ends.shape))
        for i, n in enumerate(trace.count.tolist()):
            self.assertFalse(ends[i, :n].any())
            self.assertTrue(ends[i, n:].all())
        self.assertBetween(int((trace.count < 6).sum()), 1, 8)

    def test_eoa_of_a_later_level_is_masked_out(self):
        table = self._table(4).at[:, :, 0, BINS].set(-1e9).at[:, :, 1:, BINS].set(1e9)
        trace = self._run(table)
        np.testing.assert_array_equal(trace.count, [6] * 4)
        self.assertLess(int(trace.codes.max()), BINS)
        self.assertTrue(bool(jnp.isfinite(trace.log_probs).all()))

    @parameterized.parameters((1.0, 1.0), (0.3, 1.0), (0.5, 1.5))
    def test_log_probabilities_are_the_models_own(self, temperature, guidance):
        """At temperature 1, without guidance; EOA counts once, at level 1."""
        guided = guidance != 1
        table = self._table(12, seed=2)
        trace = self._run(table, temperature=temperature, guidance=guidance, guided=guided)
        logits = np.asarray(table, np.float64)
        ended = 0
        for i, n in enumerate(trace.count.tolist()):
            for t in range(6):
                codes = np.asarray(trace.codes[i, t])
                expected = np.zeros(LEVELS)
                for level in range(LEVELS if t < n else int(t == n)):
                    values = logits[i, t, level]
                    expected[level] = values[codes[level]] - np.log(np.exp(values).sum())
                np.testing.assert_allclose(trace.log_probs[i, t], expected, atol=1e-5)
            ended += n < 6
        self.assertGreater(ended, 0)

    def test_guidance_moves_the_draw(self):
        # Conditional and unconditional logits differ at level 1 by (1, 0, ...): greedy choice flips at guidance 3.
        conditional = jnp.zeros((1, 9, LEVELS, BINS + 1)).at[..., 0].set(1.0).at[..., 1].set(2.0)
        unconditional = jnp.zeros_like(conditional).at[..., 1].set(2.0)
        table = jnp.concatenate([conditional, unconditional])
        for guidance, code in ((1.5, 1), (3.0, 0)):
            trace = self._run(table, temperature=0.0, guidance=guidance, guided=True)
            self.assertEqual(set(np.asarray(trace.codes).ravel().tolist()), {code})


if __name__ == "__main__":
    absltest.main()
