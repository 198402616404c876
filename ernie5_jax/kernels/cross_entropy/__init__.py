"""Cross-entropy of a linear readout, without all of its logits in memory."""

from ernie5_jax.kernels.cross_entropy.chunked import linear_cross_entropy
from ernie5_jax.kernels.cross_entropy.reference import cross_entropy, dense_cross_entropy

__all__ = ["cross_entropy", "dense_cross_entropy", "linear_cross_entropy"]
