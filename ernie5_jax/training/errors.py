"""Errors of this room that are the user's to fix."""

from ernie5_jax.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read, or continued with this configuration."""


class TrainingError(UserError):
    """A run that cannot start or go on."""
