"""Prose that comes with Python: the language reference in `pydoc_data.topics`."""

from __future__ import annotations

HELD_OUT_EVERY = 8
"""Every eighth topic (in alphabetical order) is held out."""


def topics(split: str) -> list[tuple[str, str]]:
    """(name, text) of the topics of a split.

    Sections of the reference appear in several topics. A paragraph that occurs in a held-out topic is left out of the
    training text, and none is kept twice.
    """
    from pydoc_data.topics import topics as texts

    names = sorted(texts)
    held_out = names[::HELD_OUT_EVERY]
    seen: set[str] = set()
    test = [(name, _new_paragraphs(texts[name], seen)) for name in held_out]
    train = [(name, _new_paragraphs(texts[name], seen)) for name in names if name not in set(held_out)]
    return [(name, text) for name, text in (test if split == "test" else train) if text]


def _new_paragraphs(text: str, seen: set[str]) -> str:
    kept = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)
