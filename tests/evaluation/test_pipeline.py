"""Evaluation of any documents, and of a checkpoint's identity."""

import types
from typing import Any, cast
from unittest import mock

import numpy as np
from absl.testing import absltest

from ernie5_jax.config import EvaluationConfig, ExperimentConfig, GenerationConfig
from ernie5_jax.evaluation import EvaluationError, HeldOut, pipeline
from ernie5_jax.generation import Result
from ernie5_jax.sequence import Document, Span


class Parrot:
    """Writes the same caption for everything."""

    config = GenerationConfig()

    def generate(self, requests, *, seed, config=None):
        del seed, config
        return [Result(np.zeros(0), np.zeros(0), text="a red kite.") for _ in requests]


def opened(config: ExperimentConfig | None = None, step: int = 7) -> pipeline.Opened:
    model = types.SimpleNamespace(engine=Parrot(), step=step, config=config or ExperimentConfig(), tokenizers=None)
    return pipeline.Opened(cast(Any, model), cast(HeldOut, None))


def captioned(caption: str, role: Any = "understand", **meta) -> Document:
    image = Span("image", role, np.zeros((8, 8, 3), np.uint8))
    return Document((image, Span("text", "generate", caption)), {"task": "image_caption", **meta})


class DocumentsTest(absltest.TestCase):
    def evaluate(self, documents):
        with mock.patch.object(pipeline.Opened, "losses", lambda self, given: {"loss_text": float(len(given))}):
            return pipeline.evaluate_documents(opened(), documents)

    def test_captions_count_and_everything_has_a_loss(self):
        documents = [
            captioned("A red kite"),
            captioned("a blue kite"),
            captioned("a red kite", role="generate"),  # an image to draw comes first: no caption of something seen
            Document((Span("text", "generate", "a red kite"),), {"task": "text"}),
        ]
        found = self.evaluate(documents)
        self.assertEqual(found["losses"], {"loss_text": 4.0})
        self.assertEqual((found["step"], found["documents"], list(found["scores"])), (7, 4, ["image_caption_exact"]))
        self.assertEqual(
            (found["scores"]["image_caption_exact"]["value"], found["scores"]["image_caption_exact"]["n"]), (0.5, 2)
        )

    def test_digits_count_where_documents_name_them(self):
        found = self.evaluate([captioned("a handwritten two", digit=2)])
        self.assertEqual(found["scores"]["image_caption_digit"]["value"], 0.0)
        self.assertEqual(found["scores"]["image_caption_digit"]["chance"], 0.1)


class SuiteTest(absltest.TestCase):
    def test_unknown_suite(self):
        with self.assertRaisesRegex(EvaluationError, "suite: found 'letters', allowed: digits"):
            pipeline.evaluate_suite(opened(), {}, [], [], config=EvaluationConfig(suite="letters"))

    def test_identity_follows_what_decides_the_results(self):
        base = opened().identity()
        self.assertEqual(opened().identity(), base)
        self.assertNotEqual(opened(step=8).identity(), base)
        self.assertNotEqual(opened(ExperimentConfig(evaluation=EvaluationConfig(samples=5))).identity(), base)
        self.assertEqual(opened(ExperimentConfig(name="renamed")).identity(), base)


if __name__ == "__main__":
    absltest.main()
