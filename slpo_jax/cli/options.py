"""The command line of `slpo train`, put as absl's and ml_collections' flags take it."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from slpo_jax.config.config_files import find_config
from slpo_jax.errors import UserError

_DATA = re.compile(r"--?(train|valid|test|base)(?:=(.*))?", re.DOTALL)
_EVAL_SET = re.compile(r"--?config\.data\.eval\.([^.=]+)(?:=(.*))?", re.DOTALL)
_FIELD = re.compile(r"--?config\.data\.fields\.(\w+)(?:=(.*))?", re.DOTALL)
KEYS = {"train": "data.train", "valid": "data.valid", "base": "init"}
"""Of the config, by flag."""


class Data(NamedTuple):
    """The user's own data, where a flag names them.

    Attributes:
        sources: of train, valid and base.
        tests: sources by the name of the set.
    """

    sources: dict[str, str]
    tests: dict[str, str]


def take_data(argv: list[str]) -> tuple[list[str], Data]:
    """The arguments without --train, --valid, --test and --base, and those.

    Raises:
        UserError: one without a value, or two sets of one name.
    """
    rest, data = list[str](), Data({}, {})
    for name, value, arg in _taken(argv, _DATA):
        if not name:
            rest.append(arg)
        elif not value:
            raise UserError(f"--{name}: no source; give a file, a hub id or a synthetic set")
        elif name == "test":
            named = re.fullmatch(r"([\w-]+)=(.+)", value, re.DOTALL)
            stem = re.sub(r"[^\w-]", "_", Path(value).stem)
            name, value = (named[1], named[2]) if named else (stem, value)
            if name in data.tests:
                raise UserError(f"--test={value}: another set is called {name} too; give this one a name, NAME=FILE")
            data.tests[name] = value
        else:
            data.sources[name] = value
    return rest, data


def check_once(given: Mapping[str, str], keys: Collection[str]) -> None:
    """Refuse what would be dropped.

    Args:
        given: what flags or arguments set, by key of the config: as it was written.
        keys: of the config, that were set as such.
    Raises:
        UserError: one of them is there already.
    """
    for key, written in given.items():
        if key in keys:
            raise UserError(f"{written}: config.{key} is given too; leave one of the two out")


def take_eval_sets(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without the data sets to evaluate on, and those: their names are the user's, not keys that exist.

    Raises:
        UserError: one without a source.
    """
    rest, found = list[str](), dict[str, str]()
    for name, value, arg in _taken(argv, _EVAL_SET):
        if not name:
            rest.append(arg)
        elif not value:
            raise UserError(f"config.data.eval.{name}: no source; give a file, a hub id or a synthetic set")
        else:
            found[name] = value
    return rest, found


def take_fields(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without names of a record's fields, and those."""
    taken = _taken(argv, _FIELD)
    return [arg for name, _, arg in taken if not name], {name: value for name, value, _ in taken if name}


def _taken(argv: list[str], flag: re.Pattern[str]) -> list[tuple[str, str, str]]:
    """(name, value, "") of each flag of a kind, whose value may be the next argument; ("", "", argument) of others."""
    found, left = list[tuple[str, str, str]](), list(argv)
    while left:
        arg = left.pop(0)
        match = flag.fullmatch(arg)
        if match is None:
            found.append(("", "", arg))
        else:
            value = match[2] if match[2] is not None else left.pop(0) if left else ""
            found.append((match[1], value, ""))
    return found


def derived_later() -> str:
    """The config that is chosen from the data once the flags that go first are read."""
    return find_config("own:")


def with_config(argv: list[str], data: Data) -> list[str]:
    """The arguments with the config's path, where a name was given or it is to be chosen from the data.

    Raises:
        UserError: there is no such config, or data are given that nothing is to be done with.
    """
    sources = dict(data.sources)
    place = next((number for number, arg in enumerate(argv) if re.match(r"--?config(=|$)", arg)), len(argv))
    before, named, after = argv[:place], argv[place : place + 1], argv[place + 1 :]
    if not named and "train" in sources:
        return [argv[0], f"--config={derived_later()}", *argv[1:]]  # a key comes after it
    if "base" in sources:
        raise UserError("--base: goes with --train and without a config; beside a config give --config.init")
    if not named:
        return argv
    flag, given, path = named[0].partition("=")
    path, after = (path, after) if given else ("".join(after[:1]), after[1:])
    keys = [f"--config.{KEYS[name]}={source}" for name, source in sources.items()]
    return [*before, f"{flag}={find_config(path)}", *after, *keys]
