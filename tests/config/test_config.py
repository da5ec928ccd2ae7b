"""Every key of the config refuses what no run could use, before any work, in one line that names it."""

import dataclasses
import functools
import math
import operator
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from ml_collections import ConfigDict

from refused import one_line
from slpo_jax.config import Config, default_config
from slpo_jax.config.config_checks import check
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.training.objectives import OBJECTIVES

HUGE = 2**70


def _hint(key: str) -> Any:
    """The annotation of a key's field, found by walking the dataclasses from `Config`."""
    owner: Any = Config()
    *names, last = key.split(".")[1:]
    if names[:1] == ["objective"]:
        owner = OBJECTIVES[names[1]]()
        names = []
    for name in names:
        owner = getattr(owner, name)
    assert last in {field.name for field in dataclasses.fields(owner)}, (
        f"{key} is in no dataclass"
    )
    return get_type_hints(type(owner))[last]


def _bad_values(hint: Any) -> list[Any]:
    """Values that a field with this annotation has to refuse, whatever its range."""
    kind = get_origin(hint)
    parts = get_args(hint)
    if kind in (Union, types.UnionType):
        refused = [_bad_values(part) for part in parts if part is not type(None)]
        return [value for values in refused for value in values if value is not None]
    if kind is Literal:
        return [value for value in ("", f"{parts[0]}x", None, 1) if value not in parts]
    if kind is tuple:
        return [
            "x",
            None,
            1,
            *((value,) for value in _bad_values(parts[0]) if value is not None),
        ]
    if kind is dict:
        return [{"name": 1}, {"a/b": "file"}, {"": "file"}]
    if hint is int:
        return [-1, -HUGE, HUGE, math.nan, 0.5, True, "1", None]
    if hint is float:
        return [math.nan, math.inf, -math.inf, -1.0, 10**400, True, "1", None]
    return {bool: [0, 1, None, "True"], str: [1, None, True]}[hint]


KEYS = [f"config.{key}" for key in ("data.eval", *flatten(default_config().to_dict()))]


def _check(changes: dict[str, Any]) -> None:
    """The default config with values that no type check has seen."""
    tree = default_config().to_dict()
    for key, value in changes.items():
        *path, name = key.removeprefix("config.").split(".")
        functools.reduce(operator.getitem, path, tree)[name] = value
    check(ConfigDict(tree))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_range(key):
    for value in _bad_values(_hint(key)):
        if key == "config.rl.truncated_value" and value == -1.0:
            continue  # a reward may be below zero
        line = one_line(functools.partial(_check, {key: value}), "is not valid; ")
        assert line.startswith(f"{key}: ")
        assert len(line) < 300


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("config.imitate.recipe", "icott", "curriculum, frontier, distil, icot"),
        ("config.evaluate.thresholds", (0.5, 0.05, 0.5), "give each once"),
        ("config.evaluate.datasets", ("same", "same"), "give each once"),
    ],
)
def test_the_remedy_says_more_than_the_range(key, value, said):
    """Which docs/configuration.md has of every key."""
    assert one_line(lambda: _check({key: value}), said).startswith(f"{key}: ")


MADE = {"data.eval.made": "synthetic:test"}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("cold_start.train_backbone", MADE | {"cold_start.train_backbone": True}),
        ("data.eval", {}),
        (
            "model.n_embd",
            MADE | {"reasoner": "codi_llama", "model.n_embd": 30, "model.n_head": 10},
        ),
        ("model.n_kv_head", MADE | {"reasoner": "coconut_llama", "model.n_kv_head": 5}),
    ],
)
def test_what_spans_several_keys(key, changes):
    with pytest.raises(UserError, match=rf"^config\.{key}: .*$") as caught:
        _check(changes)
    assert "\n" not in str(caught.value)
    if key == "model.n_embd":  # a checkpoint's shapes are its own
        _check(changes | {"init": "somewhere"})


@pytest.mark.parametrize(
    ("name", "node", "said"),
    [
        (
            "mine",
            {"kind": "nosuch"},
            r"config\.objective\.mine\.kind: 'nosuch' is not valid; give one of slpo, ",
        ),
        (
            "mine",
            5,
            r"config\.objective\.mine: 5 is not valid; give a section with keys of its own",
        ),
        (
            "mine",
            {},
            r"config\.objective\.mine\.kind: 'mine' is not valid; give one of slpo, ",
        ),
        (
            "mine",
            {"kind": "slpo", "passess": 3},
            r"config\.objective\.mine\.passess: unknown config key; use one of ",
        ),
        (
            "imitate",
            {"kind": "slpo"},
            r"config\.objective\.imitate: a stage or a row of the report has this name",
        ),
        (
            "a/b",
            {"kind": "slpo"},
            r"config\.objective\.a/b: a stage or a row of the report has this name",
        ),
        (
            "a-b",
            {"kind": "slpo"},
            r"config\.objective\.a-b: a stage or a row of the report has this name",
        ),
    ],
)
def test_a_further_objective_that_is_none(name, node, said):
    with pytest.raises(UserError, match=said):
        _check(MADE | {f"objective.{name}": node})
