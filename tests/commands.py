"""The commands that pages and results name, and what keeps one from being begun in this checkout. Nothing is run."""

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from runs import TABLES
from slpo_jax.cli.command import CommandParser, take_keys
from slpo_jax.cli.commands import function_of
from slpo_jax.cli.train import train
from slpo_jax.config import config_checks
from slpo_jax.errors import FlagParser, UserError
from slpo_jax.run.own_data_settings import KEYS
from slpo_jax.run.requested_config import requested_config

ROOT = Path(__file__).resolve().parents[1]
_COMMAND = re.compile(r"\b(?:python (?:-m )?[\w/]+\.|slpo [a-z])(?:(?! ?;|, ).)*")
_STANDS_FOR = {"NAME": "quickstart", "SEED": "0", "N": "2", "I": "0", "METHOD": "slpo"}


class _Parsed(BaseException):
    """What a parser made of a command's arguments, in place of what the command does with it."""


def commands_in(text: str) -> list[str]:
    """The commands of a text, each up to a semicolon, or a comma and a blank."""
    return _COMMAND.findall(" ".join(text.split()))


def config_of(words: list[str]) -> Any:
    """The checked config of a command that trains by one.

    Args:
        words: "slpo train" or "python -m slpo_jax.main", and what follows.
    Raises:
        UserError: it can't be used.
    """
    rest, keys = take_keys(words[2 if words[0] == "slpo" else 3 :])
    given = _parsed("slpo_jax.main", rest)
    start = given.config or given.start
    return config_checks.check(
        requested_config(start, dict.fromkeys(KEYS, ""), {}, keys, lambda _: None)
    )


def trains(words: list[str]) -> bool:
    """Whether a command trains by a config, not by settings that are chosen from files of the user's own."""
    is_train = words[:2] == ["slpo", "train"] or words[:3] == [
        "python",
        "-m",
        "slpo_jax.main",
    ]
    return is_train and not any(word.startswith("--train=") for word in words)


def fault(words: list[str]) -> str:
    """What is wrong with a command's program, flags, config or table; "" if nothing is, or if it isn't one of ours."""
    words = [
        re.sub(r"\b[A-Z]+\b", lambda name: _STANDS_FOR.get(name[0], name[0]), word)
        for word in words
    ]
    if words[0] not in ("slpo", "python") or words[1] == "-c":
        return ""
    name, arguments = (
        ("slpo_jax", words[1:]) if words[0] == "slpo" else (words[1], words[2:])
    )
    if name == "-m":
        name, *arguments = arguments
        if not name.startswith(("slpo_jax", "benchmarks")):
            return ""
    path = ROOT / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
    path = ROOT / "slpo_jax" / "__main__.py" if name == "slpo_jax" else path
    if not path.is_file() or not ("__main__" in path.read_text() or name == "slpo_jax"):
        return f"{name}: no such program"
    try:
        if name == "slpo_jax":
            function_of(arguments[0])
        if not arguments[name == "slpo_jax" :]:  # the program is named, not called
            return ""
        found = _parsed(name, arguments)
        if trains(words):
            config_of(words)
    except UserError as error:
        return f"{name}: {error}"
    only = found.only.split(",") if name == "launch/reproduce.py" and found.only else []
    unknown = (
        sorted({*only} - {run.name for run in TABLES[found.name].runs}) if only else []
    )
    return f"{name}: --only has {', '.join(unknown)}" if unknown else ""


def _parsed(name: str, arguments: list[str]) -> Any:
    """What a program's parser makes of its arguments, None where it has no parser.

    Raises:
        UserError: they can't be used.
    """

    def stop(parse):
        def parse_and_stop(parser, arguments):
            raise _Parsed(parse(parser, arguments))

        return parse_and_stop

    def refuse(parser, message):
        raise _Parsed(UserError(message))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlagParser, "parse_args", stop(FlagParser.parse_args))
        patch.setattr(
            CommandParser,
            "parse_intermixed_args",
            stop(CommandParser.parse_intermixed_args),
        )
        patch.setattr(FlagParser, "error", refuse)
        try:
            _main(name)(arguments)
        except _Parsed as parsed:
            if isinstance(parsed.args[0], UserError):
                raise parsed.args[0] from None
            return parsed.args[0]
    return None


def _main(name: str) -> Any:
    """What is called with a program's arguments."""
    if name == "slpo_jax":
        return lambda arguments: function_of(arguments[0])(arguments[1:])
    if name == "slpo_jax.main":
        return train
    if name.endswith(".py") and not name.startswith("launch/"):
        return lambda _: None
    module = importlib.import_module(Path(name).stem if name.endswith(".py") else name)
    main = getattr(module, "main", None)
    return main if main and inspect.signature(main).parameters else lambda _: None


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)
