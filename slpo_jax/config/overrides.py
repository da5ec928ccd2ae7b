"""Config sections of dataclasses: a config file fills a ConfigDict, and `changed` merges layers into dataclasses."""

import ast
import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from slpo_jax.errors import UserError
from slpo_jax.settings import FieldError, check_fields, fields_of

T = TypeVar("T")
_EXACT = 2**53  # below which a float has every whole number


class Text(str):
    """A value as a command line has it: `changed` reads it as what its key holds."""


def section(settings: Any) -> Any:
    """Make the config section that a dataclass describes.

    Args:
        settings: an instance with the defaults.
    Returns:
        a ConfigDict with a key for each field: its default, a placeholder of its type for None, and a section for a
        nested dataclass or a dict.
    """
    if isinstance(settings, dict):
        return ConfigDict({key: section(value) for key, value in settings.items()})
    if not is_dataclass(settings):
        return settings
    node = ConfigDict()
    for name, hint, _, limits in fields_of(type(settings)):
        if limits.in_config:
            value = section(getattr(settings, name))
            node[name] = placeholder(_plain(hint)) if value is None else value
    return node


def values(settings: Any) -> Any:
    """List a dataclass's values by key, nested as the sections of a config are."""
    if isinstance(settings, dict):
        return {key: values(value) for key, value in settings.items()}
    if not is_dataclass(settings):
        return settings
    names = [name for name, *_, limits in fields_of(type(settings)) if limits.in_config]
    return {name: values(getattr(settings, name)) for name in names}


def changed(settings: T, *layers: Mapping[str, Any] | ConfigDict, key: str = "config", **others: Any) -> T:
    """Merge layers of settings into a dataclass, each over those before it, and check the result.

    Args:
        layers: values by dotted key, or nested, or sections as `section` makes them; lists may stand for tuples, and a
            `Text` for what it is read as. Entries of a section whose keys are names stay, but for those of sources.
        key: where the dataclass stands in the config.
        **others: fields that are no keys of the config.
    Raises:
        UserError: a value is not valid, or a key unknown; the message names it.
    """
    fields = {name: (hint, limits.entry) for name, hint, _, limits in fields_of(type(settings)) if limits.in_config}
    merged = dict(others)
    for name, changes in _by_name(layers).items():
        if name not in fields and not changes[0][0]:
            raise UserError(f"{key}.{name}", f"unknown config key; use one of {', '.join(sorted(fields))}")
        hint, entry = fields.get(name, (None, None))
        old = getattr(settings, name) if name in fields else None
        merged[name] = _merged(old, hint, changes, f"{key}.{name}", entry)
    try:
        result = replace(settings, **merged)  # type: ignore[type-var]
        check_fields(result)  # also where a user's own dataclass doesn't
        return result
    except FieldError as error:
        raise UserError(f"{key}.{error.field}", error.problem) from error


def nearest(given: str, names: Iterable[str]) -> str:
    """Say which names an unknown one is most like, four at most, by as many of their last parts as it has."""
    ordered, parts = sorted(names, key=lambda name: name.count(".")), given.count(".") + 1
    ends = {name: ".".join(name.lstrip("-").split(".")[-parts:]) for name in ordered}
    alike = difflib.get_close_matches(given, ends.values(), 1, 0.7)
    return "; nearest: " * bool(alike) + ", ".join([name for name in ordered if ends[name] in alike][:4])


def _by_name(layers: Iterable[Mapping[str, Any] | ConfigDict]) -> dict[str, list[tuple[str, Any]]]:
    """Sort the layers' changes by the first name of their keys: the rest of the key, "" for the whole; the value."""
    changes: dict[str, list[tuple[str, Any]]] = {}
    for layer in layers:
        for key, value in layer.items():
            name, _, below = str(key).partition(".")
            changes.setdefault(name, []).append((below, value))
    return changes


def _merged(old: Any, hint: Any, changes: list[tuple[str, Any]], key: str, entry: Callable | None) -> Any:
    """Return the value of a key after changes, see `_by_name`; `entry` is what `setting` takes.

    Of a file with `rl` = {steps: 5} and a flag `rl.group=16`, the section rl gets [("", {steps: 5}), ("group", 16)].
    What is given as a whole and can't be merged takes the place of all before it.
    """
    changes = [(below, value if below else _as_field(value, _plain(hint))) for below, value in changes]
    if entry and is_dataclass(hint):
        old = entry(key, old, changes)
    layers = list[Mapping[str, Any]]()
    for below, value in changes:
        is_section = is_dataclass(old) or isinstance(old, dict)
        if below and not is_section:
            raise UserError(f"{key}.{below}", "unknown config key; there is no such section")
        if below or (is_section and isinstance(value, Mapping)):
            if not below and hint == dict[str, str]:  # sources, given all at once
                old, layers = {}, []
            layers.append({below: value} if below else value)
        elif is_dataclass(hint) and not is_dataclass(value):
            raise UserError(key, f"{value!r} is not valid; give a section with keys of its own")
        else:
            old, layers = value, []
    if is_dataclass(old):
        return changed(old, *layers, key=key)
    part = (*get_args(hint), Any, Any)[1]
    start: dict[str, Any] | None = {} if get_origin(part) is dict else None
    for name, subkeys in _by_name(layers).items():
        old = {**old, name: _merged(old.get(name, start), part, subkeys, f"{key}.{name}", entry)}
    return dict(sorted(old.items())) if layers else old


def _as_field(value: Any, kind: Any) -> Any:
    """Convert a value to what a field of this kind holds: a text read, tuples for lists, dicts for sections.

    A `Text` is as Python writes the value, or where it can't be read so, the text itself.
    """
    if isinstance(value, Text):
        if kind is str and value != "None":
            return str(value)
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = str(value)
        if kind is tuple and value is not None and not isinstance(value, tuple | list):
            return (value,)
    if isinstance(value, list | tuple) and kind is not Any:
        return tuple(_as_field(part, None) for part in value)
    if kind is float and type(value) is int and abs(value) < _EXACT:
        return float(value)
    return value.to_dict() if isinstance(value, ConfigDict) else value


def _plain(hint: Any) -> type:
    """Return the type of an annotation's values, for a placeholder."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return next(_plain(part) for part in parts if part is not type(None))
    return type(parts[0]) if kind is Literal else kind or hint
