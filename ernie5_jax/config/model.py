"""Configuration of the unified backbone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from ernie5_jax.config.base import require

Kind = Literal["dense", "moe", "codec"]


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Shared, modality-agnostic router (ERNIE 5.0 section 2.1; loss-free balancing, arXiv 2408.15664).

    Attributes:
      num_experts: E, routed experts of every MoE layer.
      top_k: Experts per token; also the largest traced top-k an elastic mask may ask for.
      scoring: How router logits become scores.
      norm_min: Lower clamp of the sum of selected scores before gates are renormalised.
      bias_update_speed: u of the loss-free bias rule, per optimiser step.
      z_loss_weight: Weight of mean(logsumexp(router_logits)^2); 0 switches it off.
    """

    num_experts: int = 32
    top_k: int = 4
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_min: float = 1e-12
    bias_update_speed: float = 1e-3
    z_loss_weight: float = 0.0

    def __post_init__(self):
        require(self.num_experts >= 1, "num_experts", self.num_experts, ">= 1")
        require(1 <= self.top_k <= self.num_experts, "top_k", self.top_k, f"1 ... num_experts = {self.num_experts}")
        require(self.bias_update_speed >= 0, "bias_update_speed", self.bias_update_speed, ">= 0")
        require(self.z_loss_weight >= 0, "z_loss_weight", self.z_loss_weight, ">= 0")


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """Consecutive layers that are alike: a stack of the backbone.

    Attributes:
      name: Of its parameters: the kind, and a number from the second stack of a kind on.
      kind: "dense", or "moe" / "codec", which have the same sparse layer.
      count: Layers.
      router: Of its sparse layers; None where they are dense.
    """

    name: str
    kind: Kind
    count: int
    router: RouterConfig | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model over text, image, video and audio.

    Layers run in the order dense, moe, codec. The number of codec layers is
    ceil(audio_levels / levels_per_codec_layer) (decisions section 5); the elastic mask
    runs over all of them in that order.

    Attributes:
      hidden_size: D.
      num_dense_layers, num_moe_layers: Layers of the first two stacks.
      levels_per_codec_layer: Codec levels read after each codec layer.
      num_heads, num_kv_heads, head_dim: N, K, H of attention.
      dense_width, expert_width, shared_expert_width: Inner widths of SwiGLU; shared_expert_width = 0 leaves it out.
      router: Of every MoE layer.
      sparse_stacks: (layers, experts, top_k) of consecutive sparse layers, codec layers last, where these differ
        between layers, as in an extracted submodel; `router` then holds the largest of both. Empty = all like `router`.
      rope_base, rope_pairing: Rotary positions: which channels turn together, and how fast.
      norm_eps: Of RMSNorm.
      init_scale: Standard deviation of initial weights.
      tied_text_head: Whether the text head is the token table.
      mtp_depth: Blocks of multi-token prediction.
      vocab_size: Of the text tokenizer.
      visual_bits, visual_scales, vision_feature_dim: C, number of scales and feature width of the visual tokenizer.
      audio_levels, audio_bins: Q and codes per level of the audio tokenizer; audio_levels = 0 leaves sound out.
      elastic: Whether layers run under `lax.cond` and top-k is traced; False builds the plain static program.
      remat: Whether each layer is computed again in the backward pass.
    """

    hidden_size: int = 128
    num_dense_layers: int = 0
    num_moe_layers: int = 7
    levels_per_codec_layer: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    dense_width: int = 384
    expert_width: int = 48
    shared_expert_width: int = 128
    router: RouterConfig = dataclasses.field(default_factory=RouterConfig)
    sparse_stacks: tuple[tuple[int, int, int], ...] = ()
    rope_base: float = 1_000_000.0
    rope_pairing: Literal["interleaved", "half"] = "interleaved"
    norm_eps: float = 1e-5
    init_scale: float = 0.02
    tied_text_head: bool = True
    mtp_depth: int = 1
    vocab_size: int = 768
    visual_bits: int = 12
    visual_scales: int = 3
    vision_feature_dim: int = 96
    audio_levels: int = 4
    audio_bins: int = 128
    elastic: bool = True
    remat: bool = False

    def __post_init__(self):
        for key in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "dense_width", "expert_width"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("num_dense_layers", "num_moe_layers", "shared_expert_width", "mtp_depth", "audio_levels"):
            require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0")
        for key in ("visual_bits", "visual_scales", "vision_feature_dim", "audio_bins", "vocab_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        require(self.levels_per_codec_layer >= 1, "levels_per_codec_layer", self.levels_per_codec_layer, ">= 1")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads = {self.num_heads}",
        )
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (rotary pairs)")
        require(self.num_layers >= 1, "num_moe_layers", self.num_moe_layers, "at least one layer in all")
        self._check_sparse_stacks()

    def _check_sparse_stacks(self) -> None:
        if not self.sparse_stacks:
            return
        stacks, router = self.sparse_stacks, self.router
        for count, experts, top_k in stacks:
            found = (count, experts, top_k)
            require(count >= 1 and 1 <= top_k <= experts, "sparse_stacks", found, "layers >= 1, 1 <= top_k <= experts")
        layers = sum(count for count, _, _ in stacks)
        require(layers == self.num_routed_layers, "sparse_stacks", layers, f"{self.num_routed_layers} layers in all")
        largest = tuple(max(stack[i] for stack in stacks) for i in (1, 2))
        allowed = f"the largest of sparse_stacks, {largest}"
        require((router.num_experts, router.top_k) == largest, "router", (router.num_experts, router.top_k), allowed)
        require(not self.elastic, "elastic", self.elastic, "False where sparse_stacks differ")

    @property
    def num_codec_layers(self) -> int:
        return -(-self.audio_levels // self.levels_per_codec_layer)

    @property
    def stacks(self) -> tuple[StackConfig, ...]:
        """Every homogeneous stack, in order, empty ones left out (decisions section 5)."""
        routers = self.layer_routers
        dense: list[tuple[Kind, RouterConfig | None]] = [("dense", None)] * self.num_dense_layers
        moe: list[tuple[Kind, RouterConfig | None]] = [("moe", router) for router in routers[: self.num_moe_layers]]
        codec: list[tuple[Kind, RouterConfig | None]] = [("codec", router) for router in routers[self.num_moe_layers :]]
        stacks: list[StackConfig] = []
        for (kind, router), layers in itertools.groupby(dense + moe + codec):
            number = sum(stack.kind == kind for stack in stacks)
            stacks.append(StackConfig(f"{kind}_{number}" if number else kind, kind, len(list(layers)), router))
        return tuple(stacks)

    @property
    def layer_routers(self) -> tuple[RouterConfig, ...]:
        """Of every routed layer, in order."""
        if not self.sparse_stacks:
            return (self.router,) * self.num_routed_layers
        return tuple(
            dataclasses.replace(self.router, num_experts=experts, top_k=top_k)
            for count, experts, top_k in self.sparse_stacks
            for _ in range(count)
        )

    @property
    def layer_experts(self) -> tuple[int, ...]:
        """Experts of every routed layer, in order."""
        return tuple(router.num_experts for router in self.layer_routers)

    @property
    def num_routed_layers(self) -> int:
        """L_routed, layers that have a router."""
        return self.num_moe_layers + self.num_codec_layers

    @property
    def num_layers(self) -> int:
        """L of the elastic mask: all main-stack layers, codec layers included, MTP blocks not."""
        return self.num_dense_layers + self.num_moe_layers + self.num_codec_layers
