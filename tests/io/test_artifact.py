"""Artifact x what changed: what was made of other facts, is damaged or half written, is never taken for it."""

import json

import numpy as np
import pytest

from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import entries, files_digest, read_json
from slpo_jax.runtime import hosts

FACTS = {"seed": 1, "rates": (0.5, 2), "name": "ä", "gone": float("nan")}
ARRAYS = {"tokens": np.arange(6).reshape(2, 3), "lengths": np.ones(2, np.float32)}


def _made(folder):
    (folder / "below").mkdir()
    (folder / "below" / "x.txt").write_text("x")
    path = folder / "it.json"
    file = folder / "below" / "x.txt"
    artifact.write(path, FACTS, {"answer": 7}, [file, folder / "never there"])
    return path, file


def _replace(old, new):
    return lambda path, file: path.write_text(path.read_text().replace(old, new))


CHANGES = {
    "facts edited": _replace('"seed": 1', '"seed": 2'),
    "value edited": _replace('"answer": 7', '"answer": 8'),
    "digest edited": _replace('"below/x.txt": "', '"below/x.txt": "0'),
    "no digest": lambda path, file: path.write_text(
        json.dumps({"facts": FACTS, "value": 7, "files": {}})
    ),
    "half written": lambda path, file: path.write_text(path.read_text()[:-9]),
    "empty": lambda path, file: path.write_text(""),
    "a list": lambda path, file: path.write_text("[]"),
    "no text": lambda path, file: path.write_bytes(b"\xff\xfe"),
}
FILES = {
    "is gone": lambda path, file: file.unlink(),
    "has changed since it was saved": lambda path, file: file.write_text("y"),
}


def test_what_is_whole_and_of_these_facts_is_current(tmp_path):
    path, _ = _made(tmp_path)
    facts = {"gone": None, **{key: FACTS[key] for key in ("name", "rates", "seed")}}
    assert artifact.is_current(path, facts, ["below/x.txt"])
    assert not artifact.is_current(path, facts, ["below/x.txt", "never there"])
    assert artifact.value_of(path, facts) == {"answer": 7}
    other = facts | {"rates": [0.5, 3]}
    assert not artifact.is_current(path, other)
    assert artifact.value_of(path, other) is None
    assert artifact.read(tmp_path / "none.json", "make it") is None


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_as_it_was_written_is_not_there(tmp_path, name):
    path, file = _made(tmp_path)
    facts = artifact.read(path).facts
    CHANGES[name](path, file)
    assert artifact.read(path) is artifact.value_of(path, facts) is None
    assert not artifact.is_current(path, facts)
    with pytest.raises(UserError, match=rf"^{path}: "):
        artifact.read(path, "delete it")


@pytest.mark.parametrize("how", FILES)
def test_files_are_held_to_the_byte(tmp_path, how):
    path, file = _made(tmp_path)
    FILES[how](path, file)
    found = artifact.read(path)
    assert artifact.find_changed(tmp_path, found.files) == {"below/x.txt": how}
    assert not artifact.is_current(path, found.facts)


@pytest.mark.parametrize(
    "how", ["facts", "an array", "a type", "one more", "cut off", "empty", "gone"]
)
def test_arrays_are_those_that_were_written_of_these_facts(tmp_path, how):
    path = tmp_path / "new" / "1.npz"
    facts = [1, "seed 1"]
    artifact.write_arrays(path, facts, ARRAYS)
    found = artifact.read_arrays(path, facts)
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], ARRAYS[name]) for name in found)
    changes = {
        "an array": {"tokens": ARRAYS["tokens"] + 1},
        "a type": {"lengths": np.ones(2)},
        "one more": {"more": np.ones(1)},
    }
    sizes = {"cut off": 200, "empty": 0}
    if how == "facts":
        facts = [1, "seed 11"]
    elif how == "gone":
        path.unlink()
    elif how in changes:
        with np.load(path) as stored:
            np.savez(path, **dict(stored) | changes[how])
    else:
        path.write_bytes(path.read_bytes()[: sizes[how]])
    assert artifact.read_arrays(path, facts) is None


@pytest.mark.parametrize("kind", ["artifact", "arrays", "a folder"])
def test_what_can_not_be_read_is_not_taken_for_gone(tmp_path, unreadable, kind):
    """Nor for damaged: whoever makes it again would find out last of all."""
    path, file = _made(tmp_path)
    arrays = tmp_path / "1.npz"
    artifact.write_arrays(arrays, FACTS, ARRAYS)
    facts = artifact.read(path).facts
    places = {"artifact": path, "arrays": arrays, "a folder": file.parent}
    where = places[kind]
    reads = {
        "artifact": [
            lambda: artifact.read(path),
            lambda: artifact.read(path, "delete it"),
            lambda: artifact.is_current(path, facts),
            lambda: read_json(path),
            lambda: artifact.value_of(path, facts),
        ],
        "arrays": [
            lambda: artifact.read_arrays(arrays, FACTS),
        ],
        "a folder": [
            lambda: artifact.write_checksums(tmp_path),
            lambda: files_digest(tmp_path),
            lambda: entries(file.parent),
        ],
    }
    for read in reads[kind]:
        with unreadable(where), pytest.raises(PermissionError):
            read()
    assert entries(tmp_path / "none") == entries(path) == []


def test_of_several_processes_the_first_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    artifact.write(tmp_path / "it.json", FACTS)
    artifact.write_arrays(tmp_path / "1.npz", FACTS, ARRAYS)
    assert not list(tmp_path.iterdir())


def test_the_first_difference_is_named():
    now = {"a": {"b": 1, "c": 2}, "d": "x" * 99}
    then = {"d": "x" * 99, "a": {"b": 1, "c": 3}, "e": 1}
    assert artifact.first_difference(now, then) == ("a.c", "2", "3")
    assert artifact.first_difference(now | {"a": then["a"]}, then) == (
        "e",
        "unused",
        "1",
    )
    assert artifact.first_difference(then, then) is None
    assert artifact.first_difference({"a": None}, {}) == ("a", "null", "unused")
    key, long, was = artifact.first_difference({"d": "x" * 99}, {})
    assert (key, len(long), was) == ("d", 78, "unused")
