"""Generation: the same model, one group of tokens per forward, over a key-value cache."""

from ernie5_jax.generation.audio import AudioTrace, generate_audio
from ernie5_jax.generation.engine import Engine, GenerationError, Request, Result
from ernie5_jax.generation.loading import LoadedModel, load
from ernie5_jax.generation.sampling import SamplingParams, row_keys, sampling_params
from ernie5_jax.generation.stepping import Cursor, Weights, advance, prompt_batch
from ernie5_jax.generation.text import TextTrace, generate_text
from ernie5_jax.generation.visual import VisualTrace, bit_log_prob, generate_visual

__all__ = [
    "AudioTrace",
    "Cursor",
    "Engine",
    "GenerationError",
    "LoadedModel",
    "Request",
    "Result",
    "SamplingParams",
    "TextTrace",
    "VisualTrace",
    "Weights",
    "advance",
    "bit_log_prob",
    "generate_audio",
    "generate_text",
    "generate_visual",
    "load",
    "prompt_batch",
    "row_keys",
    "sampling_params",
]
