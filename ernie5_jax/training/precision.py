"""Precision policy: which type parameters are kept in and which type a step computes in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

KEPT = ("norm", "router_experts")
"""Logical axes of parameters that always stay as they are kept: norms and the router compute in float32."""


def cast_params(params: Any, axes: Any, precision: str) -> Any:
    """Parameters as the forward reads them; gradients flow back to the float32 originals.

    Args:
      params: Master parameters, float32.
      axes: Logical axis names per parameter.
      precision: "float32" (as they are) or "bfloat16".
    """
    if precision == "float32":
        return params
    return jax.tree.map(lambda p, names: p if set(names) & set(KEPT) else p.astype(jnp.bfloat16), params, axes)
