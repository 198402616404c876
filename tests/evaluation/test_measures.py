"""Scores, variety, near-duplicates, compression figures and captions against values worked out by hand."""

import math
import zlib

import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.evaluation import captions, compression, scores, variety
from ernie5_jax.evaluation.errors import EvaluationError


def flat(*levels: int) -> np.ndarray:
    """2 x 2 pictures of one grey level each; their RMS distance is the difference of levels / 255."""
    return np.stack([np.full((2, 2, 3), level, np.uint8) for level in levels])


class ScoresTest(parameterized.TestCase):
    @parameterized.parameters(
        # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    )
    def test_wilson_interval_of_the_literature(self, successes, n, low, high):
        np.testing.assert_allclose(scores.wilson_interval(successes, n), (low, high), atol=6e-5)

    def test_wilson_refuses_more_hits_than_trials(self):
        with self.assertRaisesRegex(EvaluationError, "found 3 of 2"):
            scores.wilson_interval(3, 2)

    def test_score_round_trips_and_prints(self):
        score = scores.Score.of([True, True, False, True], ceiling=0.9, chance=0.1)
        self.assertEqual(score.value, 0.75)
        plain = score.to_json()
        self.assertEqual({k: plain[k] for k in ("value", "n", "ceiling", "chance")},
                         {"value": 0.75, "n": 4, "ceiling": 0.9, "chance": 0.1})  # fmt: skip
        self.assertEqual(scores.Score.from_json(plain), score)
        self.assertRegex(score.line("image"), r"75\.0 % \(30\.1-95\.4, n 4\)  ceiling 90\.0  chance 10\.0")

    def test_no_answers_are_no_score(self):
        with self.assertRaisesRegex(EvaluationError, "no answers"):
            scores.Score.of([])


class KeptTest(parameterized.TestCase):
    def test_the_mean_is_over_tasks_and_the_interval_over_pairs(self):
        reference = {"a": [True, True, True, False], "b": [True, False]}  # .75 and .5
        kept = scores.kept_score({"a": [True, True, False, False], "b": [True, False]}, reference)
        self.assertAlmostEqual(kept.value, (0.5 + 0.5) / (0.75 + 0.5))
        self.assertEqual(kept.prompts, 6)
        self.assertBetween(kept.interval[0], 0.0, kept.value)
        self.assertBetween(kept.interval[1], kept.value, 1.0)

    def test_equal_answers_keep_all_without_spread(self):
        answers = {"a": [True, False, True, True], "b": [False, True] * 20}
        kept = scores.kept_score(answers, answers)
        self.assertEqual((kept.value, kept.interval), (1.0, (1.0, 1.0)))
        self.assertEqual(str(kept), "keeps 100.0 % (100.0-100.0, 44 paired prompts)")

    def test_the_interval_is_that_of_the_delta_method(self):
        rng = np.random.default_rng(1)
        reference = rng.random(4000) < 0.9
        answers = np.where(rng.random(4000) < 0.1, ~reference, reference)
        kept = scores.kept_score({"a": answers.tolist()}, {"a": reference.tolist()})
        error = np.std(answers - kept.value * reference) / np.sqrt(4000) / reference.mean()
        np.testing.assert_allclose(np.diff(kept.interval)[0], 2 * 1.96 * error, rtol=0.08)

    @parameterized.parameters(({"a": [True]}, {"a": [True, True]}), ({"a": [True]}, {"b": [True]}), ({}, {}))
    def test_other_prompts_cannot_be_compared(self, answers, reference):
        with self.assertRaisesRegex(EvaluationError, "prompts .* allowed"):
            scores.kept_score(answers, reference)

    def test_a_reference_that_knows_nothing_is_refused(self):
        with self.assertRaisesRegex(EvaluationError, "no right answer"):
            scores.kept_score({"a": [True]}, {"a": [False]})


class VarietyTest(parameterized.TestCase):
    def test_distances(self):
        found = variety.rms_distances(flat(0, 255), flat(51, 102, 255))
        np.testing.assert_allclose(found, [[0.2, 0.4, 1.0], [0.8, 0.6, 0.0]], atol=1e-7)

    def test_within_class_is_the_mean_over_classes_of_the_mean_pair(self):
        # Class 0: pairs .2, .4, .2 -> mean 4/15; class 1: one pair of .6; class 2 has a single member: no pair.
        found = variety.within_class_distance(flat(0, 51, 102, 0, 153, 9), np.array([0, 0, 0, 1, 1, 2]))
        self.assertAlmostEqual(found, (0.8 / 3 + 0.6) / 2)

    def test_variety_compares_equal_class_counts(self):
        samples, labels = flat(0, 51), np.array([3, 3])
        # The third real picture of class 3 and the other class would change the ratio if they were counted.
        real, real_labels = flat(0, 9, 102, 255, 200), np.array([3, 1, 3, 3, 1])
        self.assertAlmostEqual(variety.image_variety(samples, labels, real, real_labels), 0.2 / 0.4)

    def test_near_duplicates_use_the_percentile_of_held_out_pictures(self):
        training = flat(0, 255)
        held_out = flat(51, 102)  # nearest training picture at .2 and .4: 1st percentile .202
        samples = flat(50, 52, 255, 127)  # nearest at .196, .204, 0, .498
        self.assertEqual(variety.near_duplicates(samples, training, held_out), 0.5)

    def test_sizes_must_agree(self):
        with self.assertRaisesRegex(EvaluationError, r"\(2, 2, 3\).*\(3, 2, 3\)"):
            variety.rms_distances(flat(0), np.zeros((1, 3, 2, 3), np.uint8))


class CompressionTest(absltest.TestCase):
    def test_order0(self):
        self.assertAlmostEqual(compression.order0_bits_per_byte(b"aabb"), 1.0)
        expected = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
        self.assertAlmostEqual(compression.order0_bits_per_byte(b"aaab" * 5), expected)

    def test_zlib(self):
        data = b"the quick brown fox " * 20
        self.assertAlmostEqual(compression.zlib_bits_per_byte(data), len(zlib.compress(data, 9)) * 8 / 400)

    def test_no_text(self):
        with self.assertRaisesRegex(EvaluationError, "no held-out bytes"):
            compression.order0_bits_per_byte(b"")


class CaptionsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("a handwritten three", 3),
        ("A Handwritten THREE.", 3),
        ("the digit 7", 7),
        ("seven or seven", 7),
        ("two threes", 2),  # "threes" is no digit word
        ("two three", None),
        ("someone", None),
        ("17", None),
        ("", None),
    )
    def test_digit(self, text, digit):
        self.assertEqual(captions.digit_in(text), digit)

    def test_same_words(self):
        self.assertTrue(captions.same_words(" The word  two.", "the word two"))
        self.assertFalse(captions.same_words("the word two two", "the word two"))


if __name__ == "__main__":
    absltest.main()
