"""JSON that every reader of JSON takes."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from slpo_jax.api.solver import Latent, Solution
from slpo_jax.cli import reasoner_commands
from slpo_jax.cli.reasoner_commands import evaluate, solve
from slpo_jax.io.files import to_json


def _strictly(text: str):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (math.nan, None),
        ({"a": [1.5, math.inf, {"b": -math.inf}]}, {"a": [1.5, None, {"b": None}]}),
        ((math.nan, "NaN"), [None, "NaN"]),
        ({"a": 1, "b": [True, None, 0.1]}, {"a": 1, "b": [True, None, 0.1]}),
    ],
)
def test_json_has_no_word_for_nan(value, read):
    assert _strictly(to_json(value)) == read
    assert to_json(read, indent=1) == json.dumps(read, indent=1)


@pytest.mark.parametrize("command", [solve, evaluate])
def test_what_the_commands_print_is_json(monkeypatch, capsys, command):
    solution = Solution("Q?", "3", "3", [Latent(math.nan, [("3", math.nan)], np.zeros(2))], cut=False)
    config = SimpleNamespace(init="run", reasoner="coconut_gpt2")
    solver = SimpleNamespace(stopping="threshold", rule=0.5, reads=None)
    found = SimpleNamespace(summary={"n": 1, "acc": math.nan})
    made = SimpleNamespace(config=config, solver=solver, solve=lambda *_: solution, evaluate=lambda *_: found)
    monkeypatch.setattr(reasoner_commands, "_load", lambda _: made)
    command(["run", "--json", "Q?"])
    printed = _strictly(capsys.readouterr().out)
    assert printed.get("acc", 0) is None or printed["latents"] == [{"stop_probability": None, "nearest": [["3", None]]}]
