"""Config sections of dataclasses, there and back: a command is given a ConfigDict, a run goes by frozen dataclasses."""

import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from slpo_jax.config.bounds import Affects, FieldError, check_fields, fields_of, in_words
from slpo_jax.errors import UserError

T = TypeVar("T")


def section(settings: Any) -> ConfigDict:
    """The config section that a dataclass describes.

    Args:
        settings: the dataclass, or an instance with other defaults.
    Returns:
        a key for each field: its default, a placeholder of its type for None or no default, and a section for a nested
        dataclass or a dict.
    """
    cls = settings if isinstance(settings, type) else type(settings)
    node = ConfigDict()
    for name, hint, default, limits in fields_of(cls):
        if not limits.in_config:
            continue
        value = default if settings is cls else getattr(settings, name)
        if dataclasses.is_dataclass(hint):
            node[name] = section(hint if value is None else value)
        elif isinstance(value, dict):
            parts = {key: section(each) if dataclasses.is_dataclass(each) else each for key, each in value.items()}
            node[name] = ConfigDict(parts)
        else:
            node[name] = placeholder(_plain(hint)) if value is None else value
    return node


def fill(cls: type[T], node: Any, key: str = "config", **known: Any) -> T:
    """The dataclass that a config section describes.

    Args:
        cls: the dataclass.
        node: its section, as `section` made it and the user changed it, or a dict.
        key: where the section stands in the config.
        **known: fields that are taken from here, whether they are keys of the section or not.
    Raises:
        UserError: a value is not valid, or a key unknown or missing; the message names it.
    """
    if not isinstance(node, Mapping | ConfigDict):
        raise UserError(f"{key}: {node!r} is not valid; it is a section, with keys of its own")
    values, keys = dict(known), [name for name, *_, limits in fields_of(cls) if limits.in_config]
    for name in node:
        if name not in keys:
            raise UserError(f"{key}.{name}: unknown config key; use one of {', '.join(sorted(keys))}")
    for name, hint, _, limits in fields_of(cls):
        if name in known or not limits.in_config:
            continue
        if name not in node:
            raise UserError(f"{key}.{name}: missing config key; begin with slpo_jax.config.default_config()")
        nested = dataclasses.is_dataclass(hint)
        values[name] = fill(hint, node[name], f"{key}.{name}") if nested else _frozen(node[name])
    return _made(cls, values, key)


def values(settings: Any, affects: Collection[str] = ()) -> dict[str, Any]:
    """A dataclass's values by key, nested as the sections of a config are.

    Args:
        affects: leave out what changes nothing of these, and sections that are not chosen; () keeps all.
    """
    return dict(_values(settings, affects, "parameters"))


def changed(settings: T, changes: Mapping[str, Any], key: str = "config") -> T:
    """The dataclass with other values of some keys, all of them at once.

    Args:
        changes: by dotted key; lists may stand for tuples.
        key: where the dataclass stands in the config.
    Raises:
        UserError: a value is not valid, or a key unknown; the message names it.
    """
    names = [field.name for field in dataclasses.fields(settings)]  # type: ignore[arg-type]
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if first not in names or (rest and not dataclasses.is_dataclass(getattr(settings, first))):
            raise UserError(f"{key}.{name}: unknown config key; use one of {', '.join(sorted(names))}")
        if rest:
            inner.setdefault(first, {})[rest] = value
        else:
            own[first] = _frozen(value)
    own = {name: changed(getattr(settings, name), found, f"{key}.{name}") for name, found in inner.items()} | own
    return _made(type(settings), {name: getattr(settings, name) for name in names} | own, key)


class Described(NamedTuple):
    """A key of a config section: its default, what may stand there in words, and what it affects; "" as its section."""

    name: str
    default: Any
    values: str
    affects: Affects


def described(settings: Any) -> list[Described]:
    """The keys of the section that a dataclass, or an instance with other defaults, describes."""
    cls = settings if isinstance(settings, type) else type(settings)
    return [
        Described(name, default if settings is cls else getattr(settings, name), in_words(hint, limits), limits.affects)
        for name, hint, default, limits in fields_of(cls)
        if limits.in_config
    ]


def _made(cls: type[T], values: dict[str, Any], key: str) -> T:
    try:
        made = cls(**values)
        check_fields(made)  # also where a user's own dataclass doesn't
        return made
    except FieldError as error:
        raise UserError(f"{key}.{error.field}: {error.problem}") from error


def _values(settings: Any, affects: Collection[str], inherited: str) -> Iterator[tuple[str, Any]]:
    fields = [found for found in fields_of(type(settings)) if found[-1].in_config]
    chosen = {name: getattr(settings, field) for field, *_, limits in fields for name in limits.chooses}
    for name, *_, limits in fields:
        value, own = getattr(settings, name), limits.affects or inherited
        if affects and chosen.get(name, name) != name:
            continue
        if dataclasses.is_dataclass(value) or not affects or own in affects:
            value = _nested(value, affects, own)
            if value != {} or not affects:
                yield name, value


def _nested(value: Any, affects: Collection[str], own: str) -> Any:
    if dataclasses.is_dataclass(value):
        return dict(_values(value, affects, own))
    return {key: _nested(each, affects, own) for key, each in value.items()} if isinstance(value, dict) else value


def _frozen(value: Any) -> Any:
    """A key's value with tuples for lists and dicts for sections."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value.to_dict() if isinstance(value, ConfigDict) else value


def _plain(hint: Any) -> type:
    """The type of an annotation's values, for a placeholder."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return next(_plain(part) for part in parts if part is not type(None))
    return type(parts[0]) if kind is Literal else kind or hint
