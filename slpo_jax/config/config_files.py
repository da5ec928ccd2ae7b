"""Config files by name: those of `configs/`, which the package brings along, and the user's own."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config.registry import run_file
from slpo_jax.errors import UserError

_NAMED = (["data", "eval"], ["objective"])  # sections whose keys are names of the user's
_GYM = ["data", "gym", "settings"]
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder() -> Path:
    """Where the shipped configs are: in the installed package, or beside it in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def shipped() -> dict[str, str]:
    """The shipped configs, each with the first line of what it says of itself."""
    files = sorted(shipped_folder().glob("[!_]*.py"))
    texts = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}
    return {name: text.partition("\n")[0] for name, text in texts.items()}


def find_config(given: str) -> str:
    """The path of a config that is given as a path, a name, or what a checkout calls it, `configs/NAME.py`.

    Args:
        given: with or without ":ARGUMENT" of its `get_config` at its end, which stays.
    Raises:
        UserError: there is neither such a file nor such a name.
    """
    path, colon, argument = given.partition(":")
    found = Path(path).expanduser()
    name = re.fullmatch(r"(?:configs/)?([\w-]+)(?:\.py)?", path)
    if not found.is_file() and name:
        ours = shipped_folder() / f"{name[1]}.py"
        found = ours if ours.is_file() else found
    if not found.is_file():
        what = "is empty" if not path else "a directory" if found.is_dir() else "no such file"
        raise UserError(f"--config={path}: {what}; give a file, or one of {', '.join(shipped())}")
    return f"{found}{colon}{argument}"


def read_config_file(given: str) -> ConfigDict:
    """What `get_config` of a config file returns.

    Args:
        given: as `find_config` takes it.
    Raises:
        UserError: there is no such file, or it fails.
    """
    path, _, argument = find_config(given).partition(":")
    config = run_file(Path(path), f"--config={given}", [shipped_folder()], "get_config", *[argument] * bool(argument))
    if not isinstance(config, ConfigDict):
        raise UserError(f"--config={given}: get_config returns no ConfigDict; begin with slpo_jax.config")
    return config


def override(config: ConfigDict, changes: Mapping[str, Any], texts: bool = False) -> None:
    """Set keys of a config, by dotted name, as `--config.KEY=VALUE` does.

    Args:
        texts: values are as a command line has them, and read as what the key holds.
    Raises:
        UserError: an unknown key. A value of another type is left to what reads the config, which says what it takes.
    """
    for key, value in changes.items():
        *path, name = key.removeprefix("config.").split(".")
        node: Any = config
        if is_free := path[:3] == _GYM:  # a task's own settings, which only the task knows
            tasks = config.data.gym.settings
            tasks.update({task: ConfigDict() for task in path[3:4] if task not in tasks})
        for each in path:
            node = node.get(each) if isinstance(node, ConfigDict) else None
        if not isinstance(node, ConfigDict) or (name not in node and not is_free and path not in _NAMED):
            there = (
                f"use one of {', '.join(sorted(node))}" if isinstance(node, ConfigDict) else "there is no such section"
            )
            raise UserError(f"config.{'.'.join((*path, name))}: unknown config key; {there}")
        if texts:
            value = _read(value, Any if is_free else node.get_type(name) if name in node else str)
        if isinstance(value, dict) and isinstance(node.get(name), ConfigDict) and [*path, name] != ["data", "eval"]:
            override(config, {f"{key}.{own}": each for own, each in value.items()})  # the section's others stay
            continue
        value = ConfigDict(value) if isinstance(value, dict) else value
        try:
            node[name] = value
        except (TypeError, ValueError):
            with node.ignore_type():
                node[name] = value


def _read(text: str, kind: Any) -> Any:
    """A flag's value, as Python writes it; where it can't be read so, the text itself."""
    if kind is str and text != "None":
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if kind is tuple and value is not None:
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    return value
