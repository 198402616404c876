"""Attention under FlashMask column bounds."""

from ernie5_jax.kernels.attention.api import attention, cached_attention
from ernie5_jax.kernels.attention.blockwise import blockwise_attention
from ernie5_jax.kernels.attention.mask import attention_mask
from ernie5_jax.kernels.attention.reference import dense_attention

__all__ = ["attention", "attention_mask", "blockwise_attention", "cached_attention", "dense_attention"]
