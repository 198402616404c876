"""Training of the byte-pair vocabulary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers

from ernie5_jax.config import TextTokenizerConfig
from ernie5_jax.config.base import require
from ernie5_jax.text import pretokenize
from ernie5_jax.text.bpe import FIRST_MERGE, BpeTokenizer, TextTokenizerError
from ernie5_jax.text.merging import Rules, merge
from ernie5_jax.text.special_tokens import NUM_SPECIAL_TOKENS

MAX_UNSPACED_CJK = 4
"""Longer runs of Han or kana are phrases, which a reader could cut into words; they get no token (section 3.1)."""

_MIN_FREQUENCY = 2
_SURROGATES = 0xD800
_STAND_IN = 0xF0000  # plane 15 stands for surrogates, which the library refuses; its own characters are two units each
_BATCH = 4096


def train_bpe(texts: Iterable[str], config: TextTokenizerConfig) -> BpeTokenizer:
    """Learns merges from `texts`; a pure function of the texts (in any order) and `config`.

    The library trains on whole code units. Tokens for single units (merges of two bytes) then enter the same
    ranking by frequency, which gives exactly the merges of BPE on bytes in which units are made first.

    Args:
      texts: Any strings, read once.
      config: Size of the vocabulary.

    Raises:
      ConfigError: No room for special tokens and bytes.
      TextTokenizerError: No text at all.
    """
    room = config.vocab_size - FIRST_MERGE
    require(room >= 0, "text.vocab_size", config.vocab_size, f">= {FIRST_MERGE} (special tokens and bytes)")
    words: Counter[str] = Counter()
    for text in texts:
        words.update(map(_as_characters, pretokenize.split_words(pretokenize.escape(text))))
    if not words:
        raise TextTokenizerError("training texts: found no characters, allowed: at least one text that is not empty")
    units: Counter[str] = Counter()
    for word, count in words.items():
        for unit in word:
            units[unit] += count

    wanted = room
    while True:
        pairs = _library_merges(words, len(units) + wanted)
        selected = _select(words, units, pairs, room)
        if len(selected[1]) == room or len(pairs) < wanted:
            return BpeTokenizer(selected[0], config)
        wanted *= 2  # the filter took some


def _library_merges(words: Counter[str], size: int) -> list[tuple[str, str]]:
    """Merges on code units in the order learnt."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, min_frequency=_MIN_FREQUENCY, show_progress=False)
    model.train_from_iterator(_batches(words), trainer)
    return [(left, right) for left, right in json.loads(model.to_str())["model"]["merges"]]


def _batches(words: Counter[str]) -> Iterator[list[str]]:
    for word in sorted(words):
        left = words[word]
        while left > 0:
            yield [word] * min(left, _BATCH)
            left -= _BATCH


def _select(
    words: Counter[str], units: Counter[str], pairs: list[tuple[str, str]], room: int
) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """The most frequent units and merges: merges as pairs of ids, and the ids of the new tokens."""
    names = sorted(units)
    ranking = [(-units[name], 0, i) for i, name in enumerate(names) if units[name] >= _MIN_FREQUENCY]
    key = dict(units)
    for i, count in enumerate(_merge_counts(words, units, pairs)):
        # A token never ranks before its two sides.
        left, right = pairs[i]
        count = min(count, key[left], key[right])
        key.setdefault(left + right, count)
        ranking.append((-count, 1, i))

    merges: list[tuple[int, int]] = []
    ids: dict[str, int] = {}
    for _, is_pair, i in sorted(ranking):
        token = "".join(pairs[i]) if is_pair else names[i]
        if pretokenize.longest_cjk_run(token) > MAX_UNSPACED_CJK:
            continue
        if token not in ids and len(ids) == room:
            break
        ids.setdefault(token, FIRST_MERGE + len(ids))
        if is_pair:
            left, right = pairs[i]
            merges.append((ids[left], ids[right]))
        else:
            first, second = divmod(_as_unit(token), 256)
            merges.append((NUM_SPECIAL_TOKENS + first, NUM_SPECIAL_TOKENS + second))
    return merges, ids


def _merge_counts(words: Counter[str], units: Counter[str], pairs: list[tuple[str, str]]) -> list[int]:
    """How often each merge is applied in the training text."""
    ids = {name: i for i, name in enumerate(sorted(units))}
    rules: Rules = {}
    for rank, (left, right) in enumerate(pairs):
        token = ids.setdefault(left + right, len(ids))
        rules[ids[left], ids[right]] = (rank, token)
    counts = [0] * len(pairs)
    for word, weight in words.items():

        def accept(rank: int, weight: int = weight) -> bool:
            counts[rank] += weight
            return True

        merge([ids[unit] for unit in word], rules, accept)
    return counts


def _as_characters(word: str) -> str:
    """One character per code unit, none a surrogate."""
    if all(map(_is_plain, word)):
        return word
    units = pretokenize.code_units(word).tolist()
    return "".join(chr(u) if _is_plain(chr(u)) else chr(u - _SURROGATES + _STAND_IN) for u in units)


def _is_plain(character: str) -> bool:
    return character < "\ud800" or "\udfff" < character < "\U00010000"


def _as_unit(character: str) -> int:
    code = ord(character)
    return code if code < _STAND_IN else code - _STAND_IN + _SURROGATES
