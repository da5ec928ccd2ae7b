"""The one exception that means "the user can mend this", and flags that raise it."""

import argparse
from typing import Any, NoReturn


class UserError(Exception):
    """Bad input. The message is one line: the key or file at fault, then the remedy.

    `slpo_jax.main` prints it without a traceback and exits with status 2.
    """


class SaveError(UserError):
    """A checkpoint can't be written. Of what was writing it some threads may never end, which nothing may wait for."""


class FlagParser(argparse.ArgumentParser):
    """A command's flags, with what is wrong in them as a `UserError` instead of usage and an exit.

    None may be abbreviated.
    """

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")
