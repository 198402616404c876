"""Sharding as rules: logical axis names of arrays -> axes of the mesh."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ernie5_jax.errors import UserError
from ernie5_jax.parallel.mesh import DATA_AXIS

MeshAxis = str | None


class ShardingError(UserError):
    """An array cannot be laid out as the rules say."""


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Mesh axis of every logical axis; None = not split. The fields are all the names there are."""

    # Activations.
    batch: MeshAxis = DATA_AXIS
    sequence: MeshAxis = None
    hidden: MeshAxis = None
    # Parameters.
    layers: MeshAxis = None
    embed: MeshAxis = None
    embed_pair: MeshAxis = None
    vocab: MeshAxis = None
    mlp: MeshAxis = None
    experts: MeshAxis = None
    router_experts: MeshAxis = None
    expert_mlp: MeshAxis = None
    heads: MeshAxis = None
    kv_heads: MeshAxis = None
    norm: MeshAxis = None
    bits: MeshAxis = None
    scales: MeshAxis = None
    features: MeshAxis = None
    levels: MeshAxis = None
    codes: MeshAxis = None

    def spec(self, names: tuple[str | None, ...]) -> PartitionSpec:
        """Partition of an array whose dimensions are called `names` (None = not split).

        Raises:
          ShardingError: A name is unknown, or two dimensions would be split over one mesh axis.
        """
        axes: list[MeshAxis] = []
        for name in names:
            if name is not None and name not in _NAMES:
                raise ShardingError(f"logical axis {name!r}: unknown, allowed: {', '.join(sorted(_NAMES))}")
            axis = None if name is None else getattr(self, name)
            if axis is not None and axis in axes:
                raise ShardingError(f"logical axes {names}: two dimensions on mesh axis {axis!r}, allowed: one")
            axes.append(axis)
        return PartitionSpec(*axes)

    @property
    def split_parameter_axes(self) -> frozenset[str]:
        """Logical axes of parameters that are split."""
        return frozenset(name for name in _NAMES - _ACTIVATIONS if getattr(self, name) is not None)


_ACTIVATIONS = frozenset(("batch", "sequence", "hidden"))
_NAMES = frozenset(field.name for field in dataclasses.fields(ShardingRules))

PRESETS = {
    "replicated": ShardingRules(),
    # Every matrix has exactly one "embed" dimension; gathered where used, gradients arrive scattered.
    "fsdp": ShardingRules(embed=DATA_AXIS),
    # Every device has its own experts and sees all tokens; everything else is whole.
    "expert": ShardingRules(experts=DATA_AXIS),
}


def preset(name: str) -> ShardingRules:
    """The rules called `name`. Raises `ShardingError` for an unknown one."""
    if name not in PRESETS:
        raise ShardingError(f"sharding rules {name!r}: unknown, allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


_CURRENT: contextvars.ContextVar[ShardingRules] = contextvars.ContextVar(
    "sharding_rules", default=PRESETS["replicated"]
)


@contextlib.contextmanager
def use_rules(rules: ShardingRules) -> Iterator[None]:
    """Rules that `constrain` follows while functions are traced inside."""
    token = _CURRENT.set(rules)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_rules() -> ShardingRules:
    """The rules set by `use_rules`."""
    return _CURRENT.get()


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Asks for the layout of an activation by logical names; the identity where no mesh is set or its axes are
    already divided by hand.

    Raises:
      ShardingError: As many names as dimensions are needed; see also `ShardingRules.spec`.
    """
    if len(names) != x.ndim:
        raise ShardingError(f"logical axes {names}: found {len(names)} names for rank {x.ndim}, allowed: {x.ndim}")
    spec = _CURRENT.get().spec(names)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(spec) - {None} <= set(mesh.axis_names) - set(mesh.manual_axes):
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def tree_shardings(mesh: Mesh, rules: ShardingRules, shapes: Any, axes: Any) -> Any:
    """Shardings of a tree of parameters.

    Args:
      mesh: The mesh.
      rules: The rules.
      shapes: Tree of arrays or `jax.ShapeDtypeStruct`.
      axes: The same tree with a tuple of logical names per leaf.

    Raises:
      ShardingError: A dimension is not divisible by the devices it is split over; names the parameter.
    """

    def one(path, shape, names) -> NamedSharding:
        where = path_name(path)
        if len(names) != len(shape.shape):
            raise ShardingError(f"parameter {where}: found axes {names}, allowed: {len(shape.shape)} names")
        spec = rules.spec(tuple(names))
        for size, name, axis in zip(shape.shape, names, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ShardingError(
                    f"parameter {where}: dimension {name!r} is {size}, allowed: a multiple of the "
                    f"{mesh.shape[axis]} devices of mesh axis {axis!r}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, shapes, axes)


def path_name(path: tuple[Any, ...]) -> str:
    """`backbone/moe/ffn/w_in` of a JAX key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
