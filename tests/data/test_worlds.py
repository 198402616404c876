"""Built-in worlds and TFDS sources: what is in them, and that nothing held out is trained on."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import chex
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax import data
from ernie5_jax.config import ExperimentConfig, from_mapping
from ernie5_jax.data.documents import DIGIT_WORDS
from ernie5_jax.data.sizes import check_capacity
from ernie5_jax.data.worlds import drawing, prose, python_source, recorded
from ernie5_jax.testing import tiny_experiment_config

FORM = data.MediaFormat(image_size=16, sample_rate=8000, temporal_stride=4)
BUILDER = '''
"""A stand-in for the public sets: the features of mnist, moving_mnist, spoken_digit and tiny_shakespeare."""
import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image


def png(value, size):
    buffer = io.BytesIO()
    Image.fromarray(np.full((size, size), value, np.uint8)).save(buffer, "png")
    buffer.seek(0)
    return buffer


class FakePublicSet(tfds.core.GeneratorBasedBuilder):
    """Fake."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(28, 28, 1)),
                    "image_sequence": tfds.features.Sequence(tfds.features.Image(shape=(32, 32, 1))),
                    "audio": tfds.features.Tensor(shape=(None,), dtype=np.int64),
                    "label": tfds.features.ClassLabel(num_classes=10),
                    "text": tfds.features.Text(),
                }
            )
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(10), "test": self._generate_examples(4)}

    def _generate_examples(self, count):
        for i in range(count):
            yield f"{i:03d}", {
                "image": png(20 * i, 28),
                "image_sequence": [png(10 * t, 32) for t in range(20)],
                "audio": np.full(800, 16384, np.int64),
                "label": i % 10,
                "text": "First Citizen: speak. " * 40,
            }
