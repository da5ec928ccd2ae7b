"""Config files by name: those of `configs/`, which the package brings along, and the user's own."""

import ast
import re
from pathlib import Path

from ml_collections import ConfigDict

from slpo_jax.config.registry import run_file
from slpo_jax.errors import UserError

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
    file = Path(path).expanduser()
    name = re.fullmatch(r"(?:configs/)?([\w-]+)(?:\.py)?", path)
    if not file.is_file() and name:
        ours = shipped_folder() / f"{name[1]}.py"
        file = ours if ours.is_file() else file
    if not file.is_file():
        what = "is empty" if not path else "a directory" if file.is_dir() else "no such file"
        raise UserError(f"--config={path}: {what}; give a file, or one of {', '.join(shipped())}")
    return f"{file}{colon}{argument}"


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
