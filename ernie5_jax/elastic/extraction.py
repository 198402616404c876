"""From a trained elastic model to a smaller static one, without retraining (ERNIE 5.0 section 6.4.2)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from ernie5_jax.config import ModelConfig, StackConfig
from ernie5_jax.model import ElasticMask, Params, check_mask, logical_axes, present_experts


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer of the submodel.

    Attributes:
      stack, index: Where it stands in the full model.
      experts: Numbers of the experts that stay; None for a dense layer.
      top_k: Experts per token.
      routed: Its number among the routed layers of the full model.
    """

    stack: StackConfig
    index: int
    experts: np.ndarray | None = None
    top_k: int = 0
    routed: int = -1


def extract_submodel(
    model: ModelConfig, params: Params, router_bias: Any, mask: ElasticMask
) -> tuple[ModelConfig, Params, Any]:
    """The submodel behind an elastic mask as an ordinary static model: it computes what the masked model computes.

    Layers that the mask skips are left out, of the others only the experts that may be chosen stay. Where experts or
    top-k differ between layers, the stack is split into consecutive homogeneous ones (decisions section 3).

    Args:
      model: Sizes of the full model.
      params: Its parameters, or any tree of that structure (averages, moments).
      router_bias: [L_routed, E].
      mask: One submodel, R = 1.

    Returns:
      Configuration (not elastic), parameters and router bias of the submodel; arrays of the type that was given.

    Raises:
      ValueError: A mask that is no submodel of the model, or R > 1.
    """
    layers = _kept_layers(model, mask)
    small = _configuration(model, layers)
    axes = logical_axes(model)["backbone"]

    def part(layer: _Layer) -> Params:
        name = layer.stack.name
        take = functools.partial(_take, layer=layer)
        return jax.tree.map(take, axes[name], params["backbone"][name], is_leaf=lambda node: isinstance(node, tuple))

    queue, backbone = iter(layers), {}
    for stack in small.stacks:
        parts = [part(layer) for layer in itertools.islice(queue, stack.count)]
        backbone[stack.name] = jax.tree.map(lambda *leaves: _library(leaves[0]).stack(leaves), *parts)
    return small, {**params, "backbone": backbone}, _bias(small, router_bias, layers)


def _kept_layers(model: ModelConfig, mask: ElasticMask) -> list[_Layer]:
    check_mask(mask, model)
    rows = np.shape(mask.layers)[0]
    if rows != 1:
        raise ValueError(f"elastic mask: found {rows} rows, allowed: 1, a single submodel")
    live, experts, top_k = (np.asarray(x)[0] for x in (mask.layers, mask.experts, mask.top_k))
    present = present_experts(model)
    layers, number, routed = [], 0, 0
    for stack in model.stacks:
        for index in range(stack.count):
            layer = _Layer(stack, index)
            if stack.router is not None:
                chosen = np.flatnonzero(experts[number] & present[routed])
                k = min(int(top_k[number]), stack.router.top_k)
                layer = dataclasses.replace(layer, experts=chosen, top_k=k, routed=routed)
                routed += 1
            if live[number]:
                layers.append(layer)
            number += 1
    return layers


def _configuration(model: ModelConfig, layers: list[_Layer]) -> ModelConfig:
    kinds = [layer.stack.kind for layer in layers]
    sizes = [(len(layer.experts), layer.top_k) for layer in layers if layer.experts is not None]
    router, stacks = model.router, ()
    if sizes:
        experts, top_k = (max(size[i] for size in sizes) for i in (0, 1))
        router = dataclasses.replace(router, num_experts=experts, top_k=top_k)
    if len(set(sizes)) > 1:
        stacks = tuple((len(list(group)), *size) for size, group in itertools.groupby(sizes))
    return dataclasses.replace(
        model,
        num_dense_layers=kinds.count("dense"),
        num_moe_layers=kinds.count("moe"),
        router=router,
        sparse_stacks=stacks,
        elastic=False,
    )


def _take(names: tuple[str, ...], array: Any, layer: _Layer) -> Any:
    """One layer's part of a stacked array [count, ...], with the experts that stay."""
    array = array[layer.index]
    for axis, name in enumerate(names[1:]):
        if name in ("experts", "router_experts"):
            array = _library(array).take(array, layer.experts, axis=axis)
    return array


def _bias(small: ModelConfig, bias: Any, layers: list[_Layer]) -> Any:
    """[L_routed, E] of the submodel; entries of experts that a layer does not have are 0."""
    rows = []
    for layer in layers:
        if layer.experts is not None:
            row = bias[layer.routed][layer.experts]
            rows.append(_library(bias).pad(row, (0, small.router.num_experts - len(layer.experts))))
    return _library(bias).stack(rows) if rows else bias[:0, : small.router.num_experts]


def _library(array: Any) -> Any:
    """numpy for arrays on the host, so that extraction needs no device."""
    return np if isinstance(array, np.ndarray) else jax.numpy
