"""Errors of the audio room."""

from ernie5_jax.errors import UserError


class AudioError(UserError):
    """A waveform, codec frame or tokenizer folder that does not fit."""
