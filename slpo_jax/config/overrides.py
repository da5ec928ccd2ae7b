"""Config sections of dataclasses: a config file fills a ConfigDict; `merge_settings` makes dataclasses of layers."""

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
    """A value as written on a command line: `merge_settings` reads it by the type of its key."""


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
    node = {}
    for name, *_, limits in fields_of(type(settings)):
        if limits.in_config:
            node[name] = values(getattr(settings, name))
    return node


def merge_settings(
    settings: T,
    *layers: Mapping[str, Any] | ConfigDict,
    key: str = "config",
    **others: Any,
) -> T:
    """Merge layers of settings into a dataclass, each over those before it, and check the result.

    Args:
        layers: values by dotted key, or nested, or sections as `section` makes them; lists may stand for tuples, and a
            `Text` for what it is read as. Entries of a section whose keys are names stay, but for those of sources.
        key: where the dataclass stands in the config.
        **others: fields that are not keys of the config.
    Raises:
        UserError: a value is not valid, or a key unknown; the message names it.
    """
    fields = {}
    for name, hint, _, limits in fields_of(type(settings)):
        if limits.in_config:
            fields[name] = (hint, limits.entry)
    # Merge every field that some layer changes, in the order of the layers.
    merged = dict(others)
    for name, changes in _by_name(layers).items():
        if name not in fields and not changes[0][0]:
            names = ", ".join(sorted(fields))
            raise UserError(f"{key}.{name}", f"unknown config key; use one of {names}")
        hint, entry = fields.get(name, (None, None))
        old = getattr(settings, name) if name in fields else None
        merged[name] = _merge(old, hint, changes, f"{key}.{name}", entry)
    # The dataclass checks its fields when it is made; its errors name a field, which becomes the config's key.
    try:
        result = replace(settings, **merged)  # type: ignore[type-var]
        check_fields(result)  # also where a user's own dataclass doesn't
        return result
    except FieldError as error:
        raise UserError(f"{key}.{error.field}", error.problem) from error


def nearest(given: str, names: Iterable[str]) -> str:
    """Name the four names at most that are nearest to an unknown one, compared by their last parts."""
    ordered = sorted(names, key=lambda name: name.count("."))
    parts = given.count(".") + 1
    ends = {}
    for name in ordered:
        last = name.lstrip("-").split(".")[-parts:]
        ends[name] = ".".join(last)
    alike = difflib.get_close_matches(given, ends.values(), 1, 0.7)
    if not alike:
        return ""
    names = [name for name in ordered if ends[name] in alike]
    return f"; nearest: {', '.join(names[:4])}"


def _by_name(
    layers: Iterable[Mapping[str, Any] | ConfigDict],
) -> dict[str, list[tuple[str, Any]]]:
    """Sort the layers' changes by the first name of their keys: the rest of the key, "" for the whole; the value."""
    changes: dict[str, list[tuple[str, Any]]] = {}
    for layer in layers:
        for key, value in layer.items():
            name, _, below = str(key).partition(".")
            changes.setdefault(name, []).append((below, value))
    return changes


def _merge(
    old: Any,
    hint: Any,
    changes: list[tuple[str, Any]],
    key: str,
    entry: Callable | None,
) -> Any:
    """Return the value of a key after changes, see `_by_name`; `entry` is that of `setting`.

    Of a file with `rl` = {steps: 5} and a flag `rl.group=16`, the section rl gets [("", {steps: 5}), ("group", 16)].
    What is given as a whole and can't be merged takes the place of all before it.
    """
    # Read each value that is given as a whole; those for a key below are read where they arrive.
    kind = _plain(hint)
    read = []
    for below, value in changes:
        read.append((below, value if below else _as_field(value, kind)))
    if entry and is_dataclass(hint):
        old = entry(key, old, read)
    # Collect the layers of a section. A whole value that is not a layer of it replaces all before.
    layers = list[Mapping[str, Any]]()
    for below, value in read:
        is_section = is_dataclass(old) or isinstance(old, dict)
        if below and not is_section:
            problem = "unknown config key; there is no such section"
            raise UserError(f"{key}.{below}", problem)
        if below:
            layers.append({below: value})
        elif is_section and isinstance(value, Mapping):
            # Sources that are given all at once replace the ones before.
            if hint == dict[str, str]:
                old = {}
                layers = []
            layers.append(value)
        elif is_dataclass(hint) and not is_dataclass(value):
            problem = f"{value!r} is not valid; give a section with keys of its own"
            raise UserError(key, problem)
        else:
            old = value
            layers = []
    if is_dataclass(old):
        return merge_settings(old, *layers, key=key)
    if not layers:
        return old
    # A dict of sections or values is merged name by name; a new name begins empty where its values are dicts.
    part = (*get_args(hint), Any, Any)[1]
    start: dict[str, Any] | None = {} if get_origin(part) is dict else None
    merged = dict(old)
    for name, subkeys in _by_name(layers).items():
        before = merged.get(name, start)
        merged[name] = _merge(before, part, subkeys, f"{key}.{name}", entry)
    return dict(sorted(merged.items()))


def _as_field(value: Any, kind: Any) -> Any:
    """Convert a value to the type of a field: a text is read, lists become tuples, sections become dicts.

    A `Text` is as Python writes the value, or where it can't be read so, the text itself.
    """
    # A command line's text becomes a Python value, unless the key holds texts.
    if isinstance(value, Text):
        if kind is str and value != "None":
            return str(value)
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = str(value)
        if kind is tuple and value is not None and not isinstance(value, tuple | list):
            return (value,)
    # Frozen dataclasses hold tuples, also within tuples.
    if isinstance(value, list | tuple) and kind is not Any:
        return tuple(_as_field(part, None) for part in value)
    if kind is float and type(value) is int and abs(value) < _EXACT:
        return float(value)
    return value.to_dict() if isinstance(value, ConfigDict) else value


def _plain(hint: Any) -> type:
    """Return the type of an annotation's values, for a placeholder."""
    kind = get_origin(hint)
    parts = get_args(hint)
    if kind in (Union, types.UnionType):
        others = [part for part in parts if part is not type(None)]
        return _plain(others[0])
    if kind is Literal:
        return type(parts[0])
    return kind or hint
