"""Byte-exact byte-pair encoding on UTF-16BE (ERNIE 5.0 section 3.1)."""

from __future__ import annotations

import array
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from ernie5_jax.config import ConfigError, TextTokenizerConfig
from ernie5_jax.config.base import from_mapping, to_plain
from ernie5_jax.errors import UserError
from ernie5_jax.files import write_json
from ernie5_jax.text import pretokenize
from ernie5_jax.text.dropout import Drops, Gaps
from ernie5_jax.text.merging import Rules, merge
from ernie5_jax.text.special_tokens import NUM_SPECIAL_TOKENS

NUM_BYTES = 256
FIRST_MERGE = NUM_SPECIAL_TOKENS + NUM_BYTES
"""Ids below are special tokens (0 ...) and bytes (`NUM_SPECIAL_TOKENS` ...)."""

_FILE = "text_tokenizer.json"
_FORMAT = "ernie5_jax.text.bpe/1"  # to be raised whenever a change of code changes an encoding
_CACHE_ENTRIES = 1 << 18
_CACHED_LENGTH = 32  # characters; longer words hardly come again
_CACHED_DROPS = 3
_REPLACEMENT = "\ufffd".encode("utf-16-be")


class TextTokenizerError(UserError):
    """A text tokenizer file or an input that cannot be used."""


