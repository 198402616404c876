"""Weights of ERNIE 4.5 text models (transformers' `Ernie4_5_MoeForCausalLM`) as parameters of this library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ernie5_jax.config import ModelConfig
from ernie5_jax.errors import UserError
from ernie5_jax.model import Params, init_params

_LAYER = "model.layers."


class InteropError(UserError):
    """Weights that do not fit the model."""


def from_ernie4_5(state: Mapping[str, np.ndarray], config: ModelConfig) -> tuple[Params, np.ndarray]:
    """Parameters and router bias from a state dict.

    Parts that a text model lacks (pictures, sound, MTP) keep their initial values of seed 0.

    Args:
      state: Arrays by the names of transformers >= 5; matrices are [out, in], experts stacked [E, out, in].
      config: Sizes; `rope_pairing` must be "interleaved".

    Raises:
      InteropError: A weight is missing, has another shape, or is left over; names it.
    """
    taken = _Taken(state)
    params, bias = jax.tree.map(np.array, jax.jit(lambda: init_params(config, 0))())
    put = _Put(params)
    put("embedding.text", taken("model.embed_tokens.weight"))
    put("final_norm.scale", taken("model.norm.weight"))
    if not config.tied_text_head:
        put("text_head.kernel", taken("lm_head.weight").T)
    layer, routed = 0, 0
    for stack in config.stacks:
        for place in range(stack.count):
            prefix = f"{_LAYER}{layer}."
            for name, value in _layer(taken, prefix, stack.kind != "dense").items():
                if name == "bias":
                    bias[routed, : value.size] = value
                else:
                    put(f"backbone.{stack.name}.{name}", value, place)
            layer, routed = layer + 1, routed + (stack.kind != "dense")
    taken.check_nothing_left(ignored="lm_head.weight" if config.tied_text_head else "")
    return params, bias


def _layer(taken: _Taken, prefix: str, sparse: bool) -> dict[str, np.ndarray]:
    """Parameters of one layer by their dotted names; the router bias as `bias`."""
    attention = {"query": "q", "key": "k", "value": "v", "out": "o"}
    found = {
        "attention_norm.scale": taken(prefix + "input_layernorm.weight"),
        "ffn_norm.scale": taken(prefix + "post_attention_layernorm.weight"),
        **{
            f"attention.{ours}.kernel": taken(f"{prefix}self_attn.{his}_proj.weight").T
            for ours, his in attention.items()
        },
    }
    if not sparse:
        return found | _swiglu(taken, prefix + "mlp.", "ffn.")
    found |= {
        "ffn.router.kernel": taken(prefix + "mlp.gate.weight").T,
        "ffn.w_in": taken(prefix + "mlp.experts.gate_up_proj").swapaxes(1, 2),
        "ffn.w_out": taken(prefix + "mlp.experts.down_proj").swapaxes(1, 2),
        "bias": taken(prefix + "mlp.gate.moe_statics.e_score_correction_bias").reshape(-1),
    }
    if prefix + "mlp.shared_experts.up_proj.weight" in taken:
        found |= _swiglu(taken, prefix + "mlp.shared_experts.", "ffn.shared.")
    return found


def _swiglu(taken: _Taken, prefix: str, name: str) -> dict[str, np.ndarray]:
    gate, up = (taken(f"{prefix}{part}_proj.weight").T for part in ("gate", "up"))
    return {
        f"{name}w_in.kernel": np.concatenate([gate, up], axis=1),
        f"{name}w_out.kernel": taken(prefix + "down_proj.weight").T,
    }


class _Taken:
    """A state dict that knows what has been read of it."""

    def __init__(self, state: Mapping[str, np.ndarray]):
        self._state, self._names = state, set()

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def __call__(self, name: str) -> np.ndarray:
        if name not in self._state:
            raise InteropError(f"weight '{name}': missing, found {len(self._state)} others")
        self._names.add(name)
        return np.asarray(self._state[name])

    def check_nothing_left(self, ignored: str) -> None:
        left = sorted(set(self._state) - self._names - {ignored})
        if left:
            raise InteropError(f"weight '{left[0]}': found it and {len(left) - 1} more, allowed: only the model's own")


class _Put:
    """Writes into a nested dict of parameters."""

    def __init__(self, params: Params):
        self._params = params

    def __call__(self, name: str, value: np.ndarray, place: int | None = None) -> None:
        *path, last = name.split(".")
        node: Any = self._params
        for key in path:
            node = node.get(key, {})
        if last not in node:
            raise InteropError(f"weight for '{name}': found one, allowed: none, the model has no such parameter")
        room = node[last] if place is None else node[last][place]
        if room.shape != value.shape:
            raise InteropError(f"weight for '{name}': found shape {value.shape}, allowed: {room.shape}")
        room[...] = value
