"""Files: JSON that every reader takes; a folder in the place of another, killed at every step: the old or the new."""

import contextlib
import ctypes
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from slpo_jax.api.solver import Latent, Solution
from slpo_jax.cli import reasoner_commands
from slpo_jax.cli.reasoner_commands import evaluate, solve
from slpo_jax.io import files
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
    solution = Solution(
        "Q?", "3", "3", [Latent(math.nan, [("3", math.nan)], np.zeros(2))], cut=False
    )
    config = SimpleNamespace(init="run", reasoner="coconut_gpt2")
    solver = SimpleNamespace(stopping="threshold", rule=0.5, reads=None)
    found = SimpleNamespace(summary={"n": 1, "acc": math.nan})
    made = SimpleNamespace(
        config=config,
        solver=solver,
        solve=lambda *_: solution,
        evaluate=lambda *_: found,
    )
    monkeypatch.setattr(reasoner_commands, "_load", lambda _: made)
    command(["run", "--json", "Q?"])
    printed = _strictly(capsys.readouterr().out)
    assert printed.get("acc", 0) is None or printed["latents"] == [
        {"stop_probability": None, "likeliest": [["3", None]]}
    ]


OLD = {"a": "old", "b": "old", "sub/c": "old"}
NEW = {"a": "new", "d": "new", "sub/e": "new"}
REST = {"notes": "mine", "more/x": "mine"}


class Killed(BaseException):
    """Nothing is cleaned up after it."""


def _fill(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _texts(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _replace(folder):
    with files.whole_folder(folder, ["a", "b", "sub"]) as made:
        _fill(made, NEW)


def _kill(patch, at):
    """Every change of the disk fails from the one of this number on."""
    left = [at]

    def dying(own):
        def call(*arguments, **more):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return own(*arguments, **more)

        return call

    for name in ("rename", "replace", "unlink", "rmdir", "link", "mkdir", "chmod"):
        patch.setattr(os, name, dying(getattr(os, name)))
    return left


@pytest.mark.parametrize("at_once", [True, False])
def test_a_kill_leaves_the_old_one_or_the_new_one(tmp_path, monkeypatch, at_once):
    if not at_once:  # as on other systems than Linux
        monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    at = 0
    seen = []
    whole = [OLD | REST, NEW | REST]
    while True:
        folder = tmp_path / str(at) / "out"
        _fill(folder, OLD | REST)
        with monkeypatch.context() as patch:
            left = _kill(patch, at)
            with contextlib.suppress(Killed):
                _replace(folder)
            if left[0] >= 0:
                break
        beside = [
            _texts(path)
            for path in folder.parent.iterdir()
            if path.name.startswith(".out.")
        ]
        assert _texts(folder) in whole if folder.exists() else OLD | REST in beside
        seen.append(whole.index(_texts(folder)) if folder.exists() else "beside")
        at += 1
    assert set(seen) == ({0, 1} if at_once else {0, 1, "beside"})
    assert _texts(folder) == NEW | REST
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("links", [True, False])
def test_what_is_not_replaced_stays_as_it_was(tmp_path, monkeypatch, links):
    """Modes and links too, through a link to the folder, and where a file can't have two names."""
    folder = tmp_path / "out"
    linked = tmp_path / "linked"
    _fill(folder, OLD | REST)
    (folder / "notes").chmod(0o600)
    (folder / "gone").symlink_to("nowhere")
    folder.chmod(0o750)
    linked.symlink_to(folder)
    if not links:
        monkeypatch.setattr(
            os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links"))
        )
    _replace(linked)
    assert linked.readlink() == folder
    assert _texts(folder) == NEW | REST
    assert os.readlink(folder / "gone") == "nowhere"
    assert [
        oct(path.stat().st_mode & 0o777) for path in (folder, folder / "notes")
    ] == ["0o750", "0o600"]
    assert (folder / "notes").stat().st_nlink == 1


def test_an_error_leaves_the_old_one_and_nothing_beside_it(tmp_path):
    folder = tmp_path / "out"
    _fill(folder, OLD | REST)
    for fails in (
        lambda made: 1 / 0,
        lambda made: (_fill(made, NEW), made.joinpath("d").rename(made)),
    ):
        with (
            pytest.raises((ZeroDivisionError, OSError)),
            files.whole_folder(folder, OLD) as made,
        ):
            fails(made)
    assert _texts(folder) == OLD | REST
    assert [*tmp_path.iterdir()] == [folder]


def test_a_new_folder_takes_an_empty_one_s_place(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "out", tmp_path / "empty"):
        with files.whole_folder(folder) as made:
            _fill(made, NEW)
        assert _texts(folder) == NEW
        assert folder.stat().st_mode & 0o777 == 0o755


_KILLED = """
import os, sys
from pathlib import Path
from slpo_jax.io import files

with files.whole_folder(Path(sys.argv[1])) as made:
    made.joinpath("a").write_text("b")
    print("made", flush=True)
    sys.stdin.readline()
    os._exit(1)
"""


def test_what_a_killed_process_left_is_removed_and_what_another_is_writing_is_not(
    tmp_path,
):
    folder = tmp_path / "out"
    command = [sys.executable, "-c", _KILLED, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "made\n"
        (left,) = tmp_path.iterdir()
        with files.whole_folder(folder) as made:
            _fill(made, NEW)
        assert left.joinpath("a").exists()
        process.communicate("\n")
    with files.whole_folder(folder, NEW) as made:
        _fill(made, NEW)
    assert [*tmp_path.iterdir()] == [folder]
