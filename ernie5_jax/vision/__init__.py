"""Pictures and videos: causal tokenizer, multi-scale bitwise quantiser, scale pyramid.

The tokenizer's parts that need Flax are imported on first use: data workers only want the pyramid.
"""

from typing import TYPE_CHECKING, Any

from ernie5_jax.vision.errors import VisionError
from ernie5_jax.vision.protocol import VisualTokenizer
from ernie5_jax.vision.pyramid import ScalePyramid, TeacherForcing

if TYPE_CHECKING:
    from ernie5_jax.vision.tokenizer import CausalVisualTokenizer, load_visual_tokenizer, make_pyramid
    from ernie5_jax.vision.training import train_visual_tokenizer

_LAZY = {
    "CausalVisualTokenizer": "tokenizer",
    "load_visual_tokenizer": "tokenizer",
    "make_pyramid": "tokenizer",
    "train_visual_tokenizer": "training",
}

__all__ = [
    "CausalVisualTokenizer",
    "ScalePyramid",
    "TeacherForcing",
    "VisionError",
    "VisualTokenizer",
    "load_visual_tokenizer",
    "make_pyramid",
    "train_visual_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
