"""Attention under FlashMask column bounds."""

from ernie5_jax.kernels.attention.api import attention
from ernie5_jax.kernels.attention.mask import attention_mask
from ernie5_jax.kernels.attention.reference import dense_attention

__all__ = ["attention", "attention_mask", "dense_attention"]
