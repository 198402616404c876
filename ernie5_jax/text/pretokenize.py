"""From text to words to UTF-16 code units, before any byte is looked at.

Words are cut at the level of characters, by classes that are written out here: they do not depend on the
Unicode tables of the Python version, so a vocabulary encodes alike everywhere. No merge crosses a word.
"""

from __future__ import annotations

import re

import numpy as np

_SPACE = "\\t-\\r \\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
_DIGIT = "0-9"
_PUNCTUATION = (
    "\\x00-\\x08\\x0e-\\x1b!-/:-@\\[-`{-\\x84\\x86-\\x9f\\xa1-\\xa9\\xab-\\xb4\\xb6-\\xb9\\xbb-\\xbf\\xd7\\xf7"
    "\\u200b\\u200e-\\u2027\\u202a-\\u202e\\u2030-\\u205e\\u2060-\\u2bff\\u3001-\\u3004\\u3008-\\u3020\\u3030-\\u303f"
    "\\ufe10-\\ufe1f\\ufe30-\\ufe6f\\uff01-\\uff20\\uff3b-\\uff40\\uff5b-\\uff65\\ufff0-\\uffff"
)
_CJK = "\\u3005-\\u3007\\u3040-\\u30ff\\u31f0-\\u31ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff"
_ALONE = "\\ud800-\\udfff\\U00010000-\\U0010ffff"
_LETTER = f"[^{_SPACE}{_DIGIT}{_PUNCTUATION}{_CJK}{_ALONE}]"

_WORD = re.compile(
    f"[ '\\u2019]?{_LETTER}+"  # a word with its leading space; 's, 't
    f"| ?[{_CJK}]+"  # scripts written without spaces: runs, see `longest_cjk_run`
    f"|[{_DIGIT}]"  # digits one by one
    f"| ?[{_PUNCTUATION}]+"
    f"|[{_ALONE}]"  # characters of two code units one by one: no token holds half of one and something else
    f"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]"  # the last space of a run goes with the word that follows
)
_CJK_RUN = re.compile(f"[{_CJK}]+")

_MARK = "\ufffe"
_ESCAPE = re.compile(f"{_MARK}|(?<=[\ud800-\udbff])(?=[\udc00-\udfff])")
_UNESCAPE = re.compile(f"{_MARK}({_MARK}?)")


def escape(text: str) -> str:
    """Makes UTF-16 faithful for every Python string.

    Two lone surrogates in the order high, low would come back as one character: the noncharacter U+FFFE is put
    between them, and a U+FFFE of the text itself is doubled. All other text is unchanged.
    """
    return text if text.isascii() else _ESCAPE.sub(lambda match: _MARK + match.group(), text)


def unescape(text: str) -> str:
    """Inverse of `escape`."""
    return _UNESCAPE.sub(r"\1", text) if _MARK in text else text


def split_words(text: str) -> list[str]:
    """Cuts (escaped) text into words; joined they are the text again."""
    return _WORD.findall(text)


def code_units(word: str) -> np.ndarray:
    """uint16 [n] UTF-16 code units of `word`, lone surrogates included."""
    return np.frombuffer(word.encode("utf-16-le", "surrogatepass"), np.dtype("<u2"))


def longest_cjk_run(text: str) -> int:
    """Length of the longest run of characters (Han, kana) of scripts that are written without spaces."""
    return max(map(len, _CJK_RUN.findall(text)), default=0)


def num_utf8_bytes(text: str) -> int:
    """UTF-8 bytes of `text`, the denominator of bits per byte; a lone surrogate counts 3."""
    return len(text.encode("utf-8", "surrogatepass"))
