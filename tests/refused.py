"""What a command or a function refuses its work with, in this process."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slpo_jax.cli.command import refused
from slpo_jax.cli.commands import function_of
from slpo_jax.errors import UserError


def refusal(command: str, *arguments: str, folder: Path) -> str:
    """The line that `slpo COMMAND ARGUMENTS` ends with in a folder."""
    function = function_of(command)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        for module in ("runtime.backend", "cli.train"):
            patch.setattr(f"slpo_jax.{module}.set_up_jax", lambda *_: None)
        with pytest.raises((UserError, OSError)) as caught:
            function(list(arguments))
    said = str(caught.value) if caught.type is UserError else refused(caught.value)
    assert os.linesep not in said
    assert len(said) < 480
    return said


def one_line(
    action: Callable[[], object], *parts: str, match: str | None = None
) -> str:
    """The line that an action fails with, which has these parts and a remedy; `match` is as pytest's."""
    with pytest.raises(UserError, match=match) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for part in (*parts, ";"):  # what follows the semicolon is the remedy
        assert part in message
    return message
