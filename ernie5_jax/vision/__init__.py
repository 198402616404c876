"""Pictures and videos: causal tokenizer, multi-scale bitwise quantiser, scale pyramid."""

from ernie5_jax.vision.errors import VisionError
from ernie5_jax.vision.protocol import VisualTokenizer
from ernie5_jax.vision.pyramid import ScalePyramid, TeacherForcing

__all__ = ["ScalePyramid", "TeacherForcing", "VisionError", "VisualTokenizer"]
