"""Errors of documents that cannot become a row."""

from ernie5_jax.errors import UserError


class SequenceError(UserError):
    """A document or span that breaks a rule of the layout or does not fit a row."""