class BpeTokenizer:
    """Text <-> ids, lossless for every Python string; implements `TextTokenizer`.

    Ids: special tokens, then 256 bytes, then merged tokens. Text is cut into words (`pretokenize`), a word into
    UTF-16BE bytes. The first byte of a code unit only ever merges with its second one, after that whole units
    merge: every merged token is whole code units. So tokens never lose alignment, and `decode` finds it again
    after a stray byte. Special tokens are unreachable from text: "<boi>" is five characters.

    Args:
      merges: Pairs of token ids in order of application. A pair of two bytes is (first, second) of one code unit.
      config: `vocab_size` is the size of the id space; ids beyond `num_tokens` are unused.

    Raises:
      TextTokenizerError: A merge refers to unknown tokens, breaks the alignment or exceeds `vocab_size`.
    """

    def __init__(self, merges: Sequence[tuple[int, int]], config: TextTokenizerConfig):
        self.config = config
        self.merges = tuple((int(left), int(right)) for left, right in merges)
        self._bytes = [b""] * NUM_SPECIAL_TOKENS + [bytes([b]) for b in range(NUM_BYTES)]
        self._rules: Rules = {}
        self._add_merges()
        self._library = self._make_library()
        self._plain: dict[str, bytes] = _Memory(self._encode_word)
        self._dropped: dict[tuple[str, tuple[int, ...]], tuple[bytes, int]] = {}

    def __reduce__(self):
        return BpeTokenizer, (self.merges, self.config)

    def _add_merges(self) -> None:
        # Inside, the first bytes of code units are symbols 0 ... 255, the second ones 256 ... 511; merged ones follow.
        known: dict[bytes, int] = {}
        for rank, (left, right) in enumerate(self.merges):
            if not all(NUM_SPECIAL_TOKENS <= side < len(self._bytes) for side in (left, right)):
                raise TextTokenizerError(f"merge {rank}: found {(left, right)}, allowed: bytes or earlier merges")
            if (left < FIRST_MERGE) != (right < FIRST_MERGE):
                raise TextTokenizerError(f"merge {rank}: found {(left, right)}, allowed: two bytes or two merges")
            merged = self._bytes[left] + self._bytes[right]
            if merged not in known:
                known[merged] = len(self._bytes)
                self._bytes.append(merged)
            pair = (left - NUM_SPECIAL_TOKENS, right - NUM_SPECIAL_TOKENS + NUM_BYTES)
            if left >= FIRST_MERGE:
                pair = (_symbol(left), _symbol(right))
            self._rules.setdefault(pair, (rank, _symbol(known[merged])))
        if len(self._bytes) > self.config.vocab_size:
            found = f"found {len(self._bytes)} tokens, allowed: vocab_size = {self.config.vocab_size}"
            raise TextTokenizerError(f"merges: {found}")

    def _make_library(self) -> tokenizers.Tokenizer:
        names = [chr(0x100 + symbol) for symbol in range(2 * NUM_BYTES)]
        names += [_name(token) for token in self._bytes[FIRST_MERGE:]]
        vocabulary = {name: symbol for symbol, name in enumerate(names)}
        pairs = sorted(self._rules, key=lambda pair: self._rules[pair][0])
        model = tokenizers.models.BPE(vocab=vocabulary, merges=[(names[left], names[right]) for left, right in pairs])
        return tokenizers.Tokenizer(model)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_tokens(self) -> int:
        """Ids in use, at most `vocab_size`."""
        return len(self._bytes)

    def token_bytes(self, token: int) -> bytes:
        """UTF-16BE bytes of a token; empty for special tokens."""
        return self._bytes[token]

    def _encode_word(self, word: str) -> bytes:
        """int32 ids of one word as bytes, by the library."""
        symbols = self._library.encode(_name(word.encode("utf-16-be", "surrogatepass")), add_special_tokens=False).ids
        return _to_ids(symbols)

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] ids of `text`, without BOS or EOS; never a special token."""
        words = pretokenize.split_words(pretokenize.escape(text))
        return np.frombuffer(b"".join(map(self._plain.__getitem__, words)), np.int32).copy()

    def encode_dropout(self, text: str, key: tuple[int, ...], rate: float) -> np.ndarray:
        """BPE-dropout encoding, a pure function of (text, key, rate).

        Args:
          text: Any string.
          key: Non-negative integers, e.g. (seed, document, epoch).
          rate: Probability of dropping a merge when its turn comes; 0 equals `encode`, 1 gives bytes.

        Returns:
          int32 [n] ids.

        Source: Provilkov et al. 2020, arXiv:1910.13267.
        """
        if not 0 <= rate <= 1:
            raise TextTokenizerError(f"argument 'rate': found {rate!r}, allowed: 0 <= rate <= 1")
        if rate == 0:
            return self.encode(text)
        gaps = Gaps(key, rate)
        words = pretokenize.split_words(pretokenize.escape(text))
        return np.frombuffer(b"".join(self._drop_word(word, gaps) for word in words), np.int32).copy()

    def _drop_word(self, word: str, gaps: Gaps) -> bytes:
        # What becomes of a word depends on which of its merges, in the order of their turns, are dropped.
        # `gaps` counts merges up to the next dropped one, so a word whose merges all pass costs one subtraction.
        drops: tuple[int, ...] = ()
        ids = self._plain[word]
        turns = len(word.encode("utf-16-be", "surrogatepass")) - len(ids) // 4  # a merge leaves one symbol less
        seen = 0
        while gaps.left <= turns - seen:
            seen += gaps.left
            gaps.next()
            drops += (seen,)
            if len(drops) > _CACHED_DROPS or len(word) > _CACHED_LENGTH:
                return self._merge_word(word, Drops(drops, gaps))[0]
            outcome = self._dropped.get((word, drops))
            if outcome is None:
                if len(self._dropped) >= _CACHE_ENTRIES:
                    self._dropped.clear()
                outcome = self._dropped[word, drops] = self._merge_word(word, Drops(drops))
            ids, turns = outcome
        gaps.left -= turns - seen
        return ids

    def _merge_word(self, word: str, drops: Drops) -> tuple[bytes, int]:
        """Ids of the word by the own merge loop, and how many merges had their turn."""
        return _to_ids(merge(_symbols(word), self._rules, drops.accept)), drops.turns

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of `ids`; special tokens are skipped. Stray bytes and unused ids become U+FFFD.

        Raises:
          TextTokenizerError: An id outside 0 ... vocab_size - 1.
        """
        out = bytearray()
        pending = b""
        for token in map(int, ids):
            if not 0 <= token < self.vocab_size:
                raise TextTokenizerError(f"token id: found {token}, allowed: 0 ... {self.vocab_size - 1}")
            if NUM_SPECIAL_TOKENS <= token < FIRST_MERGE:
                pending += self._bytes[token]
                if len(pending) == 2:
                    out += pending
                    pending = b""
                continue
            if pending:
                out += _REPLACEMENT
                pending = b""
            out += self._bytes[token] if token < self.num_tokens else _REPLACEMENT
        if pending:
            out += _REPLACEMENT
        return pretokenize.unescape(out.decode("utf-16-be", "surrogatepass"))

    def fingerprint(self) -> str:
        """Short hash of everything that decides the encoding (not of the configured dropout rate)."""
        content = json.dumps([_FORMAT, NUM_SPECIAL_TOKENS, self.vocab_size, self.merges])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the tokenizer into `folder`, whole or not at all.

        Raises:
          FileError: The file cannot be written.
        """
        content = {"format": _FORMAT, "fingerprint": self.fingerprint(), "config": to_plain(self.config)}
        write_json(Path(folder) / _FILE, {**content, "merges": self.merges})


def load_text_tokenizer(folder: str | os.PathLike[str]) -> BpeTokenizer:
    """Reads what `BpeTokenizer.save` wrote.

    Raises:
      TextTokenizerError: Names the file and what is wrong with it: missing, not a tokenizer, damaged.
    """
    path = Path(folder) / _FILE

    def refuse(found: str) -> TextTokenizerError:
        return TextTokenizerError(f"text tokenizer '{path}': found {found}, allowed: what BpeTokenizer.save wrote")

    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise refuse(f"no readable file ({error.strerror})") from None
    except ValueError:  # not JSON or not text
        raise refuse("a file that is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        given = content.get("format") if isinstance(content, dict) else None
        raise refuse(f"format {given!r} instead of {_FORMAT!r}")
    try:
        tokenizer = BpeTokenizer(content["merges"], from_mapping(TextTokenizerConfig, content["config"]))
    except (KeyError, TypeError, ConfigError, TextTokenizerError, ValueError) as error:
        raise refuse(f"damaged content ({error})") from None
    if tokenizer.fingerprint() != content.get("fingerprint"):
        raise refuse(f"content that does not match its fingerprint {content.get('fingerprint')!r}")
    return tokenizer


class _Memory(dict[str, bytes]):
    """Remembers short words up to a limit; a dict, because looking up is all that plain encoding does."""

    def __init__(self, compute):
        super().__init__()
        self._compute = compute

    def __missing__(self, word: str) -> bytes:
        value = self._compute(word)
        if len(word) <= _CACHED_LENGTH and len(self) < _CACHE_ENTRIES:
            self[word] = value
        return value


def _symbol(token: int) -> int:
    return token - FIRST_MERGE + 2 * NUM_BYTES


def _token(symbol: int) -> int:
    if symbol >= 2 * NUM_BYTES:
        return symbol - 2 * NUM_BYTES + FIRST_MERGE
    return symbol % NUM_BYTES + NUM_SPECIAL_TOKENS


def _symbols(word: str) -> list[int]:
    data = list(word.encode("utf-16-be", "surrogatepass"))
    data[1::2] = [byte + NUM_BYTES for byte in data[1::2]]
    return data


def _name(data: bytes) -> str:
    """The characters that stand for UTF-16BE bytes in the library; first and second bytes of units differ."""
    symbols = np.frombuffer(data, np.uint8).reshape(-1, 2).astype("<u2") + np.array([0x100, 0x100 + NUM_BYTES], "<u2")
    return symbols.astype("<u2").tobytes().decode("utf-16-le")


def _to_ids(symbols: Sequence[int]) -> bytes:
    return array.array("i", map(_token, symbols)).tobytes()
