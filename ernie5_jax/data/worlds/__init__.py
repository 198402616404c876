"""Built-in worlds: small data sets that need no download."""

from ernie5_jax.data.worlds.registry import WORLDS, world_sources

__all__ = ["WORLDS", "world_sources"]
