"""Config sections of dataclasses, there and back: a command is given a ConfigDict, a run goes by frozen dataclasses."""

import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from slpo_jax.errors import UserError
from slpo_jax.settings import FieldError, check_fields, fields_of

T = TypeVar("T")


def section(settings: Any) -> ConfigDict:
    """The config section that a dataclass describes.

    Args:
        settings: an instance with the defaults.
    Returns:
        a key for each field: its default, a placeholder of its type for None, and a section for a nested dataclass or a
        dict.
    """
    node = ConfigDict()
    for name, hint, _, limits in fields_of(type(settings)):
        value = getattr(settings, name)
        if isinstance(value, dict):
            value = ConfigDict({key: section(each) if is_dataclass(each) else each for key, each in value.items()})
        if limits.in_config:
            node[name] = (
                section(value) if is_dataclass(value) else placeholder(_plain(hint)) if value is None else value
            )
    return node


def values(settings: Any, affects: Collection[str] = ()) -> dict[str, Any]:
    """A dataclass's values by key, nested as the sections of a config are.

    Args:
        affects: leave out what changes nothing of these, and sections that are not chosen; () keeps all.
    """
    return dict(_values(settings, affects, "parameters"))


def changed(settings: T, changes: Mapping[str, Any], key: str = "config") -> T:
    """The dataclass with other values of some keys, all of them at once.

    Args:
        changes: by dotted key, or sections as `section` made them, or dicts; lists may stand for tuples.
        key: where the dataclass stands in the config.
    Raises:
        UserError: a value is not valid, or a key unknown; the message names it.
    """
    every = {name: getattr(settings, name) for name, *_ in fields_of(type(settings))}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        is_section = is_dataclass(every.get(first))
        if first not in every or (rest and not is_section):
            names = [name for name, *_, limits in fields_of(type(settings)) if limits.in_config]
            raise UserError(f"{key}.{name}", f"unknown config key; use one of {', '.join(sorted(names))}")
        if is_section and (rest or isinstance(value, Mapping | ConfigDict)):
            inner.setdefault(first, {}).update({rest: value} if rest else value.items())
        elif is_section and not is_dataclass(value):
            raise UserError(f"{key}.{name}", f"{value!r} is not valid; give a section with keys of its own")
        else:
            every[first] = _frozen(value)
    every |= {name: changed(every[name], found, f"{key}.{name}") for name, found in inner.items()}
    try:
        made = type(settings)(**every)
        check_fields(made)  # also where a user's own dataclass doesn't
        return made
    except FieldError as error:
        raise UserError(f"{key}.{error.field}", error.problem) from error


def _values(settings: Any, affects: Collection[str], inherited: str) -> Iterator[tuple[str, Any]]:
    fields = [found for found in fields_of(type(settings)) if found[-1].in_config]
    chosen = {name: getattr(settings, field) for field, *_, limits in fields for name in limits.chooses}
    for name, *_, limits in fields:
        value, own = getattr(settings, name), limits.affects or inherited
        if affects and chosen.get(name, name) != name:
            continue
        if is_dataclass(value) or not affects or own in affects:
            value = _nested(value, affects, own)
            if value != {} or not affects:
                yield name, value


def _nested(value: Any, affects: Collection[str], own: str) -> Any:
    if is_dataclass(value):
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
