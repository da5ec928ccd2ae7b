"""Who is stuck, by a store that several watches share."""

import json

import pytest

from slpo_jax.runtime import hosts


class Store:
    """What jax.distributed keeps for all."""

    def __init__(self, **places):
        self.texts = {
            f"slpo_jax/place/{index[1:]}": json.dumps(place)
            for index, place in places.items()
        }

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite
        self.texts[key] = value

    def key_value_dir_get(self, folder):
        return [
            (key, text) for key, text in self.texts.items() if key.startswith(folder)
        ]


def _watch(monkeypatch, store, pauses, happens=dict):
    """The lines, after so many pauses of which each may change what is there."""
    monkeypatch.setattr(hosts, "_begun", 7)
    monkeypatch.setattr(hosts, "_last", "slpo, step 3")
    lines = []
    passed = []

    def pause(seconds):
        passed.append(seconds)
        happens().get(len(passed), lambda: None)()
        return len(passed) > pauses

    monkeypatch.setattr(hosts, "_count", 3)
    hosts.watch(40.0, store, pause, lines.append)
    return lines, passed


def test_a_watchdog_names_the_process_that_is_behind_and_its_step(monkeypatch):
    """After the time that was set, 20 pauses of a twentieth; the first that saw the places is not one of them."""
    store = Store(
        _1=[5, "slpo, step 2", "node7, PID 9"], _2=[7, "slpo, step 3", "node8, PID 9"]
    )
    (line,), passed = _watch(monkeypatch, store, 100)
    assert line.startswith(
        "stuck for 40 s, of 3 processes: process 1 (node7, PID 9) after slpo, step 2; the others"
    )
    assert "config.stuck_after" in line
    assert "\n" not in line
    assert passed == [2.0] * 21


def test_a_watchdog_names_who_never_began_and_several(monkeypatch):
    assert (
        "process 2 (unknown) after its start;"
        in _watch(monkeypatch, Store(_1=[7, "a", "n"]), 100)[0][0]
    )
    (line,), _ = _watch(
        monkeypatch,
        Store(_1=[7, "slpo, step 3", "n"], _2=[7, "slpo, step 3", "n"]),
        100,
    )
    assert [f"process {n} (" in line for n in range(3)] == [True] * 3
    assert "the others" not in line


@pytest.mark.parametrize("who", [0, 1])
def test_a_watchdog_lets_a_slow_run_be(monkeypatch, who):
    """Any process that gets on is enough; and what is over is not watched."""
    store = Store(_1=[1, "a", "n"], _2=[2, "a", "n"])

    def on():
        if who:
            store.key_value_set(
                "slpo_jax/place/1", json.dumps([99, "b", "n"]), allow_overwrite=True
            )
        else:
            hosts.begin("b")

    assert _watch(monkeypatch, store, 39, lambda: {20: on}) == ([], [2.0] * 40)
