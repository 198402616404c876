"""Prompts out of documents: everything before the last span is the prompt, the last span is what to make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from ernie5_jax.config import GenerationConfig
from ernie5_jax.generation.engine import Request
from ernie5_jax.sequence.types import Document


class Generator(Protocol):
    """What the suites need of `generation.Engine`."""

    @property
    def config(self) -> GenerationConfig: ...

    def generate(self, requests: Sequence[Request], *, seed: int, config: GenerationConfig | None = None) -> list[Any]:
        """Results in the order of the requests, with `.text`, `.image`, `.video` or `.audio` set."""
        ...


def prompt_of(document: Document) -> Document:
    """The document without its last span."""
    return Document(document.spans[:-1], document.meta)


def make(
    engine: Generator,
    documents: Sequence[Document],
    to: Literal["text", "image", "video", "audio"],
    *,
    seed: int,
    stream: int = 0,
    whole: bool = False,
    config: GenerationConfig | None = None,
) -> list[Any]:
    """One draw of modality `to` per document.

    Args:
      engine: The generator.
      documents: Whole documents (the last span is left out of the prompt), or prompts where `whole`.
      to: "text", "image", "video" or "audio".
      seed: Of the evaluation; `stream` tells its tasks apart, so that no two share a draw.
      config: Generation settings instead of the engine's own.
    """
    requests = [Request(document if whole else prompt_of(document), to) for document in documents]
    results = engine.generate(requests, seed=1000 * seed + stream, config=config)
    return [getattr(result, to) for result in results]


def ask(engine: Generator, documents: Sequence[Document], *, seed: int, stream: int = 0) -> list[str]:
    """What the model writes, most likely token by token, in place of each document's last (text) span."""
    greedy = dataclasses.replace(engine.config, temperature=0.0)
    return make(engine, documents, "text", seed=seed, stream=stream, config=greedy)
