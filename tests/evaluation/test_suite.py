"""The digits suite with engines that are perfect, or always say the same."""

import json
from pathlib import Path

import numpy as np
from absl.testing import absltest

from ernie5_jax.config import EvaluationConfig, GenerationConfig
from ernie5_jax.evaluation import DigitsSuite, Results, media_sets, summary, train_judges
from ernie5_jax.evaluation.captions import DIGIT_WORDS
from ernie5_jax.evaluation.compression import order0_bits_per_byte
from ernie5_jax.generation import Result
from ernie5_jax.sequence import Document, Span
from ernie5_jax.testing import DummyAudioTokenizer, DummyVisualTokenizer

CLASSES = (0, 1, 2, 3)
PROSE = "the cat sat on the mat"


def picture(digit: int, rng: np.random.Generator) -> np.ndarray:
    """A bright quarter says the digit: what the dummy tokenizer keeps."""
    image = rng.integers(0, 40, (8, 8, 3)).astype(np.uint8)
    y, x = divmod(digit, 2)
    image[4 * y : 4 * y + 4, 4 * x : 4 * x + 4] += np.uint8(180 + rng.integers(0, 30))
    return image


def movie(digit: int, direction: str, rng: np.random.Generator) -> np.ndarray:
    first, last = picture(digit, rng), picture(digit, rng)
    first, last = (first // 3, last) if direction == "up" else (first, last // 3)
    return np.stack([first, *[last] * 4])


def wave(digit: int, rng: np.random.Generator) -> np.ndarray:
    tone = np.sin(2 * np.pi * (60 + 100 * digit) * np.arange(400) / 1000)
    return (0.5 * tone * rng.uniform(0.5, 1)).astype(np.float32)


def world(count: int, seed: int, **meta) -> list[Document]:
    rng = np.random.default_rng(seed)
    documents = []

    def add(task, value, modality, caption, **more):
        medium = lambda role: Span(modality, role, value)  # noqa: E731
        more = {"caption": caption, **meta, **more}
        documents.append(Document((Span("text", "understand", caption), medium("generate")), {"task": task[0], **more}))
        if len(task) > 1:
            documents.append(
                Document((medium("understand"), Span("text", "generate", caption)), {"task": task[1], **more})
            )

    for i in range(count):
        digit, direction = CLASSES[i % 4], ("up", "down")[i // 4 % 2]
        word = DIGIT_WORDS[digit]
        add(("image_generation", "image_caption"), picture(digit, rng), "image", f"a {word}", digit=digit)
        add(("speech_generation", "speech_caption"), wave(digit, rng), "audio", f"the word {word}", digit=digit)
        clip = movie(digit, direction, rng)
        add(("video_generation",), clip, "video", f"{word} goes {direction}", digit=digit, direction=direction)
    documents.append(Document((Span("text", "generate", PROSE),), {"task": "text", **meta}))
    return documents


class FakeEngine:
    """Answers from `media` by what the prompt's meta says; `stuck` makes it always show the first digit."""

    def __init__(self, documents: list[Document], stuck: bool = False):
        self.config, self._stuck, self.seeds = GenerationConfig(), stuck, []
        self._media = {
            (d.meta.get("digit"), d.meta.get("direction"), s.modality): s.value for d in documents for s in d.spans
        }

    def generate(self, requests, *, seed, config=None):
        self.seeds.append(seed)
        return [self._answer(request, (config or self.config).temperature) for request in requests]

    def _answer(self, request, temperature) -> Result:
        meta = request.document.meta
        none = np.zeros(0)
        digit = CLASSES[0] if self._stuck else meta.get("digit")
        if request.to == "text":
            assert all(span.role == "understand" for span in request.document.spans) or not meta
            word = DIGIT_WORDS[digit] if digit is not None else "and so on"
            return Result(none, none, text=f"a {word}" if temperature == 0 else word)
        return Result(none, none, **{request.to: self._media[digit, meta.get("direction"), request.to]})


class SuiteTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.training, cls.held_out = world(32, 0), world(24, 1)
        cls.judges = train_judges(cls.training, steps=60, sample_rate=1000)

    def run_suite(self, engine) -> Results:
        losses = lambda documents: {  # noqa: E731
            "text_bits_per_byte": float(len(documents)),
            "expert_use": {"text": [[0.25, 0.75]]},
            "min_normalized_entropy": 0.81,
        }
        suite = DigitsSuite(
            engine, self.judges, self.training, self.held_out, DummyVisualTokenizer(), DummyAudioTokenizer(),
            config=EvaluationConfig(samples=16, videos=16), losses=losses, report=lambda line: None,
        )  # fmt: skip
        return suite.run()

    def test_a_perfect_engine(self):
        engine = FakeEngine(self.training)
        results = self.run_suite(engine)
        for name in ("image_caption_accuracy", "speech_word_accuracy"):
            self.assertEqual(results.scores[name].value, 1.0)
        self.assertEqual(results.scores["image_caption_accuracy"].exact, 1.0)
        for name, answers in results.answers.items():
            score = results.scores[name]
            self.assertEqual((np.mean(answers), len(answers)), (score.value, score.n), name)
        parts = {"video_direction_accuracy", "video_digit_accuracy"}
        self.assertEqual(set(results.scores) - set(results.answers), parts)
        counted = [score.value for name, score in results.scores.items() if name not in parts]
        assert results.mean_score is not None
        self.assertAlmostEqual(results.mean_score, np.mean(counted))
        self.assertEqual(results.scores["speech_word_accuracy"].exact, 0.0)  # "a one" is not "the word one"
        for name in ("image_generation_accuracy", "speech_generation_accuracy", "video_generation_accuracy"):
            self.assertGreaterEqual(results.scores[name].value, 0.85, name)
        for name, chance in {"image_generation": 0.25, "video_direction": 0.5, "video_generation": 0.125}.items():
            self.assertEqual(results.scores[f"{name}_accuracy"].chance, chance)
        self.assertEqual(
            results.scores["image_generation_accuracy"].ceiling, results.judges["image"]["round_trip_digit"]
        )
        self.assertEqual(results.scores["video_direction_accuracy"].n, 16)
        # It returns one training picture per digit: nothing varies, everything is copied.
        self.assertEqual((results.numbers["image_variety"], results.numbers["near_duplicates"]), (0.0, 1.0))
        self.assertEqual(results.numbers["text_bits_per_byte"], 1.0)
        self.assertEqual(results.numbers["order0"], order0_bits_per_byte(PROSE.encode()))
        self.assertLen(set(engine.seeds), len(engine.seeds))  # no two tasks share their draws

    def test_an_engine_that_always_shows_zero(self):
        results = self.run_suite(FakeEngine(self.training, stuck=True))
        self.assertEqual(results.scores["image_caption_accuracy"].value, 0.25)
        self.assertAlmostEqual(results.scores["image_generation_accuracy"].value, 0.25, delta=0.07)
        wrong = [example for example in results.section("image_caption") if not example.right]
        self.assertLen(wrong, 10)
        self.assertTrue(all(example.answer == "a zero" and example.caption != "a zero" for example in wrong))

    def test_held_out_documents_without_a_picture(self):
        speech = [document for document in self.held_out if document.meta["task"].startswith("speech")]
        suite = DigitsSuite(
            FakeEngine(self.training), self.judges, self.training, speech, DummyVisualTokenizer(),
            DummyAudioTokenizer(), config=EvaluationConfig(samples=8, videos=8), report=lambda line: None,
        )  # fmt: skip
        results = suite.run()
        self.assertEqual(results.scores["image_generation_accuracy"].n, 8)  # asked for by training captions
        self.assertNotIn("image_variety", results.numbers)
        self.assertEqual(results.scores["speech_word_accuracy"].value, 1.0)

    def test_where_every_voice_is_known_they_are_listened_to(self):
        known = world(24, 1, unseen_voice=False)
        suite = DigitsSuite(
            FakeEngine(self.training), self.judges, self.training, known, DummyVisualTokenizer(), DummyAudioTokenizer(),
            config=EvaluationConfig(samples=8, videos=8), report=lambda line: None,
        )  # fmt: skip
        results = suite.run()
        score = results.scores["speech_word_accuracy"]
        self.assertEqual((score.value, score.n), (1.0, 8))
        self.assertEqual(score.ceiling, results.judges["known_voices"]["round_trip_digit"])

    def test_results_and_summary_round_trip(self):
        results = self.run_suite(FakeEngine(self.training))
        folder = Path(self.create_tempdir().full_path)
        results.save(folder)
        loaded = Results.load(folder)
        self.assertEqual(loaded.to_json(), results.to_json())
        for a, b in zip(loaded.examples, results.examples, strict=True):
            np.testing.assert_array_equal(a.value, b.value)
            self.assertEqual((a.section, a.caption, a.answer, a.right), (b.section, b.caption, b.answer, b.right))
        run = {"checkpoint": "c", "experts": 32, "top_k": 4, "seconds": {"data": 1.5}, "max_violation": float("nan")}
        summary.write_summary(folder / "summary.json", loaded, run)
        written = json.loads((folder / "summary.json").read_text())
        for key in summary.SCORE_KEYS:
            self.assertContainsSubset(("value", "n", "ceiling", "chance"), written[key])
        for key in (*summary.NUMBER_KEYS, *summary.RUN_KEYS, "versions"):
            self.assertIn(key, written)
        self.assertIsNone(written["max_violation"])
        self.assertEqual(
            sorted(path.name for path in folder.iterdir()), ["examples.npz", "results.json", "summary.json"]
        )

    def test_unseen_voices_are_heard_but_not_asked_for(self):
        known = world(8, 2, unseen_voice=False)
        unseen = world(8, 3, unseen_voice=True)
        engine = FakeEngine(self.training)
        prompts = []
        generate = engine.generate
        engine.generate = lambda requests, **k: (prompts.extend(requests), generate(requests, **k))[1]
        suite = DigitsSuite(
            engine, self.judges, self.training, known + unseen, DummyVisualTokenizer(), DummyAudioTokenizer(),
            config=EvaluationConfig(samples=8, videos=8), report=lambda line: None,
        )  # fmt: skip
        results = suite.run()
        voices = {to: {r.document.meta["unseen_voice"] for r in prompts if r.to == to} for to in ("audio",)}
        heard = {r.document.meta["unseen_voice"] for r in prompts if r.document.meta.get("task") == "speech_caption"}
        self.assertEqual((voices["audio"], heard), ({False}, {True}))
        self.assertEqual(
            results.scores["speech_generation_accuracy"].ceiling, results.judges["known_voices"]["round_trip_digit"]
        )


class MediaSetsTest(absltest.TestCase):
    def test_collect_takes_each_medium_once(self):
        documents = world(8, 5)
        self.assertLen(media_sets.collect(documents, "image"), 8)
        self.assertEqual(media_sets.collect(documents, "video").directions, ["up"] * 4 + ["down"] * 4)

    def test_balanced(self):
        documents = media_sets.of_task(world(10, 6), "image_generation")
        chosen = media_sets.balanced(documents, 14)
        self.assertEqual([d.meta["digit"] for d in chosen], [0, 1, 2, 3] * 3 + [0, 1])
        self.assertLen({id(d) for d in chosen}, 10)

    def test_round_trip_is_what_the_tokenizer_keeps(self):
        tokenizer = DummyVisualTokenizer()
        rng = np.random.default_rng(7)
        pictures = [picture(i % 4, rng) for i in range(3)]
        found = media_sets.round_trip_pictures(tokenizer, pictures, batch=2)
        self.assertEqual(found[0].shape, (8, 8, 3))
        again = media_sets.round_trip_pictures(tokenizer, pictures[2:])
        np.testing.assert_array_equal(found[2], again[0])
        bright = [frame.reshape(2, 4, 2, 4, 3).mean((1, 3, 4)).argmax() for frame in found]
        self.assertEqual(bright, [0, 1, 2])


if __name__ == "__main__":
    absltest.main()
