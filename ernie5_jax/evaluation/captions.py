"""Reading digits and directions out of captions."""

from __future__ import annotations

import re

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Lower-case words of `text`, punctuation dropped."""
    return _WORD.findall(text.lower())


def digit_in(text: str) -> int | None:
    """The digit a caption names, as word or figure; None when it names none or more than one kind."""
    found = set()
    for word in words(text):
        if word in DIGIT_WORDS:
            found.add(DIGIT_WORDS.index(word))
        elif len(word) == 1 and word in "0123456789":
            found.add(int(word))
    return found.pop() if len(found) == 1 else None


def same_words(text: str, reference: str) -> bool:
    """Whether two captions agree word for word; case, punctuation and spaces do not count."""
    return words(text) == words(reference)
