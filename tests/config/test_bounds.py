"""Dataclasses that check themselves, and the config sections made of them."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

import pytest
from ml_collections import ConfigDict

from refused import one_line
from slpo_jax.config.overrides import Text, merge_settings, section, values
from slpo_jax.errors import UserError
from slpo_jax.settings import FieldError, check_fields, setting


@dataclass(frozen=True)
class Inner:
    rate: float = setting(0.5, least=0, below=1)
    kind: Literal["one", "two"] = "one"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Outer:
    count: int = setting(3, least=1)
    start: int = setting(0, least=0, most=2**32 - 1)
    scale: float = setting(2.0, above=0)
    limit: int | None = setting(None, least=1, note="None is no limit")
    clip: float | None = setting(1.0, above=0)
    on: bool = False
    name: str = "here"
    sizes: tuple[int, ...] = setting((4, 8), least=1, fewest=1)
    sites: tuple[Literal["a", "b"], ...] | None = None
    pairs: tuple[tuple[float, float], ...] = setting(
        ((0.5, 0.25), (1.0, 1.0)), above=0, most=1
    )
    sources: dict[str, str] = field(default_factory=dict)
    inner: Inner = Inner(rate=0.25)
    total: int | None = setting(None, least=1, in_config=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.start > self.count:
            raise FieldError(self, "start", "lower it to count")


TAKEN = {
    "count": (1, 2**31 - 1),
    "scale": (1, 1e-30, 3.5),
    "limit": (None, 1),
    "clip": (None, 2),
    "sizes": ((1,), (1, 2**31 - 1)),
    "sites": (None, (), ("a", "b")),
    "pairs": ((), ((1, 1),)),
    "sources": ({}, {"x": "file"}),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in TAKEN for value in TAKEN[name]]
)
def test_taken(name, value):
    assert getattr(Outer(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "count",
            2**40,
            f"{2**40} is not valid; give a whole number from 1 to {2**31 - 1}",
        ),
        ("scale", math.nan, "nan is not valid; give a number above 0"),
        ("limit", 0, "give a whole number, 1 or more or None; None is no limit"),
        (
            "sizes",
            ("a",),
            "give a tuple of at least one element, each a whole number, 1 or more, e.g. (4, 8)",
        ),
        (
            "sites",
            ("c",),
            "('c',) is not valid; give a tuple, each one of a, b or None",
        ),
        ("start", 5, "5 is not valid; lower it to count"),
        (
            "pairs",
            ((0.0, 1.0),),
            "give a tuple, each (a number above 0, up to 1, a number above 0, up to 1), e.g. ((",
        ),
        ("name", 1, "give a text"),
        ("sizes", "x" * 1000, "... is not valid"),
    ],
)
def test_the_remedy(name, value, said):
    one_line(lambda: Outer(**{name: value}), said)


def test_section_has_the_defaults():
    node = section(Outer())
    assert node.to_dict() == {
        "count": 3, "start": 0, "scale": 2.0, "limit": None, "clip": 1.0, "on": False, "name": "here", "sizes": (4, 8),
        "sites": None, "pairs": ((0.5, 0.25), (1.0, 1.0)), "sources": {}, "inner": {"rate": 0.25, "kind": "one"},
    }  # fmt: skip
    assert isinstance(node.inner, ConfigDict)
    assert isinstance(node.sources, ConfigDict)
    assert section(Outer(count=7, inner=Inner(kind="two"))).inner.kind == "two"
    assert section(Outer(count=7)).count == 7


def test_placeholders_have_the_field_s_type():
    node = section(Outer())
    node.limit = 4
    node.sites = ["a"]
    assert (node.limit, node.sites) == (4, ("a",))
    with pytest.raises(TypeError):
        node.limit = "four"


def test_a_section_is_filled():
    assert merge_settings(Outer(), section(Outer())) == Outer()
    node = section(Outer())
    node.sizes = [2]
    node.inner.rate = 0.75
    node.sources.mine = "file"
    filled = merge_settings(Outer(total=9), node)
    assert filled == Outer(
        sizes=(2,), inner=Inner(rate=0.75), sources={"mine": "file"}, total=9
    )
    assert dataclasses.is_dataclass(filled.inner)


def test_layers_go_over_those_before_them():
    layers = (
        {"count": 4, "inner": {"rate": 0.1}},
        {"inner.kind": "two", "sources": {"b": "y"}},
        {"sources.a": "x"},
    )
    merged = merge_settings(
        Outer(), *layers, {"count": 5, "start": 5}, total=9
    )  # a start beyond the count of before
    assert [*merged.sources] == ["a", "b"]
    assert merged == Outer(
        5, 5, inner=Inner(0.1, "two"), sources={"a": "x", "b": "y"}, total=9
    )
    assert merge_settings(merged, {"sources": {"c": "z"}}).sources == {
        "c": "z"
    }  # given all at once
    assert merge_settings(
        Whole(), {"several": {"a": {"rate": 0.1}}, "several.a.kind": "two"}
    ).several == {"a": Inner(0.1, "two")}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "4", 4), ("scale", "3", 3.0), ("on", "True", True), ("name", "3", "3"), ("limit", "None", None),
        ("clip", "2", 2.0), ("sizes", "3", (3,)), ("sizes", "[3, 4]", (3, 4)), ("sites", "a", ("a",)),
        ("sources", "{'a': '1'}", {"a": "1"}), ("sources.a", "1", {"a": "1"}), ("inner", "{'rate': 0}", Inner(0.0)),
    ],
)  # fmt: skip
def test_a_text_is_read_as_what_its_key_holds(key, text, value):
    read = getattr(merge_settings(Outer(), {key: Text(text)}), key.partition(".")[0])
    assert (read, type(read)) == (value, type(value))


@dataclass(frozen=True)
class Choosing:
    name: str = "one"
    one: Inner = Inner()
    two: Inner = Inner()


@dataclass(frozen=True)
class Whole:
    seed: int = 0
    report: Outer = Outer()
    law: Choosing = Choosing()
    several: dict[str, Inner] = setting({"a": Inner()})

    def __post_init__(self) -> None:
        check_fields(self)


def test_values_are_nested_as_sections_are():
    inner = {"rate": 0.5, "kind": "one"}
    every = values(Whole())
    assert every["law"] == {"name": "one", "one": inner, "two": inner}
    assert every["several"] == {"a": inner}
    assert "total" not in every["report"]


def test_several_values_change_at_once():
    found = merge_settings(
        Whole(),
        {"report.count": 5, "report.start": 4, "law.name": "two", "report.sizes": [1]},
    )
    assert (
        found.report.count,
        found.report.start,
        found.report.sizes,
        found.law.name,
    ) == (5, 4, (1,), "two")
    for key, value, said in (
        ("report.start", 4, "report.start: 4 is not valid; lower it to count"),
        ("report.nosuch", 1, "report.nosuch: unknown config key; use one of"),
        ("seed.inner", 1, "seed.inner: unknown config key"),
        ("report", None, "report: None is not valid"),
    ):
        with pytest.raises(UserError, match=rf"^config\.part\.{said}"):
            merge_settings(Whole(), {key: value}, key="config.part")
