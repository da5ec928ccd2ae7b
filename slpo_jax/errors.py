"""Errors that mean "the user can mend this", flags that raise them, and the end of a closed pipe."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

_NAMES = ContextVar[Mapping[str, str]]("names")


class UserError(Exception):
    """Bad input. The message is one line: the key or file at fault, then the remedy.

    A command prints it without a traceback and exits with status 2.

    Args:
        *texts: the line; or the key at fault, in the line as `key_name` has it, and the rest.
    """

    def __init__(self, *texts: str):
        self.key, self.problem = ("", *texts)[-2:]
        super().__init__(": ".join((*map(key_name, texts[:-1]), self.problem)))


class SaveError(UserError):
    """A checkpoint can't be written. Of what was writing it some threads may never end, which nothing may wait for."""


def key_name(key: str) -> str:
    """Return the user's name of a key or a flag (`config.max_latents`): itself, or what `naming` says."""
    return _NAMES.get({}).get(key, key)


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Have messages name keys and flags by these names."""
    token = _NAMES.set(names)
    try:
        yield
    finally:
        _NAMES.reset(token)


@contextlib.contextmanager
def about(subject: str) -> Iterator[None]:
    """Have errors begin with what they are about, a key or a file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{subject}: {error}") from None


def first_line(error: BaseException) -> str:
    """Return what a library says of a failure, for a message of one line."""
    return (
        (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:200]
    )


def in_a_line(error: BaseException) -> str:
    """Return what a user's own code raised, for a message of one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class FlagParser(argparse.ArgumentParser):
    """A command's flags, with what is wrong in them as a `UserError` instead of usage and an exit.

    None may be abbreviated.
    """

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


@contextlib.contextmanager
def silent_when_unread() -> Iterator[None]:
    """End without a word, with SIGPIPE's status, where nobody reads any more what is printed (`| head`).

    Python ignores that signal. What the output's encoding lacks is printed as Python would write it in a text.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the streams is written once more at the interpreter's end.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
