"""Mixture-of-experts feed-forward kernels."""

from ernie5_jax.kernels.grouped_matmul.api import moe_ffn, stacked_moe_ffn
from ernie5_jax.kernels.grouped_matmul.reference import dense_moe, swiglu

__all__ = ["dense_moe", "moe_ffn", "stacked_moe_ffn", "swiglu"]
