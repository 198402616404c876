"""Routing statistics and PSNR against golden values."""

import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax import metrics


class RoutingTest(parameterized.TestCase):
    @parameterized.parameters(
        ((4, 2, 1, 1), 0.875),
        ((3, 3, 3, 3), 1.0),
        ((7, 0, 0, 0), 0.0),
        ((0, 0, 0, 0), np.nan),
    )
    def test_normalized_entropy(self, counts, expected):
        np.testing.assert_allclose(metrics.normalized_entropy(np.array(counts)), expected, atol=1e-12)

    @parameterized.parameters(((13, 1, 1, 1), 2.25), ((2, 2, 2, 2), 0.0), ((5, 0, 0, 0), 3.0), ((0, 0, 0, 0), np.nan))
    def test_max_violation(self, counts, expected):
        np.testing.assert_allclose(metrics.max_violation(np.array(counts)), expected, atol=1e-12)

    def test_layers_in_front(self):
        counts = np.array([[4, 2, 1, 1], [1, 1, 1, 1]])
        np.testing.assert_allclose(metrics.normalized_entropy(counts), [0.875, 1.0])
        np.testing.assert_allclose(metrics.max_violation(counts), [1.0, 0.0])

    def test_iou_of_top_quarter(self):
        # Eight experts: two each. Layer 0 shares one of three, layer 1 both, layer 2 none.
        text = np.array([[9, 8, 1, 0, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 1], [9, 9, 0, 0, 0, 0, 0, 0]])
        audio = np.array([[0, 7, 9, 1, 0, 0, 0, 0], [6, 5, 1, 0, 0, 0, 0, 0], [0, 0, 9, 9, 0, 0, 0, 0]])
        np.testing.assert_allclose(metrics.expert_iou(text, audio), [1 / 3, 1.0, 0.0])
        silent = np.zeros_like(text)
        pairs = metrics.pairwise_expert_iou({"text": text, "audio": audio, "image": silent})
        self.assertEqual(list(pairs), [("text", "audio"), ("text", "image"), ("audio", "image")])
        np.testing.assert_allclose(pairs["text", "audio"], [1 / 3, 1.0, 0.0])
        self.assertTrue(np.isnan(pairs["text", "image"]).all())

    def test_top_experts(self):
        np.testing.assert_array_equal(metrics.top_experts(np.array([1, 2, 2, 2]), 0.5), [False, True, True, False])
        np.testing.assert_array_equal(metrics.top_experts(np.array([1, 2])), [False, True])

    def test_a_quarter_of_ten_is_three_and_of_fourteen_four(self):
        for experts, top in ((4, 1), (10, 3), (14, 4), (32, 8)):
            self.assertEqual(metrics.top_experts(np.arange(1, experts + 1)).sum(), top)

    def test_layers_with_fewer_experts_and_unused_ones(self):
        padded = [np.pad(np.array(counts), (0, 12)) for counts in ([4, 3, 2, 1], [1, 2, 3, 4])]
        self.assertEqual(metrics.expert_iou(padded[0], padded[1], experts=np.array(4)), 0)
        one, other = np.eye(32)[:2]
        self.assertEqual(metrics.expert_iou(one, other), 0)
        self.assertEqual(metrics.expert_iou(one, one), 1)

    def test_bad_arguments(self):
        with self.assertRaisesRegex(ValueError, r"'counts': found shape \(3, 1\)"):
            metrics.normalized_entropy(np.ones((3, 1)))
        with self.assertRaisesRegex(ValueError, "'fraction': found 0"):
            metrics.top_experts(np.ones(4), 0)


class PsnrTest(parameterized.TestCase):
    def test_golden(self):
        reference = np.full((3, 4, 4, 3), 0.5)
        images = np.stack([reference[0] + 0.1, reference[0] - 0.01, reference[0]])
        np.testing.assert_allclose(metrics.psnr(images, reference), [20.0, 40.0, np.inf], atol=1e-9)

    def test_clips_and_does_not_wrap(self):
        white = np.full((1, 2, 2, 3), 255, np.uint8)
        self.assertEqual(metrics.psnr(white.astype(float) + 40, white, 255)[0], np.inf)
        black = np.zeros_like(white)
        np.testing.assert_allclose(metrics.psnr(black, white, 255), [0.0])

    def test_shapes(self):
        with self.assertRaisesRegex(ValueError, r"found shape \(1, 2\), allowed: \(2, 1\)"):
            metrics.psnr(np.zeros((1, 2)), np.zeros((2, 1)))


if __name__ == "__main__":
    absltest.main()
