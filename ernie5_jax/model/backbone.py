"""The list of homogeneous stacks (decisions section 5), each scanned over stacked parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig
from ernie5_jax.model.elastic_mask import ElasticMask
from ernie5_jax.model.experts import RouterStats, RoutingControl, zero_stats
from ernie5_jax.model.layer import DecoderLayer
from ernie5_jax.nn import AttentionContext, select_module, stack_modules

AfterCodecLayer = Callable[[int, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """What the layers of one stack read besides hidden states; leading axis [count] on every array.

    Attributes:
      bias: [count, E] or None for dense stacks.
      live: bool [count, R], experts: bool [count, R, E], top_k: int32 [count, R]; None when not elastic.
      override: int32 [count, B, S, k] or None.
      cache: keys and values [count, B, M, K, H] or None.
    """

    bias: Any = None
    live: Any = None
    experts: Any = None
    top_k: Any = None
    override: Any = None
    cache: Any = None


class Backbone(nnx.Module):
    """Dense, sparse and codec layers in order. It never learns which modality a token has."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        for kind, count in config.stacks:
            setattr(self, kind, stack_modules(lambda r, kind=kind: DecoderLayer(config, kind, r), count, rngs))

    def __call__(
        self,
        hidden: jax.Array,
        context: AttentionContext,
        *,
        router_bias: jax.Array,
        mask: ElasticMask | None,
        override: jax.Array | None = None,
        caches: list[tuple[jax.Array, jax.Array]] | None = None,
        after_codec_layer: AfterCodecLayer,
        return_index: bool = False,
    ) -> tuple[jax.Array, RouterStats, list[tuple[jax.Array, jax.Array]] | None]:
        """Runs all layers.

        Args:
          hidden: [B, S, D].
          router_bias: [L_routed, E], sparse and codec layers in order.
          mask: Submodel; None runs the static program.
          override: int32 [L_routed, B, S, k] choices to replay.
          caches: (keys, values) per stack.
          after_codec_layer: (codec layer number, hidden) -> hidden with feedback.

        Returns:
          hidden, `RouterStats` stacked over routed layers, caches.
        """
        stats, new_caches, layer, routed = [], [], 0, 0
        for number, (kind, count) in enumerate(self.config.stacks):
            inputs = LayerInputs(cache=None if caches is None else caches[number])
            if mask is not None:
                part = slice(layer, layer + count)
                inputs = dataclasses.replace(
                    inputs,
                    live=mask.layers[:, part].T,
                    experts=jnp.moveaxis(mask.experts[:, part], 0, 1),
                    top_k=mask.top_k[:, part].T,
                )
            if kind != "dense":
                part = slice(routed, routed + count)
                inputs = dataclasses.replace(
                    inputs, bias=router_bias[part], override=None if override is None else override[part]
                )
                routed += count
            runner = self._unrolled if kind == "codec" else self._scanned
            hidden, stack_stats, cache = runner(kind, hidden, context, inputs, after_codec_layer, return_index)
            if kind != "dense":
                stats.append(stack_stats)
            new_caches.append(cache)
            layer += count
        merged = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats)
        return hidden, merged, None if caches is None else new_caches

    def _scanned(self, kind, hidden, context, inputs: LayerInputs, _, return_index):
        graph, state = nnx.split(getattr(self, kind))

        def step(hidden, xs):
            layer_state, layer_inputs = xs
            layer = nnx.merge(graph, layer_state)
            hidden, stats, cache = self._layer(kind, layer, hidden, context, layer_inputs, return_index)
            return hidden, (stats, cache)

        hidden, (stats, cache) = jax.lax.scan(step, hidden, (state, inputs))
        return hidden, stats, cache

    def _unrolled(self, kind, hidden, context, inputs: LayerInputs, after_codec_layer, return_index):
        count = dict(self.config.stacks)[kind]
        outputs = []
        for i in range(count):
            layer = select_module(getattr(self, kind), i)
            layer_inputs = jax.tree.map(lambda a, i=i: a[i], inputs)
            # Codec layers are never dropped: their heads must read every level.
            layer_inputs = dataclasses.replace(layer_inputs, live=None)
            hidden, stats, cache = self._layer(kind, layer, hidden, context, layer_inputs, return_index)
            hidden = after_codec_layer(i, hidden)
            outputs.append((stats, cache))
        stats, cache = jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)
        return hidden, stats, cache

    def _layer(self, kind, layer, hidden, context: AttentionContext, inputs: LayerInputs, return_index):
        """One layer, under `lax.cond` when the mask may skip it."""
        active = context.q_segment != 0
        if inputs.live is not None:
            active &= inputs.live[:, None]
        control = None
        if kind != "dense":
            control = RoutingControl(inputs.bias, active, inputs.experts, inputs.top_k, inputs.override)

        def run(hidden, cache):
            return layer(hidden, context, control, cache, return_index=return_index)

        if self.config.remat:
            # Inside the cond, so that a skipped layer is not recomputed either.
            run = jax.checkpoint(run)
        if inputs.live is None:
            return run(hidden, inputs.cache)

        def skip(hidden, cache):
            stats = None
            if control is not None:
                shape = (*hidden.shape[:2], self.config.router.top_k)
                index = jnp.zeros(shape, jnp.int32) if return_index else None
                stats = zero_stats(self.config.router.num_experts, index, hidden.dtype)
            return hidden, stats, cache

        new_hidden, stats, cache = jax.lax.cond(inputs.live.any(), run, skip, hidden, inputs.cache)
        if inputs.live.shape[0] > 1:
            new_hidden = jnp.where(inputs.live[:, None, None], new_hidden, hidden)
        return new_hidden, stats, cache
