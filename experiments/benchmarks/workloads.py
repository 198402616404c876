"""Shapes that this library and the peer are measured on, and what they cost at least."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """A text model with one shared and several routed experts in every layer.

    Attributes:
      expert_width: Inner width of a routed expert and of the shared one.
      length, batch: Of a training step.
      prompt, new_tokens: Of decoding.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    length: int
    batch: int
    prompt: int
    new_tokens: int

    @property
    def active_matmul_parameters(self) -> int:
        """Parameters that one token is multiplied with, embeddings left out."""
        d, h = self.hidden_size, self.head_dim
        attention = 2 * d * self.heads * h + 2 * d * self.kv_heads * h
        moe = (self.top_k + 1) * 3 * d * self.expert_width + d * self.experts
        return self.layers * (attention + moe) + d * self.vocab_size

    def forward_flops(self, length: int) -> float:
        """Of one token in a causal sequence of `length`, attention counted at half."""
        return 2 * self.active_matmul_parameters + self.layers * 2 * length * self.heads * self.head_dim

    @property
    def train_flops(self) -> float:
        """Of one training step."""
        return 3 * self.batch * self.length * self.forward_flops(self.length)


SHAPES = {
    "moe_smoke": MoeShape(8192, 256, 2, 8, 4, 32, 64, 2, 128, length=512, batch=2, prompt=128, new_tokens=16),
    "moe_small": MoeShape(8192, 256, 8, 8, 4, 32, 64, 2, 128, length=512, batch=8, prompt=128, new_tokens=128),
    "moe_medium": MoeShape(16384, 512, 6, 8, 4, 64, 128, 4, 256, length=512, batch=4, prompt=128, new_tokens=64),
}
ROPE_BASE = 10_000.0
LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.01


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """B = 1, causal; `documents` of equal length where packed."""

    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    length: int = 8192
    documents: int = 8


ATTENTION = AttentionShape()
