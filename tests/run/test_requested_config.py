"""The one config of a command or a call: its layers, and what has set a key."""

import csv
from pathlib import Path

import pytest

from slpo_jax.config import Config
from slpo_jax.config.overrides import Text, merge_settings, values
from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten
from slpo_jax.run import own_data_settings
from slpo_jax.run.requested_config import requested_config
from slpo_jax.training.objectives import OBJECTIVES


def _table(folder: Path) -> str:
    """A file of 40 problems."""
    path = folder / "t.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "answer"])
        rows.writerows([f"{n} + 1 ?", n + 1] for n in range(40))
    return str(path)


def test_nested_keys_leave_a_section_s_others_as_they_are():
    def asked(changes):
        config = requested_config(
            "quickstart",
            dict.fromkeys(("train", "valid", "base"), ""),
            {},
            changes,
            str,
        )
        return flatten(values(config))

    plain = asked({})
    nested = asked({"rl": {"optimizer": {"warmup_steps": 1}}})
    assert {key for key in plain if plain[key] != nested[key]} == {
        "rl.optimizer.warmup_steps"
    }
    assert merge_settings(Config(), {"rl": Text("{'steps': 7}")}) == merge_settings(
        Config(), {"rl.steps": 7}
    )
    sets = {"data.eval": {"mine": "graph:1"}}
    assert {key for key in asked(sets) if key.startswith("data.eval")} == {
        "data.eval.mine"
    }
    for further in (
        {"objective.mine": {"kind": "grpo"}},
        {"objective": {"mine": {"kind": "grpo"}}},
    ):
        assert asked(further) == plain | flatten(
            {"objective": {"mine": values(OBJECTIVES["grpo"](kind="grpo"))}}
        )
    flags = {"objective.mine.kind": Text("grpo"), "objective.mine.clip": Text("0.5")}
    assert merge_settings(Config(), flags).objective["mine"] == OBJECTIVES["grpo"](
        kind="grpo", clip=0.5
    )


def test_what_is_given_stays_as_it_is(tmp_path):
    sources = {"train": _table(tmp_path), "valid": "", "base": ""}
    keys = {"max_latents": 1}
    own = requested_config("", sources, {}, keys, str)
    assert (own.max_latents, own.min_latents) == (
        1,
        1,
    )  # the least follows from what is given


class Asked(Exception):
    """Somebody is about to ask jax for devices."""


def test_jax_is_set_up_before_a_base_asks_for_devices(tmp_path, monkeypatch):
    """As one of ours does, whose parameters are listed; with a config too nothing is asked before."""
    begun = []

    def asks(*_):
        raise Asked

    monkeypatch.setattr(own_data_settings, "identify", asks)
    sources = {"train": _table(tmp_path), "valid": "", "base": str(tmp_path)}
    with pytest.raises(Asked):
        requested_config("", sources, {}, {"cpu_devices": 3}, begun.append)
    requested_config(
        "quickstart", dict.fromkeys(sources, ""), {}, {"cpu_devices": 2}, begun.append
    )
    assert begun == [3, 2]
    with pytest.raises(UserError, match=r"^config\.cpu_devices: 0"):
        requested_config("", sources, {}, {"cpu_devices": 0}, begun.append)


def test_a_base_is_refused_by_the_name_of_its_flag(tmp_path):
    sources = {
        "train": _table(tmp_path),
        "valid": "",
        "base": str(tmp_path / "nothing"),
    }
    with pytest.raises(UserError, match=r"^--base: .*nothing"):
        requested_config("", sources, {}, {}, lambda _: None)
