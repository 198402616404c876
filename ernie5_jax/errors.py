"""The base of every error that is the user's to fix."""


class UserError(ValueError):
    """Bad input: a configuration value, file, manifest line or argument.

    The message is one line that names the culprit, what was found and what is allowed.
    Scripts print it without a traceback and exit with code 1 (`experiments.cli.run`).
    Every room derives its own class from this one, e.g. `ernie5_jax.config.ConfigError`.
    """
