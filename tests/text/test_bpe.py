"""Round trip, alignment, dropout, training and files of the text tokenizer."""

import functools
import itertools
import json
import os
import pickle
import pydoc_data.topics
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie5_jax.config import ConfigError, TextTokenizerConfig
from ernie5_jax.files import FileError
from ernie5_jax.text import (
    FIRST_MERGE,
    MAX_UNSPACED_CJK,
    NUM_SPECIAL_TOKENS,
    SPECIAL_TOKENS,
    BpeTokenizer,
    TextTokenizerError,
    load_text_tokenizer,
    num_utf8_bytes,
    train_bpe,
)
from ernie5_jax.text.dropout import Gaps
from ernie5_jax.text.merging import merge
from ernie5_jax.text.pretokenize import escape, longest_cjk_run, split_words, unescape

TEXTS = (
    *("the cat sat on the mat, and the other cat sat there in 1984; the cats' mats don't match",) * 3,
    *("人工智能正在改变世界 人工智能研究 日本語のコンピューター 😀😀 😁 naïve Привет, привет мир",) * 3,
    "def function(argument):\n    return argument  # the other argument\n\n\n",
)
SURROGATES = st.characters(categories=("Cs",))
ANY_TEXT = st.text(st.one_of(st.characters(categories=None), SURROGATES, st.sampled_from("the cat\ufffe人工智😀 ")))


@functools.cache
def tokenizer(vocab_size=FIRST_MERGE + 120):
    return train_bpe(TEXTS, TextTokenizerConfig(vocab_size=vocab_size))


def replace_pair(tokens, left, right, merged):
    out = []
    for token in tokens:
        if out and out[-1][0] == left and token[0] == right and out[-1][1] != 1 and token[1] != 0:
            out[-1] = (merged, 2)
        else:
            out.append(token)
    return out


def plain_bytes(text):
    return text.encode("utf-16-be", "surrogatepass")


class RoundTripTest(parameterized.TestCase):
    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(ANY_TEXT, st.sampled_from((0.0, 0.3, 1.0)))
    def test_any_string(self, text, rate):
        ids = tokenizer().encode_dropout(text, (3, 1), rate)
        self.assertEqual(tokenizer().decode(ids), text)
        self.assertTrue(np.all((ids >= NUM_SPECIAL_TOKENS) & (ids < tokenizer().num_tokens)))

    def test_every_code_point(self):
        text = "".join(map(chr, range(sys.maxunicode + 1)))
        self.assertEqual("".join(split_words(text)), text)
        self.assertEqual(unescape(escape(text)), text)
        text = "".join(map(chr, range(0x10000)))
        self.assertEqual(tokenizer().decode(tokenizer().encode(text)), text)

    @parameterized.parameters("\ud83d\ude00", "\ud83d\ufffe\ude00", "\ufffe\ufffe\ufffe", "\ude00\ud83d", "a\ud83d")
    def test_lone_surrogates_stay_apart(self, text):
        decoded = tokenizer().decode(tokenizer().encode(text))
        self.assertEqual(list(decoded), list(text))

    def test_ids_are_utf_16be_bytes_without_merges(self):
        bare = BpeTokenizer([], TextTokenizerConfig(vocab_size=FIRST_MERGE))
        ids = bare.encode("a€😀")
        self.assertEqual(bytes((ids - NUM_SPECIAL_TOKENS).tolist()), bytes.fromhex("0061 20ac d83d de00"))
        self.assertEqual(ids.dtype, np.int32)

    def test_special_tokens_cannot_be_spelt(self):
        text = "".join(SPECIAL_TOKENS) * 20
        trained = train_bpe([text], TextTokenizerConfig(vocab_size=FIRST_MERGE + 200))
        ids = trained.encode(text)
        self.assertTrue(np.all(ids >= NUM_SPECIAL_TOKENS))
        self.assertEqual(trained.decode(ids), text)

    def test_decode_skips_special_tokens_and_survives_nonsense(self):
        the = tokenizer().encode("the").tolist()
        self.assertGreaterEqual(the[0], FIRST_MERGE)
        self.assertEqual(tokenizer().decode([0, 1, *the, 95]), "the")
        stray = NUM_SPECIAL_TOKENS + 0x61
        self.assertEqual(tokenizer().decode([stray, *the, stray]), "\ufffdthe\ufffd")
        with self.assertRaisesRegex(TextTokenizerError, "token id: found -1, allowed: 0"):
            tokenizer().decode([-1])

    def test_utf8_bytes(self):
        self.assertEqual(num_utf8_bytes("a€😀\ud83d"), 1 + 3 + 4 + 3)


