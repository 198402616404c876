"""ernie5_jax: unified multimodal sparse models in JAX.

    import ernie5_jax as e5

    model = e5.load("runs/quickstart")
    picture = model.generate(e5.Document((e5.Span("text", "understand", "a handwritten three"),)), to="image")[0].image

Shape letters used everywhere: B batch rows, S sequence positions, D model width, N query heads, K key-value heads,
H head width, E experts, F expert width, L layers, Q codec levels, C bits of a visual code, R rows of an elastic mask.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ernie5_jax import testing
    from ernie5_jax.generation import load
    from ernie5_jax.sequence import Document, Span

__all__ = ["Document", "Span", "load", "testing"]

# Imported on first use: `import ernie5_jax` alone stays light.
_HOMES = {"Document": "sequence", "Span": "sequence", "load": "generation"}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("ernie5_jax.testing")
    if name not in _HOMES:
        raise AttributeError(f"module 'ernie5_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ernie5_jax.{_HOMES[name]}"), name)
