"""The list of homogeneous stacks (decisions section 5), each scanned over stacked parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ernie5_jax.config import ModelConfig, StackConfig
from ernie5_jax.model.elastic_mask import ElasticMask
from ernie5_jax.model.experts import RouterStats, RoutingControl, pad_stats, zero_stats
from ernie5_jax.model.layer import DecoderLayer
from ernie5_jax.model.skipping import run_if
from ernie5_jax.nn import AttentionContext, LayerCache, stack_modules
from ernie5_jax.parallel import on_any_device

AfterCodecLayer = Callable[[int, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """What the layers of one stack read besides hidden states; leading axis [count] on every array.

    Attributes:
      number: int32 [count], 0, 1, ...
      bias: [count, E] or None for dense stacks.
      live: bool [count, R], experts: bool [count, R, E], top_k: int32 [count, R]; None when not elastic.
      override: int32 [count, B, S, k] or None.
    """

    number: Any
    bias: Any = None
    live: Any = None
    experts: Any = None
    top_k: Any = None
    override: Any = None


class Backbone(nnx.Module):
    """Dense, sparse and codec layers in order. It never learns which modality a token has."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        for stack in config.stacks:
            layers = stack_modules(lambda r, stack=stack: DecoderLayer(config, stack.router, r), stack.count, rngs)
            setattr(self, stack.name, layers)

    def __call__(
        self,
        hidden: jax.Array,
        context: AttentionContext,
        *,
        router_bias: jax.Array,
        mask: ElasticMask | None,
        override: jax.Array | None = None,
        caches: list[tuple[jax.Array, jax.Array]] | None = None,
        after_codec_layer: AfterCodecLayer | None,
        return_index: bool = False,
    ) -> tuple[jax.Array, RouterStats, list[tuple[jax.Array, jax.Array]] | None]:
        """Runs all layers.

        Args:
          hidden: [B, S, D].
          router_bias: [L_routed, E], sparse and codec layers in order.
          mask: Submodel; None runs the static program.
          override: int32 [L_routed, B, S, k] choices to replay; E marks a rank that is not used.
          caches: (keys, values) per stack.
          after_codec_layer: (codec layer number, hidden) -> hidden with feedback; None where there is no sound to make.

        Returns:
          hidden, `RouterStats` stacked over routed layers, caches.
        """
        stats, new_caches, layer, routed = [], [], 0, 0
        first_codec = self.config.num_layers - self.config.num_codec_layers
        for number, stack in enumerate(self.config.stacks):
            cache = None if caches is None else caches[number]
            inputs = LayerInputs(jnp.arange(stack.count, dtype=jnp.int32))
            if mask is not None:
                part = slice(layer, layer + stack.count)
                inputs = dataclasses.replace(
                    inputs,
                    live=mask.layers[:, part].T,
                    experts=jnp.moveaxis(mask.experts[:, part], 0, 1),
                    top_k=mask.top_k[:, part].T,
                )
            if stack.router is not None:
                inputs = _routing(inputs, stack, slice(routed, routed + stack.count), router_bias, override)
                routed += stack.count
            if stack.kind == "codec":
                # Codec layers are never dropped: their heads must read every level.
                inputs = dataclasses.replace(inputs, live=None)
            if stack.kind == "codec" and after_codec_layer is not None:
                first = layer - first_codec
                read = lambda i, hidden, first=first: after_codec_layer(first + i, hidden)  # noqa: E731
                hidden, stack_stats, cache = self._unrolled(stack, hidden, context, inputs, cache, read, return_index)
            else:
                hidden, stack_stats, cache = self._scanned(stack, hidden, context, inputs, cache, return_index)
            if stack.router is not None:
                largest = self.config.router
                stats.append(pad_stats(stack_stats, stack.router.num_experts, largest.num_experts, largest.top_k))
            new_caches.append(cache)
            layer += stack.count
        merged = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats)
        return hidden, merged, None if caches is None else new_caches

    def _scanned(self, stack: StackConfig, hidden, context, inputs: LayerInputs, cache, return_index):
        graph, state = nnx.split(getattr(self, stack.name))

        def step(carry, xs):
            layer, layer_inputs = xs
            hidden, cache = carry
            hidden, stats, cache = self._layer(stack, graph, layer, hidden, context, layer_inputs, cache, return_index)
            return (hidden, cache), stats

        # The cache is carried, not sliced: every layer writes its few new rows in place.
        (hidden, cache), stats = jax.lax.scan(step, (hidden, cache), (state, inputs))
        return hidden, stats, cache

    def _unrolled(self, stack: StackConfig, hidden, context, inputs: LayerInputs, cache, after_layer, return_index):
        graph, state = nnx.split(getattr(self, stack.name))
        outputs = []
        for i in range(stack.count):
            layer, layer_inputs = jax.tree.map(lambda a, i=i: a[i], (state, inputs))
            hidden, stats, cache = self._layer(stack, graph, layer, hidden, context, layer_inputs, cache, return_index)
            hidden = after_layer(i, hidden)
            outputs.append(stats)
        return hidden, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs), cache

    def _layer(self, stack: StackConfig, graph, layer, hidden, context, inputs: LayerInputs, cache, return_index):
        """One layer; its parameters are `layer`. The mask may skip it."""
        active = context.q_segment != 0
        if inputs.live is not None:
            active &= inputs.live[:, None]
        control = None
        if stack.router is not None:
            weights = None
            if cache is not None:
                experts = getattr(self, stack.name).ffn
                weights = (
                    experts.w_in[...].astype(hidden.dtype),
                    experts.w_out[...].astype(hidden.dtype),
                    inputs.number,
                )
            control = RoutingControl(inputs.bias, active, inputs.experts, inputs.top_k, inputs.override, weights)

        def run(given, fixed):
            (layer, hidden, cache), (context, control, number) = given, fixed
            own = None if cache is None else LayerCache(cache[0], cache[1], number)
            hidden, stats, own = nnx.merge(graph, layer)(hidden, context, control, own, return_index=return_index)
            return hidden, stats, None if own is None else (own.keys, own.values)

        if self.config.remat:
            # Inside the cond, so that a skipped layer is not recomputed either.
            run = jax.checkpoint(run)
        given, fixed = (layer, hidden, cache), (context, control, inputs.number)
        if inputs.live is None:
            return run(given, fixed)

        def skip(given, fixed):
            _, hidden, cache = given
            stats = None
            if stack.router is not None:
                shape = (*hidden.shape[:2], stack.router.top_k)
                index = jnp.zeros(shape, jnp.int32) if return_index else None
                stats = zero_stats(stack.router.num_experts, index, hidden.dtype)
            return hidden, stats, cache

        choose = run_if if cache is None else jax.lax.cond  # with a cache, weights are read from the stack
        new_hidden, stats, cache = choose(on_any_device(inputs.live.any()), run, skip, given, fixed)
        if inputs.live.shape[0] == hidden.shape[0]:  # a submodel per row: others may have needed this layer
            new_hidden = jnp.where(inputs.live[:, None, None], new_hidden, hidden)
        return new_hidden, stats, cache


def _routing(
    inputs: LayerInputs, stack: StackConfig, part: slice, bias: jax.Array, override: jax.Array | None
) -> LayerInputs:
    """`inputs` with the stack's own part of what the router reads, in its number of experts and ranks."""
    assert stack.router is not None
    if override is not None:
        override = override[part, ..., : stack.router.top_k]
    return dataclasses.replace(inputs, bias=bias[part, : stack.router.num_experts], override=override)
