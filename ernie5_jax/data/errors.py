"""Errors of files, manifests and prepared data."""

from ernie5_jax.errors import UserError


class DataError(UserError):
    """A file, manifest, document or prepared folder that cannot be used."""
