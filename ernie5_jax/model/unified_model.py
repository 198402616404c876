"""The unified model: one forward for training, evaluation and generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.model.backbone import Backbone
from ernie5_jax.model.cache import KVCache
from ernie5_jax.model.codec_layers import ChooseCode, CodecHeads
from ernie5_jax.model.elastic_mask import ElasticMask, full_mask
from ernie5_jax.model.embedding import Embedding
from ernie5_jax.model.experts import RouterStats
from ernie5_jax.model.heads import BitHead, Readout, gather_slots
from ernie5_jax.model.mtp import MTPModule
from ernie5_jax.nn import AttentionContext, Linear, RMSNorm, uni_rope
from ernie5_jax.sequence.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """Logits at the target slots of a batch; None for kinds that the batch has no slots of.

    Attributes:
      hidden: [B, S, D] after the backbone, codec feedback included, before the final norm.
      text: Readout of hidden vectors [B, N, D]; `text_logits` [B, N, V].
      mtp: Readout of hidden vectors [B, depth, N, D]; `mtp_logits` [B, depth, N, V].
      visual_logits: [B, N, C], p(bit = 1) = sigmoid.
      audio_logits: [B, N, Q, bins + 1].
      audio_codes: int32 [B, N, Q], codes fed back.
      router: Statistics stacked over routed layers.
      cache: The extended cache, if one was given.
    """

    hidden: Any
    text: Readout | None
    mtp: Readout | None
    visual_logits: Any
    audio_logits: Any
    audio_codes: Any
    router: RouterStats
    cache: KVCache | None

    @property
    def text_logits(self) -> Any:
        return None if self.text is None else self.text.logits

    @property
    def mtp_logits(self) -> Any:
        return None if self.mtp is None else self.mtp.logits


class UnifiedModel(nnx.Module):
    """Text, image, video and audio in, the same out, by next-group-of-tokens prediction (ERNIE 5.0 section 2)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs)
        self.backbone = Backbone(config, rngs)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.bit_head = BitHead(config, rngs)
        if config.audio_levels:
            self.codec_heads = CodecHeads(config, rngs)
        if not config.tied_text_head:
            shape = (config.hidden_size, config.vocab_size)
            self.text_head = Linear(shape, ("embed", "vocab"), config.init_scale, rngs)
        self.mtp = nnx.List([MTPModule(config, rngs) for _ in range(config.mtp_depth)])

    def __call__(
        self,
        batch: Batch,
        router_bias: jax.Array,
        mask: ElasticMask | None = None,
        *,
        cache: KVCache | None = None,
        rows: jax.Array | None = None,
        choose_code: ChooseCode | None = None,
        routing_override: jax.Array | None = None,
        return_routing: bool = False,
        inputs_embeds: jax.Array | None = None,
    ) -> ModelOutput:
        """Runs the model over rows of packed documents, or over the next positions of cached sequences.

        Args:
          batch: Positions to run; slot indices are local to them.
          router_bias: float32 [L_routed, E].
          mask: Submodel; None is the full model.
          cache: Keys and values seen so far; the new positions are appended to it.
          rows: int32 [B, S], row index of each position in its sequence; needed with a cache (>= its capacity: the
            position is padding). Without a cache rows are 0 ... S - 1.
          choose_code: Codes to feed back between codec levels; None takes the targets (teacher forcing).
          routing_override: int32 [L_routed, B, S, k], expert choices to replay.
          return_routing: Whether `router.expert_index` is filled.
          inputs_embeds: [B, S, D] instead of embedding the batch.

        Returns:
          The `ModelOutput`.
        """
        if mask is None and self.config.elastic:
            mask = full_mask(self.config)
        hidden = self.embedding(batch) if inputs_embeds is None else inputs_embeds
        context, cache = self._context(batch, cache, rows, hidden.dtype)
        codec = _CodecReader(self, batch, choose_code)
        hidden, stats, caches = self.backbone(
            hidden,
            context,
            router_bias=router_bias,
            mask=mask if self.config.elastic else None,
            override=routing_override,
            caches=None if cache is None else list(zip(cache.keys, cache.values, strict=True)),
            after_codec_layer=codec if codec.slots is not None else None,
            return_index=return_routing,
        )
        if cache is not None and caches is not None:
            keys, values = zip(*caches, strict=True)
            cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        text, visual = batch.targets.get("text"), batch.targets.get("visual")
        return ModelOutput(
            hidden=hidden,
            text=None if text is None else self._readout(self.final_norm(gather_slots(hidden, text.index))),
            mtp=self._mtp(hidden, batch, context),
            visual_logits=None if visual is None else self.bit_head(gather_slots(hidden, visual.index)),
            audio_logits=codec.stacked("logits"),
            audio_codes=codec.stacked("codes"),
            router=stats,
            cache=cache,
        )

    def _readout(self, normed: jax.Array) -> Readout:
        """[..., D] after a norm, with the text head."""
        kernel = self.embedding.text[...].T if self.config.tied_text_head else self.text_head.kernel[...]
        return Readout(normed, kernel.astype(normed.dtype))

    def _context(self, batch: Batch, cache: KVCache | None, rows: jax.Array | None, dtype):
        size, length = batch.segment.shape
        if rows is None:
            rows = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (size, length))
        cos, sin = uni_rope(batch.position, self.config.head_dim, self.config.rope_base, dtype)
        k_rows, k_segment, bounds = rows, batch.segment, batch.bounds
        if cache is not None:
            at = (jnp.arange(size)[:, None], rows)
            bounds = cache.bounds.at[at].set(batch.bounds, mode="drop")
            k_segment = cache.segment.at[at].set(batch.segment, mode="drop")
            k_rows = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32), k_segment.shape)
            cache = dataclasses.replace(cache, bounds=bounds, segment=k_segment)
        return AttentionContext(cos, sin, rows, batch.segment, k_rows, k_segment, bounds), cache

    def _mtp(self, hidden: jax.Array, batch: Batch, context: AttentionContext) -> Readout | None:
        slots = batch.targets.get("mtp")
        if slots is None or not self.config.mtp_depth:
            return None
        found = []
        for d, module in enumerate(self.mtp):
            hidden, normed = module(hidden, batch.mtp_token[:, d], self.embedding, context)
            found.append(gather_slots(normed, slots.index[:, d]))
        return self._readout(jnp.stack(found, axis=1))


class _CodecReader:
    """Reads the codec heads after each codec layer and keeps their logits."""

    def __init__(self, model: UnifiedModel, batch: Batch, choose: ChooseCode | None):
        self.model, self.slots = model, batch.targets.get("audio")
        self.choose = choose or self._teacher
        self.parts: dict[str, list[jax.Array]] = {"logits": [], "codes": []}

    def _teacher(self, level: int, _: jax.Array) -> jax.Array:
        assert self.slots is not None
        return self.slots.values["codes"][..., level]

    def __call__(self, layer: int, hidden: jax.Array) -> jax.Array:
        assert self.slots is not None, "nothing to read without audio targets"
        hidden, logits, codes = self.model.codec_heads(
            layer, hidden, self.slots.index, self.model.embedding, self.choose
        )
        self.parts["logits"].append(logits)
        self.parts["codes"].append(codes)
        return hidden

    def stacked(self, name: str) -> jax.Array | None:
        """All levels on axis 2."""
        return jnp.concatenate(self.parts[name], axis=2) if self.parts[name] else None
