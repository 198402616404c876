"""Encoder and decoder of the codec: residual convolutions over code frames.

Frames past the end of a clip are zeroed before every convolution, exactly as the zero padding at the end of the
clip alone, so a clip in a batch and the clip alone give the same values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import AudioTokenizerConfig
from ernie5_jax.nn import Linear, RMSNorm, constant, select_module, stack_modules


class FrameConv(nnx.Module):
    """Convolution over frames with zero padding: [B, T, I] -> [B, T, O]."""

    def __init__(self, width: int, out: int, kernel_size: int, rngs: nnx.Rngs):
        scale = (kernel_size * width) ** -0.5
        self.linear = Linear((kernel_size * width, out), ("conv_in", "conv_out"), scale, rngs)
        self.kernel_size = kernel_size

    def __call__(self, x: jax.Array) -> jax.Array:
        half, count = self.kernel_size // 2, x.shape[1]
        padded = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
        return self.linear(jnp.concatenate([padded[:, i : i + count] for i in range(self.kernel_size)], axis=-1))


class ResidualBlock(nnx.Module):
    """x + W(gelu(conv(norm(x))))."""

    def __init__(self, config: AudioTokenizerConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.norm = RMSNorm(width, config.norm_eps)
        self.conv = FrameConv(width, 2 * width, config.kernel_size, rngs)
        self.out = Linear((2 * width, width), ("conv_in", "conv_out"), 0.5 * (2 * width) ** -0.5, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return x + self.out(jax.nn.gelu(self.conv(self.norm(x) * mask)))


class _Stack(nnx.Module):
    """Linear, residual blocks, norm, linear with bias."""

    def __init__(self, width_in: int, width_out: int, config: AudioTokenizerConfig, rngs: nnx.Rngs):
        hidden = config.hidden_size
        self.inputs = Linear((width_in, hidden), ("conv_in", "conv_out"), width_in**-0.5, rngs)
        self.blocks = stack_modules(lambda keys: ResidualBlock(config, keys), config.num_blocks, rngs)
        self.num_blocks = config.num_blocks
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.outputs = Linear((hidden, width_out), ("conv_in", "conv_out"), hidden**-0.5, rngs)
        self.bias = constant((width_out,), ("conv_out",), 0.0)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        mask = mask[..., None].astype(x.dtype)
        x = self.inputs(x)
        for i in range(self.num_blocks):
            x = select_module(self.blocks, i)(x, mask)
        return self.outputs(self.norm(x)) + self.bias[...]


class Codec(nnx.Module):
    """Normalised spectral features <-> latents; the quantiser stands between (see `rvq`)."""

    def __init__(self, config: AudioTokenizerConfig, rngs: nnx.Rngs):
        width = config.fold * config.spectral_bins
        self.encoder = _Stack(width, config.latent_dim, config, rngs)
        self.decoder = _Stack(config.latent_dim, width, config, rngs)

    def encode(self, features: jax.Array, mask: jax.Array) -> jax.Array:
        """[B, T * fold, bins], bool [B, T] -> latents [B, T, latent_dim]."""
        return self.encoder(features.reshape(*mask.shape, -1), mask)

    def decode(self, latents: jax.Array, mask: jax.Array) -> jax.Array:
        """[B, T, latent_dim], bool [B, T] -> [B, T, fold * bins]."""
        return self.decoder(latents, mask)
