"""Errors of the vision room."""

from ernie5_jax.errors import UserError


class VisionError(UserError):
    """A picture, video, latent grid or tokenizer folder that does not fit."""
