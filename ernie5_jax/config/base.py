"""Strict conversion between `ml_collections.ConfigDict` and frozen dataclasses.

ConfigDicts live at the edge (files, command-line overrides); inside the library
everything is a frozen dataclass. A config file starts from `to_config_dict(ExperimentConfig())`,
so the dataclasses are the only place where keys and defaults are written.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import ml_collections

from ernie5_jax.errors import UserError

T = TypeVar("T")


class ConfigError(UserError):
    """A configuration value that is unknown, wrongly typed or contradictory."""


def require(condition: bool, key: str, found: Any, allowed: str) -> None:
    """Raises a `ConfigError` naming `key`, what was found and what is allowed."""
    if not condition:
        raise ConfigError(f"config key '{key}': found {found!r}, allowed: {allowed}")


def _convert(value: Any, annotation: Any, path: str) -> Any:
    origin = typing.get_origin(annotation)
    if dataclasses.is_dataclass(annotation):
        cls = typing.cast(type, annotation)
        return value if isinstance(value, cls) else from_mapping(cls, value, path)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
        if value is None and type(None) in options:
            return None
        inner = next(option for option in options if option is not type(None))
        return _convert(value, inner, path)
    if origin is tuple:
        require(isinstance(value, list | tuple), path, value, "a sequence")
        args = typing.get_args(annotation)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(v, args[0], f"{path}[{i}]") for i, v in enumerate(value))
        require(len(value) == len(args), path, value, f"{len(args)} elements")
        return tuple(_convert(v, a, f"{path}[{i}]") for i, (v, a) in enumerate(zip(value, args, strict=True)))
    if origin is dict:
        require(isinstance(value, Mapping), path, value, "a mapping")
        _, inner = typing.get_args(annotation)
        return {str(k): _convert(v, inner, f"{path}.{k}") for k, v in value.items()}
    if origin is typing.Literal:
        options = typing.get_args(annotation)
        require(value in options, path, value, f"one of {list(options)}")
        return value
    if annotation is float:
        require(isinstance(value, int | float) and not isinstance(value, bool), path, value, "a number")
        return float(value)
    if annotation in (int, bool, str):
        require(type(value) is annotation, path, value, f"a value of type {annotation.__name__}")
        return value
    return value


def from_mapping(cls: type[T], mapping: Any, path: str = "") -> T:
    """Builds the frozen dataclass `cls` from a (nested) mapping.

    Args:
      cls: A dataclass type.
      mapping: `ConfigDict`, dict or an instance of `cls`.
      path: Dotted path of `mapping` inside the whole config, for messages.

    Raises:
      ConfigError: Unknown key, wrong type, or a check of the dataclass failed; names the key's path.
    """
    if isinstance(mapping, ml_collections.ConfigDict):
        mapping = mapping.to_dict()
    require(isinstance(mapping, Mapping), path or "config", mapping, "a mapping")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    prefix = f"{path}." if path else ""
    for key in mapping:
        if key not in names:
            raise ConfigError(f"config key '{prefix}{key}': unknown, allowed: {', '.join(sorted(names))}")
    values = {k: _convert(mapping[k], hints[k], f"{prefix}{k}") for k in names if k in mapping}
    try:
        return cls(**values)
    except ConfigError as error:
        # A room's own check names its key relative to itself; add where the room stands.
        message = str(error)
        if prefix and message.startswith("config key '") and not message.startswith(f"config key '{prefix}"):
            message = message.replace("config key '", f"config key '{prefix}", 1)
        raise ConfigError(message) from None


def to_plain(config: Any) -> Any:
    """Nested dicts and tuples of a dataclass config, ready for JSON or a `ConfigDict`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {k: to_plain(v) for k, v in config.items()}
    if isinstance(config, tuple):
        return tuple(to_plain(v) for v in config)
    return config


def to_config_dict(config: Any) -> Any:
    """The `ConfigDict` a config file edits; types are checked on assignment, unknown keys by `from_mapping`.

    Typed as Any, because type checkers cannot know the attributes of a `ConfigDict`.
    """
    return ml_collections.ConfigDict(to_plain(config))
