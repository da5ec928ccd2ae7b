"""Frozen dataclasses that say each field's default and range once, check themselves, and are sections of a config.

    @dataclass(frozen=True)
    class Sampling(Checked):
        group: int = setting(8, least=2)
        temperature: float = setting(0.0, least=0)
        stopping: Literal["sample", "threshold"] = "sample"

Annotations are checked too: numbers have to be finite, a bool is not a number, a `Literal` lists the choices, a range
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
        if self.least is not None and value < self.least:
            return False
        if self.most is not None and value > self.most:
            return False
        if self.above is not None and value <= self.above:
            return False
        return self.below is None or value < self.below

    def __str__(self) -> str:
        """Return the range, to come after "a number"."""
        upper = ""
        if self.below is not None:
            upper = f"below {self.below}"
        elif self.most is not None:
            upper = f"{self.most}"
        if self.least is not None and upper:
            return f" from {self.least} to {upper}"
        if self.least is not None:
            return f", {self.least} or more"
        text = "" if self.above is None else f" above {self.above}"
        if upper:
            text += f", up to {upper}"
        return text


class FieldError(UserError):
    """A field's value can't be used.

    Args:
        settings: the dataclass that the field belongs to.
        field: the field's name.
        remedy: what to give instead.
    """

    def __init__(self, settings: Any, field: str, remedy: str):
        shown = repr(getattr(settings, field))
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        key = f"{type(settings).__name__}.{field}"
        super().__init__(key, f"{shown} is not valid; {remedy}")
        self.field = field


def setting(
    default: Any = dataclasses.MISSING,
    *,
    make: Callable[[], Any] | None = None,
    **limits: Any,
) -> Any:
    """Return a dataclass field with a range.

    Args:
        default: its default; without one, the field is required.
        least: the least number allowed, of a tuple's elements as well.
        most: the largest number allowed.
        above: a number that it must be larger than.
        below: a number that it must be smaller than.
        fewest: elements that a tuple must have.
        note: what a special value means, for the error message: "0 keeps all".
        in_config: False for what is known only when the dataclass is built: it is not a key of the config's section,
            and messages don't ask for None.
        entry: of a dict of sections: (key of one, what it is or None, (key in it, value) of each change) -> what the
            changes are of.
        make: makes the default when it is asked for, as what is registered by then has it.
    """
    metadata = {"limits": Limits(**limits)}
    if isinstance(default, dict):
        make = default.copy
    if make:
        return dataclasses.field(default_factory=make, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def selection(base: Any, field: str, default: str, registry: Mapping[str, type]) -> Any:
    """Return a section whose one field names one of several; the settings of each are sections in it, as by default.

    Args:
        base: what all of them share.
        field: which one is used.
        registry: by name the dataclass of each, those that are registered by now.
    """
    members = tuple(registry.items())
    make = _selection(base, field, default, members)
    return make()


@functools.cache
def _selection(
    base: Any, field: str, default: str, members: tuple[tuple[str, type], ...]
) -> Any:
    # The default is the first name, and stands once.
    names = dict.fromkeys([default])
    sections: list[Any] = []
    for name, cls in members:
        names[name] = None
        sections.append((name, cls, cls()))
    fields = [(field, Literal[*names], setting(default)), *sections]
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
        # Name the bound that every whole number has.
        if isinstance(value, int) and value > _LARGEST and limits.most is None:
            limits = dataclasses.replace(limits, most=_LARGEST)
        remedy = f"give {describe_hint(hint, limits)}"
        if get_origin(hint) is tuple and default:
            remedy += f", e.g. {default!r}"
        if limits.note:
            remedy += f"; {limits.note}"
        raise FieldError(settings, name, remedy)


class Checked:
    """A base of dataclasses that check their fields when they are made, see `check_fields`."""

    def __post_init__(self) -> None:
        check_fields(self)


def fields_of(cls: Any) -> tuple[tuple[str, Any, Any, Limits], ...]:
    """Return name, annotation, default (None where there is none) and limits of each field."""
    hints = get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        default = None
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        hint = hints[field.name]
        # A selection's class is made when it is asked for: it has more fields than the annotation's.
        if dataclasses.is_dataclass(default) and get_origin(hint) not in _UNIONS:
            hint = type(default)
        limits = field.metadata.get("limits", Limits())
        rows.append((field.name, hint, default, limits))
    return tuple(rows)


def _accepts(hint: Any, value: Any, limits: Limits) -> bool:
    kind = get_origin(hint)
    parts = get_args(hint)
    if hint is Any:
        return True
    if kind in _UNIONS:
        return any(_accepts(part, value, limits) for part in parts)
    if kind is Literal:
        # True is not 1.
        same = [part for part in parts if type(part) is type(value)]
        return value in same
    if kind is tuple:
        if not isinstance(value, tuple) or len(value) < limits.fewest:
            return False
        # tuple[int, ...] repeats its one part, other tuples have one for each element.
        expected = parts[:1] * len(value) if parts[-1] is ... else parts
        if len(expected) != len(value):
            return False
        # The number of elements is checked; the range is one of the elements'.
        inner = dataclasses.replace(limits, fewest=0)
        pairs = zip(expected, value, strict=True)
        return all(_accepts(part, item, inner) for part, item in pairs)
    if kind is dict:
        if not isinstance(value, dict):
            return False
        return all(_accepts(parts[1], item, limits) for item in value.values())
    # Python counts a bool as a number.
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is int:
        if not isinstance(value, int):
            return False
        if limits.most is None and value > _LARGEST:
            return False
        return limits.hold(value)
    if hint is float:
        if not isinstance(value, int | float):
            return False
        if not -_INFINITY < value < _INFINITY:
            return False
        return limits.hold(value)
    return isinstance(value, hint)


def describe_hint(hint: Any, limits: Limits) -> str:
    """Describe the values that an annotation allows, for a message."""
    kind = get_origin(hint)
    parts = get_args(hint)
    if kind in _UNIONS:
        # A user can't give None where the program fills the field.
        words = []
        for part in parts:
            if limits.in_config or part is not type(None):
                words.append(describe_hint(part, limits))
        return " or ".join(words)
    if kind is Literal:
        choices = [str(part) or repr(part) for part in parts]
        return f"one of {', '.join(choices)}"
    if kind is tuple and parts[-1] is ...:
        least = " of at least one element" if limits.fewest else ""
        return f"a tuple{least}, each {describe_hint(parts[0], limits)}"
    if kind is tuple:
        elements = [describe_hint(part, limits) for part in parts]
        return f"({', '.join(elements)})"
    if kind is dict:
        return f"NAME = {describe_hint(parts[1], limits)}"
    if dataclasses.is_dataclass(hint):
        return "a section with keys of its own"
    names = {
        int: f"a whole number{limits}",
        float: f"a number{limits}",
        str: "a text",
        bool: "True or False",
        type(None): "None",
    }
    return names.get(hint, hint.__name__)