'''


class TfdsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(absltest.get_default_test_tmpdir()) / "fake_public"
        package = cls.folder / "fake_public"  # TFDS wants builders in a package
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "builder.py").write_text(BUILDER)
        sys.path.insert(0, str(cls.folder))
        importlib.invalidate_caches()

    @classmethod
    def tearDownClass(cls):
        sys.path.remove(str(cls.folder))
        super().tearDownClass()

    def prepare(self, name, split="train"):
        """The documents of config file `name`, its data set exchanged for the fake one."""
        config = importlib.import_module(f"configs.{name}").get_config()
        with config.unlocked():
            source = config.data.sources[name]
            source.tfds = "fake_public_set"
            where = {"import": "fake_public.builder", "data_dir": str(self.folder / "tfds")}
            source.options = {**source.options.to_dict(), **where}
        config = from_mapping(ExperimentConfig, config)
        shards = data.prepare_documents(config, self.folder / "prepared" / name, split, progress=False)[name]
        for document in shards:
            check_capacity(document, config)
        return list(shards)

    def test_mnist(self):
        documents = self.prepare("mnist")
        self.assertLen(documents, 20)
        self.assertEqual([d.meta["task"] for d in documents[:2]], ["image_generation", "image_caption"])
        by_digit = {d.meta["digit"]: d for d in documents if d.meta["task"] == "image_caption"}
        picture, caption = by_digit[3].spans
        self.assertEqual((picture.role, caption.role), ("understand", "generate"))
        self.assertEqual(caption.value, "a handwritten three")
        chex.assert_trees_all_equal(picture.value, np.full((16, 16, 3), 60, np.uint8))
        self.assertEqual(by_digit[3].meta["split"], "train")
        self.assertLen(self.prepare("mnist", "test"), 8)

    def test_moving_mnist_takes_the_frames_it_is_told_to(self):
        documents = self.prepare("moving_mnist")
        self.assertEqual({d.meta["task"] for d in documents}, {"video_generation"})
        self.assertLen(documents, 4)  # 90 % of the 4 examples of split "test", rounded
        chex.assert_shape(documents[0].spans[1].value, (9, 16, 16, 3))
        self.assertEqual(documents[0].spans[1].value[:, 0, 0, 0].tolist(), list(range(0, 90, 10)))

    def test_spoken_digit_is_scaled_to_one(self):
        documents = self.prepare("spoken_digit")
        self.assertLen(documents, 18)
        chex.assert_trees_all_close(documents[0].spans[1].value, np.full(800, 0.5, np.float32), atol=1e-4)
        self.assertEqual(documents[0].spans[0].value, f"the word {DIGIT_WORDS[documents[0].meta['digit']]}")

    def test_tiny_shakespeare_is_one_text_to_split(self):
        documents = self.prepare("tiny_shakespeare")
        self.assertTrue(documents[0].meta["split_text"])
        self.assertTrue(documents[0].spans[0].value.startswith("First Citizen"))

    @parameterized.parameters(
        ({"image": "picture", "caption": "label"}, {}, "found 'picture', allowed: .*image"),
        ({"image": "image"}, {}, "found no caption"),
        ({"image": "image", "audio": "audio", "caption": "label"}, {}, "exactly one of image"),
        ({"image": "image", "caption": "a {colour} {label}"}, {}, "'caption': found 'colour'"),
        ({"image": "image", "caption": "label"}, {"tasks": "text"}, "found 'text', allowed: image_generation"),
        ({"image": "image", "caption": "label"}, {"frame": "1"}, "option: found 'frame'"),
        ({"video": "image_sequence", "caption": "label"}, {}, "example 0: found T = 20 frames, allowed: T = 1 mod 4"),
        ({"audio": "audio", "caption": "label"}, {}, "example 0: audio without a sample rate"),
    )
    def test_bad_mappings_are_named(self, mapping, options, why):
        where = {"data_dir": str(self.folder / "tfds"), "import": "fake_public.builder"}
        builder = data.load_builder("fake_public_set", where)
        with self.assertRaisesRegex(data.DataError, why):
            data.TfdsSource(builder, "train", mapping, FORM, options)[0]

    def test_unknown_name(self):
        with self.assertRaisesRegex(data.DataError, "TFDS 'no_such_set'"):
            data.load_builder("no_such_set", {"data_dir": str(self.folder / "tfds")})


class TinyTest(absltest.TestCase):
    def test_every_kind_of_document_is_there(self):
        for split, count in (("train", 268), ("test", 67)):
            documents = data.world_sources("tiny", split, FORM, Path("unused"))
            tasks = Counter(documents[i].meta["task"] for i in range(len(documents)))
            self.assertEqual(set(tasks), set(data.TASKS))
            self.assertLen(documents, count)
        again = data.world_sources("tiny", "test", FORM, Path("unused"))
        chex.assert_trees_all_equal(again[9].spans[0].value, documents[9].spans[0].value)

    def test_unknown_worlds_and_options_are_named(self):
        with self.assertRaisesRegex(data.DataError, "found 'mars', allowed: digits, tiny, digits_recorded"):
            data.world_sources("mars", "train", FORM, Path("unused"))
        with self.assertRaisesRegex(data.DataError, "found 'size', allowed: none"):
            data.world_sources("tiny", "train", FORM, Path("unused"), {"size": "1"})


class PythonSourceTest(absltest.TestCase):
    def test_modules_are_split_by_name(self):
        train, test = (dict(python_source.modules(split)) for split in ("train", "test"))
        self.assertEmpty(set(train) & set(test))
        self.assertBetween(len(test) / (len(train) + len(test)), 0.02, 0.1)
        self.assertGreater(sum(map(len, train.values())), 2e6)
        self.assertIn("class Counter", (train | test)["collections/__init__.py"])
        self.assertEmpty([name for name in train | test if "site-packages" in name or "_sysconfigdata" in name])

    def test_documents_are_prose(self):
        documents = data.world_sources("python_source", "test", FORM, Path("unused"))
        self.assertLen(documents, len(python_source.modules("test")))
        self.assertEqual(documents[0].meta["task"], "text")
        self.assertTrue(documents[0].meta["split_text"])


class DigitsTest(absltest.TestCase):
    """The parts of the digits world that are quick to make."""

    def test_handwriting_is_split_in_blocks(self):
        from ernie5_jax.data.worlds import digits

        train, test = list(digits.pictures("train")), list(digits.pictures("test"))
        self.assertEqual((len(train), len(test)), (1438, 359))
        self.assertEqual([i for i, _, _ in train + test], list(range(1797)))
        self.assertEqual(max(picture.max() for _, picture, _ in test), 255)

    def test_jittered_pictures_stay_what_they_are(self):
        from ernie5_jax.data.worlds import digits

        _, picture, _ = next(digits.pictures("train"))
        plain = drawing.resize(picture, drawing.CANVAS_SIZE).astype(float)
        views = [drawing.jittered(picture, np.random.default_rng(i)).astype(float) for i in range(40)]
        rows, columns = np.mgrid[:16, :16]
        for view in views:
            self.assertGreater(np.corrcoef(view.ravel(), plain.ravel())[0, 1], 0.3)
            moved = [(view * grid).sum() / view.sum() - (plain * grid).sum() / plain.sum() for grid in (rows, columns)]
            self.assertLess(np.abs(moved).max(), 2.0)
        # Shifts have no preferred direction: the mean view is the picture, blurred.
        mean = np.mean(views, 0)
        self.assertLess(abs((mean * columns).sum() / mean.sum() - (plain * columns).sum() / plain.sum()), 0.4)
        self.assertGreater(np.corrcoef(mean.ravel(), plain.ravel())[0, 1], 0.9)

    def test_voices_accents_and_variants_are_held_out(self):
        from ernie5_jax.data.worlds import digits

        train, test = ([voice.split("+") for voice, _ in digits.voices(split)] for split in ("train", "test"))
        for part in range(2):
            self.assertEmpty({voice[part] for voice in train} & {voice[part] for voice in test})
        self.assertEqual(digits.voices("takes"), digits.voices("train"))
        self.assertLen({name for _, name in digits.voices("train") + digits.voices("test")}, 36)
        self.assertGreaterEqual(len(test) * 10 * digits.TAKES["test"], 300)

    def test_a_digit_moves_as_its_caption_says(self):
        from ernie5_jax.data.worlds import digits

        _, picture, _ = next(digits.pictures("train"))
        for direction, (down, right) in drawing.DIRECTIONS.items():
            frames = drawing.moving(picture, direction).astype(float)
            chex.assert_shape(frames, (5, 16, 16))
            grid = np.arange(16)
            rows = (frames.sum(2) * grid).sum(1) / frames.sum((1, 2))
            columns = (frames.sum(1) * grid).sum(1) / frames.sum((1, 2))
            np.testing.assert_allclose(np.diff(rows), down, atol=1e-9)
            np.testing.assert_allclose(np.diff(columns), right, atol=1e-9)
        self.assertLen({*drawing.two_directions(4)}, 2)

    def test_no_paragraph_of_the_held_out_topics_is_trained_on(self):
        parts = {}
        for split in data.SPLITS:
            texts = prose.topics(split)
            parts[split] = {" ".join(p.split()) for _, text in texts for p in text.split("\n\n")}
            self.assertGreater(sum(len(text) for _, text in texts), 20_000)
        self.assertEmpty(parts["train"] & parts["test"])

    def test_speech_builder(self):
        from ernie5_jax.data.worlds import digits

        builder = digits.DigitsWorld(config="speech", data_dir=self.create_tempdir().full_path)
        examples = dict(zip(range(12), builder._generate_examples("test"), strict=False))
        keys = [key for key, _ in examples.values()]
        self.assertLen(set(keys), 12)
        self.assertEqual({example["voice"] for _, example in examples.values()}, {"en-gb-scotland+f5"})
        self.assertEqual([example["label"] for _, example in examples.values()], [0] * 6 + [1] * 6)
        for _, example in examples.values():
            self.assertBetween(len(example["audio"]) / digits.SAMPLE_RATE, 0.15, 1.0)
            self.assertAlmostEqual(np.abs(example["audio"]).max() / 32767, 0.8, delta=0.01)


class RecordedTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)
        rng = np.random.default_rng(0)
        np.savez(
            self.folder / "handwritten_digits_28px.npz",
            image=rng.integers(0, 256, (16, 28, 28), dtype=np.uint8),
            label=np.arange(16) % 10,
        )
        label, speaker = np.repeat(np.arange(10), 20), np.tile(np.repeat(np.arange(2), 10), 10)
        offsets = np.arange(201) * 800
        audio = np.repeat(np.arange(200, dtype=np.int16) * 100, 800)  # recording i is constant: it can be recognised
        names = np.array(["ann", "bob"])
        np.savez(
            self.folder / "spoken_digits_8khz.npz",
            audio=audio, offsets=offsets, label=label, speaker=speaker, speaker_names=names,
        )  # fmt: skip

    def documents(self, split):
        source = data.world_sources("digits_recorded", split, FORM, Path("unused"), {"folder": str(self.folder)})
        return [source[i] for i in range(len(source))]

    def test_last_takes_of_every_digit_and_speaker_are_held_out(self):
        takes = {}
        # In training 2 takes, each also in 3 perturbed views.
        for split, count in (("train", 2 + 2 * 3), ("test", 8)):
            speech = [d for d in self.documents(split) if d.meta["task"] == "speech_caption"]
            self.assertEqual(set(Counter((d.meta["digit"], d.meta["voice"]) for d in speech).values()), {count})
            middles = [float(d.spans[0].value[len(d.spans[0].value) * 2 // 3]) for d in speech]
            takes[split] = {round(middle * 32768 / 100) for middle in middles}
        self.assertEqual(takes["test"], {i for i in range(200) if i % 10 >= 2})
        self.assertEqual(takes["train"], {i for i in range(200) if i % 10 < 2})

    def test_views_are_for_understanding_in_training_alone_and_differ_in_tempo_and_start(self):
        train = self.documents("train")
        self.assertEqual(Counter(d.meta["task"] for d in train)["speech_generation"], 40)
        rng = np.random.default_rng(0)
        views = [recorded.perturbed(np.full(800, 7, np.int16), rng) for _ in range(200)]
        self.assertBetween(min(rate for _, rate in views), 7200, 7280)
        self.assertBetween(max(rate for _, rate in views), 8720, 8800)
        lengths = [len(samples) for samples, _ in views]
        self.assertBetween(min(lengths), 800, 810)
        self.assertBetween(max(lengths), 1110, 1119)
        for samples, _ in views:
            np.testing.assert_array_equal(samples[-800:], 7)
            np.testing.assert_array_equal(samples[:-800], 0)

    def test_pictures_are_split_in_blocks_and_move(self):
        counts = {split: Counter(d.meta["task"] for d in self.documents(split)) for split in data.SPLITS}
        self.assertEqual([counts[split]["image_caption"] for split in data.SPLITS], [14, 2])
        self.assertEqual([counts[split]["video_generation"] for split in data.SPLITS], [14, 2])
        picture = next(d for d in self.documents("train") if d.meta["task"] == "image_generation")
        self.assertEqual(picture.spans[0].value, "a handwritten zero")
        chex.assert_shape(picture.spans[1].value, (16, 16, 3))

    def test_missing_files_are_named(self):
        with self.assertRaisesRegex(data.DataError, "option folder: found ''"):
            data.world_sources("digits_recorded", "train", FORM, Path("unused"))
        (self.folder / "spoken_digits_8khz.npz").write_bytes(b"PK broken")
        with self.assertRaisesRegex(data.DataError, "spoken_digits_8khz.npz: found a damaged file"):
            self.documents("train")


class SourcesTest(absltest.TestCase):
    def test_errors_name_the_source(self):
        folder = self.create_tempdir().full_path
        for source, why in (({}, "one of path, world, tfds"), ({"path": folder}, "allowed: a prepared folder")):
            config = tiny_experiment_config(data={"sources": {"mine": source}})
            with self.assertRaisesRegex(data.DataError, f"data.sources.mine.*{why}"):
                data.prepare_documents(config, folder, "train", progress=False)
        with self.assertRaisesRegex(data.DataError, "'data.sources': found none"):
            data.prepare_documents(tiny_experiment_config(), folder, "train", progress=False)


if __name__ == "__main__":
    absltest.main()
