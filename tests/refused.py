"""What a command refuses its work with, in this process: its own parser and `main`, up to the error."""

import contextlib
import importlib
import os
from pathlib import Path

import pytest
from absl.testing import flagsaver

from slpo_jax.cli import command
from slpo_jax.cli.commands import as_module
from slpo_jax.errors import UserError


def refusal(*arguments: str, folder: Path) -> str:
    """The line that `slpo ARGUMENTS` ends with in a folder; `tests/cli/test_command.py` has how it is printed.

    Args:
        arguments: of train, data, solve or eval; whose flags are forgotten again.
    """
    said: list[str] = []

    def run_command(main, parse=command.parse_flags, goes_on=True) -> None:
        with pytest.raises((UserError, OSError)) as caught:
            main(parse(["slpo", *argv]))
        said.append(str(caught.value) if caught.type is UserError else command._refused(caught.value))

    name, argv = as_module(list(arguments))
    module = importlib.import_module("slpo_jax.cli.main" if arguments[0] == "train" else name)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), flagsaver.flagsaver():
        patch.setattr(module, "run_command", run_command)
        patch.setattr("slpo_jax.io.backend.set_up_jax", lambda *_: None)
        patch.setattr(module, "set_up_jax", lambda *_: None, raising=False)
        module.run()
    assert os.linesep not in said[0]
    assert len(said[0]) < 400
    return said[0]