class DropoutTest(parameterized.TestCase):
    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.one_of(ANY_TEXT, st.sampled_from(TEXTS), st.text("aht c", max_size=60)))
    def test_own_loop_equals_library_without_dropout(self, text):
        # A rate this small never drops anything, but takes the path of dropout; the loop is called word by word.
        np.testing.assert_array_equal(tokenizer().encode_dropout(text, (0,), 1e-300), tokenizer().encode(text))
        rules, library = tokenizer()._rules, tokenizer()._library
        for word in split_words(escape(text)):
            data = np.frombuffer(plain_bytes(word), np.uint8).reshape(-1, 2) + np.array([0, 256])
            symbols = data.reshape(-1).tolist()
            expected = library.encode("".join(chr(0x100 + s) for s in symbols)).ids
            self.assertEqual(merge(symbols, rules, lambda rank: True), expected)

    @parameterized.parameters(0.05, 0.3, 0.7, 1.0)
    def test_cached_words_equal_a_plain_stream_of_draws(self, rate):
        text = " ".join(TEXTS) + " " + "thecat" * 20
        for epoch in range(3):  # later epochs meet a filled cache
            gaps = Gaps((5, 7, epoch), rate)
            expected = []
            for word in split_words(text):
                data = np.frombuffer(plain_bytes(word), np.uint8).reshape(-1, 2) + np.array([0, 256])
                expected += merge(data.reshape(-1).tolist(), tokenizer()._rules, lambda _: gaps.accept())  # noqa: B023
            ids = tokenizer().encode_dropout(text, (5, 7, epoch), rate)
            symbols = np.array(expected)
            symbols = np.where(symbols < 512, symbols % 256 + NUM_SPECIAL_TOKENS, symbols - 512 + FIRST_MERGE)
            np.testing.assert_array_equal(ids, symbols)

    def test_pure_function_of_key_and_rate(self):
        text = TEXTS[0]
        fresh = pickle.loads(pickle.dumps(tokenizer()))
        draws = [tuple(tokenizer().encode_dropout(text, (1, 2, epoch), 0.3)) for epoch in range(20)]
        again = [tuple(fresh.encode_dropout(text, (1, 2, epoch), 0.3)) for epoch in reversed(range(20))]
        self.assertEqual(draws, again[::-1])
        self.assertGreater(len(set(draws)), 15)
        self.assertNotEqual(draws[0], tuple(fresh.encode_dropout(text, (1, 3, 0), 0.3)))

    def test_rate_one_gives_bytes(self):
        ids = tokenizer().encode_dropout(TEXTS[1], (0,), 1.0)
        self.assertEqual(bytes((ids - NUM_SPECIAL_TOKENS).tolist()), plain_bytes(TEXTS[1]))

    def test_share_of_dropped_merges(self):
        gaps = Gaps((11,), 0.2)
        dropped = [not gaps.accept() for _ in range(20000)]
        self.assertAlmostEqual(np.mean(dropped), 0.2, delta=4 * np.sqrt(0.2 * 0.8 / 20000))
        # Independent draws: after a drop the next one is as likely as ever.
        self.assertAlmostEqual(np.mean(np.array(dropped)[1:][dropped[:-1]]), 0.2, delta=0.03)

    def test_rate_outside(self):
        with self.assertRaisesRegex(TextTokenizerError, "'rate': found 1.5, allowed: 0 <= rate <= 1"):
            tokenizer().encode_dropout("a", (0,), 1.5)


