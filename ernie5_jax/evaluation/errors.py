"""Errors of the evaluation room."""

from ernie5_jax.errors import UserError


class EvaluationError(UserError):
    """Data, suite or results that cannot be evaluated; names the culprit and what is allowed."""
