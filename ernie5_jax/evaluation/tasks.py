"""Prompts out of documents: everything before the last span is the prompt, the last span is what to make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ernie5_jax.sequence.types import Document


class Generator(Protocol):
    """What the suites need of `generation.Engine`."""

    def generate(self, requests: Sequence[Any], seed: int) -> list[Any]:
        """Results in the order of the requests, with `.text`, `.image`, `.video` or `.audio` set."""
        ...


def prompt_of(document: Document) -> Document:
    """The document without its last span."""
    return Document(document.spans[:-1], document.meta)


def make(
    engine: Generator,
    documents: Sequence[Document],
    to: str,
    *,
    seed: int,
    stream: int = 0,
    whole: bool = False,
    options: dict[str, Any] | None = None,
) -> list[Any]:
    """One draw of modality `to` per document.

    Args:
      engine: The generator.
      documents: Whole documents (the last span is left out of the prompt), or prompts where `whole`.
      to: "text", "image", "video" or "audio".
      seed: Of the evaluation; `stream` tells its tasks apart, so that no two share a draw.
      options: Overrides of the generation settings.
    """
    from ernie5_jax.generation import Request

    prompts = [document if whole else prompt_of(document) for document in documents]
    requests = [Request(prompt, to, dict(options or {})) for prompt in prompts]
    return [getattr(result, to) for result in engine.generate(requests, seed=1000 * seed + stream)]


def ask(engine: Generator, documents: Sequence[Document], *, seed: int, stream: int = 0) -> list[str]:
    """What the model writes, most likely token by token, in place of each document's last (text) span."""
    return make(engine, documents, "text", seed=seed, stream=stream, options={"temperature": 0.0})
