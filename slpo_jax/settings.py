"""Frozen dataclasses that say each field's default and range once, check themselves, and are sections of a config.

    @dataclass(frozen=True)
    class Sampling(Checked):
        group: int = setting(8, least=2)
        temperature: float = setting(0.0, least=0)
        stopping: Literal["sample", "threshold"] = "sample"

Annotations are checked too: numbers have to be finite, a bool is no number, a `Literal` lists the choices, a range
holds for each element of a tuple, and a field may be another such dataclass, `X | None`, or a `dict[str, X]`.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slpo_jax.errors import UserError

_LARGEST = 2**31 - 1  # step counters, indices and shapes are int32
_INFINITY = 2.0**128  # of float32
_UNIONS = (Union, types.UnionType)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The arguments of `setting`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    fewest: int = 0
    note: str = ""
    in_config: bool = True
    entry: Callable[..., Any] | None = None

    def hold(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """Return the range, to come after "a number"."""
        lower = "" if self.above is None else f" above {self.above}"
        upper = "" if self.most is None else f"{self.most}"
        upper = upper if self.below is None else f"below {self.below}"
        if self.least is not None:
            return f" from {self.least} to {upper}" if upper else f", {self.least} or more"
        return lower + (f", up to {upper}" if upper else "")


class FieldError(UserError):
    """A field's value can't be used.

    Args:
        settings: the dataclass that the field belongs to.
        field: the field's name.
        remedy: what to give instead.
    """

    def __init__(self, settings: Any, field: str, remedy: str):
        value = repr(getattr(settings, field))
        shown = value if len(value) <= 80 else f"{value[:77]}..."
        super().__init__(f"{type(settings).__name__}.{field}", f"{shown} is not valid; {remedy}")
        self.field = field


def setting(default: Any = dataclasses.MISSING, *, make: Callable[[], Any] | None = None, **limits: Any) -> Any:
    """Return a dataclass field with a range.

    Args:
        default: its default; without one, the field is required.
        least: the least number allowed, of a tuple's elements as well.
        most: the largest number allowed.
        above: a number that it must be larger than.
        below: a number that it must be smaller than.
        fewest: elements that a tuple must have.
        note: what a special value means, for the error message: "0 keeps all".
        in_config: False for what is known only when the dataclass is built: it is no key of the config's section, and
            messages don't ask for None.
        entry: of a dict of sections: (key of one, what it is or None, (key in it, value) of each change) -> what the
            changes are of.
        make: makes the default when it is asked for, as what is registered by then has it.
    """
    make = default.copy if isinstance(default, dict) else make
    defaults = {"default_factory": make} if make else {"default": default}
    return dataclasses.field(**defaults, metadata={"limits": Limits(**limits)})  # type: ignore[call-overload]


def selection(base: Any, field: str, default: str, registry: Mapping[str, type]) -> Any:
    """Return a section whose one field names one of several; the settings of each are sections in it, as by default.

    Args:
        base: what all of them share.
        field: which one is used.
        registry: by name the dataclass of each, those that are registered by now.
    """
    return _selection(base, field, default, tuple(registry.items()))()


@functools.cache
def _selection(base: Any, field: str, default: str, members: tuple[tuple[str, type], ...]) -> Any:
    fields: list[Any] = [(name, cls, cls()) for name, cls in members]
    names = dict.fromkeys([default, *dict(members)])
    fields.insert(0, (field, Literal[*names], setting(default)))
    return dataclasses.make_dataclass(base.__name__, fields, bases=(base,), frozen=True)


def check_fields(settings: Any) -> None:
    """Check every field of a dataclass against its annotation and its `setting`; for `__post_init__`.

    Raises:
        FieldError: a value is of another type or out of its range; the first such field is named.
    """
    for name, hint, default, limits in fields_of(type(settings)):
        value = getattr(settings, name)
        if _accepts(hint, value, limits):
            continue
        if isinstance(value, int) and value > _LARGEST and limits.most is None:
            limits = dataclasses.replace(limits, most=_LARGEST)
        example = f", e.g. {default!r}" if get_origin(hint) is tuple and default else ""
        note = f"; {limits.note}" if limits.note else ""
        raise FieldError(settings, name, f"give {in_words(hint, limits)}{example}{note}")


class Checked:
    """A base of dataclasses that check their fields when they are made, see `check_fields`."""

    def __post_init__(self) -> None:
        check_fields(self)


def fields_of(cls: Any) -> tuple[tuple[str, Any, Any, Limits], ...]:
    """Return name, annotation, default (None where there is none) and limits of each field."""
    hints, rows = get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        hint = hints[field.name]
        hint = type(default) if dataclasses.is_dataclass(default) and get_origin(hint) not in _UNIONS else hint
        rows.append((field.name, hint, default, field.metadata.get("limits", Limits())))
    return tuple(rows)


def _accepts(hint: Any, value: Any, limits: Limits) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in _UNIONS:
        return any(_accepts(part, value, limits) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind is tuple:
        if not isinstance(value, tuple) or len(value) < limits.fewest:
            return False
        expected = parts[:1] * len(value) if parts[-1] is ... else parts
        inner = dataclasses.replace(limits, fewest=0)
        return len(expected) == len(value) and all(map(_accepts, expected, value, [inner] * len(value)))
    if kind is dict:
        return isinstance(value, dict) and all(_accepts(parts[1], item, limits) for item in value.values())
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is int:
        return isinstance(value, int) and limits.hold(value) and (limits.most is not None or value <= _LARGEST)
    if hint is float:
        return isinstance(value, int | float) and -_INFINITY < value < _INFINITY and limits.hold(value)
    return isinstance(value, hint)


def in_words(hint: Any, limits: Limits) -> str:
    """Return what an annotation asks for, in words."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in _UNIONS:
        return " or ".join(in_words(part, limits) for part in parts if limits.in_config or part is not type(None))
    if kind is Literal:
        return f"one of {', '.join(str(part) or repr(part) for part in parts)}"
    if kind is tuple and parts[-1] is ...:
        return f"a tuple{' of at least one element' * (limits.fewest > 0)}, each {in_words(parts[0], limits)}"
    if kind is tuple:
        return f"({', '.join(in_words(part, limits) for part in parts)})"
    if kind is dict:
        return f"NAME = {in_words(parts[1], limits)}"
    names = {int: f"a whole number{limits}", float: f"a number{limits}", str: "a text", bool: "True or False"}
    name = "a section with keys of its own" if dataclasses.is_dataclass(hint) else hint.__name__
    return names.get(hint, "None" if hint is type(None) else name)