class TrainingTest(parameterized.TestCase):
    def test_layout_of_ids(self):
        self.assertEqual((NUM_SPECIAL_TOKENS, FIRST_MERGE), (96, 352))
        self.assertEqual(tokenizer().token_bytes(96 + 0xAB), b"\xab")
        self.assertEqual(tokenizer().token_bytes(0), b"")
        self.assertEqual(tokenizer().vocab_size, FIRST_MERGE + 120)
        self.assertEqual(tokenizer().num_tokens, FIRST_MERGE + 120)

    def test_every_merge_is_the_most_frequent_one_at_its_turn(self):
        # Replays training on bytes; pairs are (first, second) of a unit and whole units. Blind to the order of ties.
        text = pydoc_data.topics.topics["numbers"] + pydoc_data.topics.topics["while"] + "naïve Привет, привет " * 3
        trained = train_bpe([text], TextTokenizerConfig(vocab_size=FIRST_MERGE + 200))
        words = Counter(split_words(text))
        split = {w: [(96 + b, i % 2) for i, b in enumerate(plain_bytes(w))] for w in words}
        made: dict[bytes, int] = {}
        for left, right in trained.merges:
            counts = Counter()
            for word, tokens in split.items():
                last = {}
                for i, (a, b) in enumerate(itertools.pairwise(tokens)):
                    if (a[1], b[1]) in ((0, 1), (2, 2)) and last.get((a, b)) != i - 1:
                        counts[a[0], b[0]] += words[word]
                        last[a, b] = i  # "aaa" has one pair, not two
            self.assertEqual(counts[left, right], max(counts.values()))
            token = made.setdefault(trained.token_bytes(left) + trained.token_bytes(right), FIRST_MERGE + len(made))
            for word, tokens in split.items():
                split[word] = replace_pair(tokens, left, right, token)
        self.assertEqual([trained.token_bytes(i) for i in range(FIRST_MERGE, trained.num_tokens)], list(made))
        expected = [token for word in split_words(text) for token, _ in split[word]]
        self.assertEqual(trained.encode(text).tolist(), expected)

    def test_every_token_is_whole_characters_of_one_word(self):
        trained = train_bpe(TEXTS, TextTokenizerConfig(vocab_size=FIRST_MERGE + 400))
        tokens = [trained.token_bytes(i) for i in range(FIRST_MERGE, trained.num_tokens)]
        self.assertTrue(all(len(token) % 2 == 0 for token in tokens))
        self.assertIn(plain_bytes("😀"), tokens)
        for token in tokens:
            text = token.decode("utf-16-be", "surrogatepass")
            self.assertLen(split_words(text), 1)
            if "\ud800" <= max(text) <= "\udfff":
                self.assertLen(text, 1)

    def test_long_unspaced_phrases_get_no_token(self):
        phrase = "人工智能正在改变世界"
        trained = train_bpe([(phrase + "\n") * 50], TextTokenizerConfig(vocab_size=FIRST_MERGE + 60))
        tokens = [trained.token_bytes(i).decode("utf-16-be") for i in range(FIRST_MERGE, trained.num_tokens)]
        self.assertEqual(max(map(longest_cjk_run, tokens)), MAX_UNSPACED_CJK)
        self.assertLess(len(trained.encode(phrase)), len(phrase))

    def test_filtered_phrases_leave_no_room_empty(self):
        # Random phrases over three characters: most of their merges are too long, words still deserve the room.
        random = np.random.default_rng(0)
        phrases = " ".join("".join(random.choice(list("人工智"), 12)) for _ in range(2000))
        rare = " ".join(f"word{'abcdefghij'[i % 10]}{'klmno'[i % 5]}x" for i in range(100))
        trained = train_bpe([phrases, rare], TextTokenizerConfig(vocab_size=FIRST_MERGE + 140))
        self.assertEqual(trained.num_tokens, FIRST_MERGE + 140)

    def test_order_of_texts_does_not_matter(self):
        config = TextTokenizerConfig(vocab_size=tokenizer().vocab_size)
        self.assertEqual(train_bpe(reversed(TEXTS), config).fingerprint(), tokenizer().fingerprint())

    def test_little_text_leaves_ids_unused(self):
        trained = train_bpe(["a" * 2], TextTokenizerConfig(vocab_size=768))
        self.assertEqual((trained.num_tokens, trained.vocab_size), (FIRST_MERGE + 1, 768))
        self.assertEqual(trained.decode([767]), "\ufffd")

    def test_bad_input(self):
        with self.assertRaisesRegex(ConfigError, "'vocab_size': found 340, allowed: >= 352"):
            train_bpe(["a"], TextTokenizerConfig(vocab_size=340))
        with self.assertRaisesRegex(TextTokenizerError, "found no characters"):
            train_bpe(["", ""], TextTokenizerConfig())


class FileTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "text"
        tokenizer().save(self.folder)
        (self.file,) = self.folder.iterdir()

    def test_save_and_load(self):
        loaded = load_text_tokenizer(self.folder)
        self.assertEqual(loaded.fingerprint(), tokenizer().fingerprint())
        self.assertRegex(loaded.fingerprint(), "^[0-9a-f]{16}$")
        self.assertEqual(loaded.config, tokenizer().config)
        np.testing.assert_array_equal(loaded.encode(TEXTS[1]), tokenizer().encode(TEXTS[1]))

    def test_fingerprint_tells_tokenizers_apart(self):
        merges, config = tokenizer().merges, tokenizer().config
        others = (
            BpeTokenizer(merges[:-1], config),
            BpeTokenizer(merges, TextTokenizerConfig(vocab_size=config.vocab_size + 1)),
        )
        self.assertLen({tokenizer().fingerprint(), *(other.fingerprint() for other in others)}, 3)

    @parameterized.named_parameters(
        ("cut", lambda text: text[: len(text) // 2], "a file that is not JSON"),
        ("binary", lambda text: "\0\1", "a file that is not JSON"),
        ("other_file", lambda text: '{"format": "x"}', "format 'x' instead of"),
        ("list", lambda text: "[]", "format None instead of"),
        ("merge_changed", lambda text: text.replace("[96, ", "[97, ", 1), "does not match its fingerprint"),
        ("merge_unknown", lambda text: text.replace("[96, ", "[9999, ", 1), r"merge 0: found \(9999"),
        ("no_merges", lambda text: text.replace('"merges"', '"m"'), "damaged content .*merges"),
        ("bad_config", lambda text: text.replace('"dropout"', '"drop"'), "config key 'drop': unknown"),
    )
    def test_damaged_file(self, damage, message):
        self.file.write_text(damage(self.file.read_text()))
        with self.assertRaisesRegex(TextTokenizerError, message) as caught:
            load_text_tokenizer(self.folder)
        self.assertIn(str(self.file), str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_missing_file(self):
        with self.assertRaisesRegex(TextTokenizerError, "nowhere.*No such file"):
            load_text_tokenizer(self.folder / "nowhere")

    def test_merge_that_breaks_alignment(self):
        with self.assertRaisesRegex(TextTokenizerError, "merge 1: .*allowed: two bytes or two merges"):
            BpeTokenizer([(96, 97), (352, 96)], TextTokenizerConfig())

    def test_full_disk_leaves_the_old_file(self):
        before = self.file.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        with self.assertRaisesRegex(FileError, r"cannot be written \(File too large\)"):
            tokenizer().save(self.folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assertEqual(os.listdir(self.folder), [self.file.name])
        self.assertEqual(self.file.read_bytes(), before)
        self.assertEqual(json.loads(before)["fingerprint"], tokenizer().fingerprint())


if __name__ == "__main__":
    absltest.main()
