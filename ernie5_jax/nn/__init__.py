"""What every network here shares: parameters with logical axes, norms, rotary positions, attention, matmuls."""

from ernie5_jax.nn.attention import Attention, AttentionContext, LayerCache
from ernie5_jax.nn.linear import Linear, SwiGLU, dot
from ernie5_jax.nn.norm import RMSNorm, at_least_float32
from ernie5_jax.nn.parameters import LAYERS, constant, logical_axes, normal, select_module, stack_modules
from ernie5_jax.nn.rope import apply_rope, axis_of_pair, uni_rope

__all__ = [
    "LAYERS",
    "Attention",
    "AttentionContext",
    "LayerCache",
    "Linear",
    "RMSNorm",
    "SwiGLU",
    "apply_rope",
    "at_least_float32",
    "axis_of_pair",
    "constant",
    "dot",
    "logical_axes",
    "normal",
    "select_module",
    "stack_modules",
    "uni_rope",
]
