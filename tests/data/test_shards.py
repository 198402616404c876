"""Shards of documents and of encoded documents: resumable, atomic, exact, and never cut."""

import resource
from pathlib import Path
from typing import Any

import chex
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax import data
from ernie5_jax.data import DataError, unique_media
from ernie5_jax.data.encoding import Tokenizers, encode_documents, split_text
from ernie5_jax.files import FileError
from ernie5_jax.sequence import Document, EncodedText, Span, document_size
from ernie5_jax.testing import (
    DummyAudioTokenizer,
    DummyTextTokenizer,
    DummyVisualTokenizer,
    random_document,
    tiny_experiment_config,
)

TOKENIZERS = Tokenizers(DummyTextTokenizer(), DummyVisualTokenizer(), DummyAudioTokenizer())
SEQUENCE = tiny_experiment_config().sequence


class CountingSource:
    """Documents that remember who asked for them, and may refuse one."""

    def __init__(self, documents, name="source", broken=-1):
        self.documents, self.name, self.broken, self.read = documents, name, broken, []

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        self.read.append(index)
        if index == self.broken:
            raise KeyboardInterrupt
        return self.documents[index]

    def fingerprint(self):
        return self.name


def random_documents(count: int) -> list[Document]:
    rng = np.random.default_rng(0)
    return [random_document(rng, max_spans=2) for _ in range(count)]


def encode(shards, out, **arguments):
    arguments = {"sequence": SEQUENCE, "progress": False, "shard_size": 4, **arguments}
    return encode_documents(shards, TOKENIZERS.text, TOKENIZERS.visual, TOKENIZERS.audio, out, **arguments)


def write(documents, folder, **arguments):
    return data.write_shards(CountingSource(documents), folder, 1000, progress=False, **arguments)


class ShardsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)

    def test_documents_come_back(self):
        documents = random_documents(9)
        shards = write(documents, self.folder, shard_size=4)
        self.assertLen(list(self.folder.glob("*.array_record")), 3)
        self.assertLen(shards, 9)
        for found, document in zip(shards, documents, strict=True):
            self.assertEqual(found.meta, document.meta)
            for a, b in zip(found.spans, document.spans, strict=True):
                self.assertEqual((a.modality, a.role), (b.modality, b.role))
                if a.modality == "text":
                    self.assertEqual(a.value, b.value)
                else:  # sound is kept in 16 bits, pictures exactly
                    chex.assert_trees_all_close(a.value, b.value, atol=1 / 32767 if a.modality == "audio" else 0)

    def test_every_medium_is_found_once_and_in_order(self):
        documents = random_documents(30)
        shards = write([*documents, *documents[::-1]], self.folder)
        for modality in ("text", "image", "video", "audio"):
            every = [span.value for document in shards for span in document.spans if span.modality == modality]
            expected = list({np.asarray(value).tobytes(): value for value in every}.values())
            found = unique_media([shards, shards], modality)
            self.assertLess(len(found), len(every))
            self.assertLen(found, len(expected))
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_array_equal(a, b)

    def test_preparation_resumes_and_ends_like_an_uninterrupted_one(self):
        documents = random_documents(10)
        broken = CountingSource(documents, broken=6)
        with self.assertRaises(KeyboardInterrupt):
            data.write_shards(broken, self.folder / "a", 1000, shard_size=4, progress=False)
        with self.assertRaisesRegex(DataError, "not finished"):
            data.read_shards(self.folder / "a")
        (self.folder / "a" / "left.array_record.tmp").write_bytes(b"of a dead run")
        again = CountingSource(documents)
        data.write_shards(again, self.folder / "a", 1000, shard_size=4, progress=False)
        # The first shard was there, and perhaps the one after the broken one.
        self.assertIn(again.read, ([4, 5, 6, 7], [4, 5, 6, 7, 8, 9]))
        write(documents, self.folder / "b", shard_size=4)
        files = sorted(path.name for path in (self.folder / "a").iterdir())
        self.assertEqual(files, sorted(path.name for path in (self.folder / "b").iterdir()))
        a, b = data.read_shards(self.folder / "a"), data.read_shards(self.folder / "b")
        self.assertEqual([a.record(i) for i in range(10)], [b.record(i) for i in range(10)])

    def test_another_source_starts_anew(self):
        write(random_documents(10), self.folder, shard_size=2)
        other = CountingSource(random_documents(3), "other")
        shards = data.write_shards(other, self.folder, 1000, shard_size=2, progress=False)
        self.assertLen(shards, 3)
        self.assertLen(list(self.folder.glob("*.array_record")), 2)

    def test_missing_shard_and_empty_folder_are_named(self):
        with self.assertRaisesRegex(DataError, "no prepared data"):
            data.read_shards(self.folder)
        write(random_documents(5), self.folder, shard_size=2)
        next(self.folder.glob("*.array_record")).unlink()
        with self.assertRaisesRegex(DataError, "some are missing"):
            data.read_shards(self.folder)

    @parameterized.parameters("{", "[1]", '{"complete": true}')
    def test_damaged_state_is_as_none(self, text):
        write(random_documents(2), self.folder)
        (self.folder / "state.json").write_text(text)
        with self.assertRaisesRegex(DataError, "no prepared data"):
            data.read_shards(self.folder)
        self.assertLen(write(random_documents(2), self.folder), 2)

    @parameterized.parameters("cut", "overwritten", "emptied")
    def test_damaged_shard_is_named(self, how):
        write(random_documents(6), self.folder, shard_size=4)
        (path, *_) = sorted(self.folder.glob("*.array_record"))
        content = path.read_bytes()
        damaged = {
            "cut": content[: len(content) // 2],
            "overwritten": content[:100] + bytes(200) + content[300:],
            "emptied": b"",
        }
        path.write_bytes(damaged[how])
        with self.assertRaisesRegex(DataError, f"{path.name}': damaged .*allowed: an intact one"):
            list(data.DocumentShards(self.folder))

    def test_full_disk_is_one_line_and_leaves_nothing_half_written(self):
        rng = np.random.default_rng(0)
        noise = [Document((Span("image", "generate", rng.integers(0, 256, (64, 64, 3), np.uint8)),), {})] * 20
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        with self.assertRaisesRegex(FileError, r"^'[^\n]*records-00000[^\n]*cannot be written[^\n]*allowed: [^\n]*$"):
            write(noise, self.folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["state.json"])
        with self.assertRaisesRegex(DataError, "not finished"):
            data.read_shards(self.folder)
        self.assertLen(write(noise, self.folder), 20)

    def test_encoded_and_raw_folders_are_told_apart(self):
        shards = write(random_documents(3), self.folder / "raw")
        encode(shards, self.folder / "encoded")
        with self.assertRaisesRegex(DataError, r"encoded': found encoded documents, allowed: prepared ones"):
            data.read_shards(self.folder / "encoded")
        with self.assertRaisesRegex(DataError, r"raw': found documents that are not tokenised"):
            data.EncodedDocuments(self.folder / "raw")

    @parameterized.parameters(None, b"", b"damaged")
    def test_damaged_index_is_named(self, content):
        encode(write(random_documents(3), self.folder / "raw"), self.folder / "encoded")
        index = self.folder / "encoded" / "index.npz"
        index.unlink()
        if content is not None:
            index.write_bytes(content)
        with self.assertRaisesRegex(DataError, r"encoded': found a damaged index.npz"):
            data.EncodedDocuments(self.folder / "encoded")

    def test_encoded_documents_are_those_of_the_tokenizers(self):
        documents = random_documents(20)
        encoded = encode(write(documents, self.folder / "raw"), self.folder / "encoded")
        self.assertLen(encoded, 20)
        for i, document in enumerate(documents):
            found, texts = encoded.read(i)
            for span, raw, text in zip(found.spans, document.spans, texts, strict=True):
                value: Any = span.value
                if raw.modality == "text":
                    chex.assert_trees_all_equal(value.ids, TOKENIZERS.text.encode(raw.value))
                    self.assertEqual(value.num_bytes, len(raw.value.encode()))
                    self.assertEqual(text, raw.value)
                elif raw.modality == "audio":
                    rounded = (np.round(raw.value * 32767) / 32768).astype(np.float32)
                    self.assertEqual(value.codes.shape, TOKENIZERS.audio.encode([rounded])[0].shape)
                    self.assertLess(np.abs(value.codes - TOKENIZERS.audio.encode([raw.value])[0])[:, 0].max(), 2)
                else:
                    video = raw.value if raw.modality == "video" else raw.value[None]
                    latents, features = (array[0] for array in TOKENIZERS.visual.encode(video[None]))
                    if raw.role == "generate":
                        chex.assert_trees_all_close(value.latents, latents, atol=1e-3)
                        self.assertIsNone(value.features)
                    else:
                        chex.assert_trees_all_close(value.features, features[..., None, :], atol=1e-3)
                        self.assertIsNone(value.latents)
            size = document_size(found, TOKENIZERS.visual.scales)
            self.assertEqual(tuple(encoded.sizes[i]), tuple(size))
            tokens = sum(len(span.value.ids) for span in found.spans if isinstance(span.value, EncodedText))
            self.assertEqual(encoded.text_tokens[i], tokens)

    def test_encoding_in_memory_equals_encoding_to_records(self):
        documents = random_documents(6)
        encoded = encode(write(documents, self.folder / "raw"), self.folder / "encoded")
        memory = data.encode_in_memory(list(data.read_shards(self.folder / "raw")), TOKENIZERS, SEQUENCE)
        for a, b in zip(memory, (encoded[i] for i in range(6)), strict=True):
            for x, y in zip(a.spans, b.spans, strict=True):
                chex.assert_trees_all_close(vars(x.value), vars(y.value), atol=1e-3)

    def test_documents_that_overflow_are_all_named_and_never_cut(self):
        documents = [Document((Span("text", "generate", "x" * n),), {"source": f"book {n}"}) for n in (10, 95, 94, 300)]
        shards = write(documents, self.folder / "raw")
        with self.assertRaises(DataError) as caught:
            encode(shards, self.folder / "encoded")
        message = str(caught.exception)
        self.assertIn("found 2 that do not fit", message)
        self.assertIn("document 1 (book 95): needs 97 positions, allowed: config key 'sequence.length' = 96", message)
        self.assertIn("document 3 (book 300): needs 302 positions", message)
        with self.assertRaisesRegex(DataError, "not finished"):
            data.EncodedDocuments(self.folder / "encoded")
        # With BPE-dropout the reserve must fit as well: ceil(1.15 x 94) + 2 > 96.
        with self.assertRaisesRegex(DataError, r"document 0 \(book 94\): needs 111 positions"):
            encode(write(documents[2:3], self.folder / "one"), self.folder / "dropout", text_dropout=0.1)

    def test_prose_is_split_between_words_and_nothing_is_lost(self):
        text = "".join(np.random.default_rng(0).choice(list("ab \n"), 2000).tolist()) + "c" * 200
        pieces = list(split_text(text, TOKENIZERS.text, 50))
        self.assertEqual("".join(pieces), text)
        self.assertLessEqual(max(map(len, pieces)), 50)
        self.assertTrue(all(piece[-1].isspace() for piece in pieces[:-6]))
        self.assertGreater(np.mean([len(piece) for piece in pieces]), 40)
        encoded = encode(write([data.passage(text)], self.folder / "raw"), self.folder / "encoded")
        values: list[Any] = [encoded[i].spans[0].value for i in range(len(encoded))]
        self.assertEqual("".join(TOKENIZERS.text.decode(value.ids) for value in values), text)
        self.assertEqual(set(encoded.tasks), {"text"})
        self.assertLessEqual(encoded.sizes[:, 0].max(), SEQUENCE.length)

    def test_documents_of_another_tokenizer_are_refused(self):
        encoded = encode(write(random_documents(3), self.folder / "raw"), self.folder / "encoded")
        encoded.check_tokenizers(TOKENIZERS)
        other = Tokenizers(TOKENIZERS.text, TOKENIZERS.visual, DummyAudioTokenizer(samples_per_frame=20))
        with self.assertRaisesRegex(DataError, "another audio tokenizer"):
            encoded.check_tokenizers(other)


if __name__ == "__main__":
    absltest.main()
