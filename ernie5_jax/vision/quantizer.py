"""Binary spherical quantisation and its multi-scale residual form, with the losses that train them.

Sources: BSQ (Zhao et al. 2024); multi-scale residual use as in Infinity and VideoAR.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from ernie5_jax.vision.pyramid import ScalePyramid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizerOutput:
    """Result of `bsq` or `residual_bsq`.

    Attributes:
      quantized: Straight-through codes, same shape as the input.
      bits: int8, list per scale for `residual_bsq`.
      commit: []; `bsq`: mean squared distance between directions and codes, over all components. `residual_bsq`:
        squared distance between a latent and the sum of its codes, mean over cells.
      sample_entropy: [], nats per token, mean over tokens of the summed bit entropies (mean over scales).
      batch_entropy: [K], entropy of the mean probabilities of each scale, nats; C ln 2 when all bits are balanced.
    """

    quantized: jax.Array
    bits: jax.Array | list[jax.Array]
    commit: jax.Array
    sample_entropy: jax.Array
    batch_entropy: jax.Array

    def entropy_loss(self) -> jax.Array:
        """Sure bits per token, balanced bits over the batch: sample entropy - batch entropy."""
        return self.sample_entropy - self.batch_entropy.mean()


def bsq(z: jax.Array, temperature: float = 0.01) -> QuantizerOutput:
    """Projects z to the unit sphere and takes signs: q = sign(u) / sqrt(C), sign(0) = -1.

    Args:
      z: [..., C].
      temperature: Of the soft bit probabilities p(bit = 1) = sigmoid(4 u / (sqrt(C) temperature)).
    """
    width = z.shape[-1]
    u = z * lax.rsqrt(jnp.sum(z * z, -1, keepdims=True) + 1e-12)
    bits = z > 0
    q = jnp.where(bits, 1.0, -1.0).astype(z.dtype) / math.sqrt(width)
    sample, batch = _entropies(u, temperature)
    commit = jnp.mean((u - lax.stop_gradient(q)) ** 2)
    return QuantizerOutput(u + lax.stop_gradient(q - u), bits.astype(jnp.int8), commit, sample, batch[None])


def bit_probabilities(u: jax.Array, temperature: float) -> jax.Array:
    """Soft p(bit = 1) of unit vectors u [..., C]."""
    return jax.nn.sigmoid(4 / (math.sqrt(u.shape[-1]) * temperature) * u)


def _entropies(u: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    logits = (4 / (math.sqrt(u.shape[-1]) * temperature) * u).reshape(-1, u.shape[-1])
    p = jax.nn.sigmoid(logits)
    # H(p) from logits: finite gradients where p rounds to 0 or 1.
    sample = jnp.mean(jnp.sum(jax.nn.softplus(logits) - p * logits, -1))
    mean = jnp.clip(p.mean(0), 1e-6, 1 - 1e-6)
    return sample, -jnp.sum(mean * jnp.log(mean) + (1 - mean) * jnp.log1p(-mean))


def residual_bsq(latents: jax.Array, pyramid: ScalePyramid, temperature: float = 0.01) -> QuantizerOutput:
    """Quantises each frame scale by scale, every scale the residual of the ones before (see `pyramid`).

    The gradient passes straight through the whole sum (VAR), so that the magnitude of the latents is learnt as well
    as their direction.

    Args:
      latents: [..., h, w, C].
      pyramid: Its `quantize` gives the same bits.
      temperature: See `bsq`.
    """
    acc = jnp.zeros_like(latents)
    scales = []
    for k in range(len(pyramid.scales)):
        scales.append(bsq(pyramid.down(latents, k) - pyramid.down(acc, k), temperature))
        acc = pyramid.accumulate(acc, scales[-1].bits, k)
    return QuantizerOutput(
        quantized=latents + lax.stop_gradient(acc - latents),
        bits=[s.bits for s in scales],
        commit=jnp.mean((latents - lax.stop_gradient(acc)) ** 2) * latents.shape[-1],
        sample_entropy=jnp.stack([s.sample_entropy for s in scales]).mean(),
        batch_entropy=jnp.concatenate([s.batch_entropy for s in scales]),
    )
