"""What the commands share: flags, keys of a config, and how they end.

What the user can mend is one line and status 2. Ctrl-C is a line and status 130. Python obeys it between two
instructions of its own, and a compilation is one call, of up to minutes: so a thread hears of it too, says what is
waited for, and ends the process at a second one.
"""

import _thread
import argparse
import contextlib
import errno
import inspect
import logging as python_logging
import os
import re
import select
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from absl import logging

from slpo_jax.config.overrides import Text, nearest
from slpo_jax.config.registry import read_registrations
from slpo_jax.errors import FlagParser, SaveError, UserError, silent_when_unread
from slpo_jax.runtime.progress import print_plainly

_GOES_ON = "interrupted; the same command goes on from what is finished"
_LATER = "interrupted; what is under way is finished first, and a stage saved (Ctrl-C again ends at once)"
_MOMENT = 0.5  # seconds before that is said
_DROPPED = b"\0"  # a signal's number is above 0
_AGAIN = 0.05  # seconds until a dropped Ctrl-C is raised once more, when what dropped it has ended
_INTERRUPTED = 128 + signal.SIGINT


class _Formatter(argparse.HelpFormatter):
    """A formatter that fills paragraphs, but for those that are indented; its flags stand beside what they are."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = inspect.cleandoc(text).split("\n\n")
        return "\n\n".join(part if "\n  " in part else textwrap.fill(part, width) for part in paragraphs)


class CommandParser(FlagParser):
    """The flags of `slpo COMMAND`, which may stand before, between or after the other arguments.

    Args:
        name: of the command.
        about: what --help says of it, three examples among it.
        keys: lists those of a config that may be given too.
    """

    def __init__(self, name: str, about: str | None, keys: Callable[[], list[str]] = list):
        super().__init__(prog=f"slpo {name}", usage=argparse.SUPPRESS, description=about, formatter_class=_Formatter)
        self._keys = keys
        self._positionals.title, self._optionals.title = "arguments", "flags"
        self.add_argument("--debug", action="store_true", help="show tracebacks")
        self.add_argument("--register", action="append", default=[], metavar="FILE", help="has methods of your own")

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: --?([^ =]+)", message):
            message += nearest(unknown[1], [*self._option_string_actions, *(f"--config.{key}" for key in self._keys())])
        super().error(message)

    def read(self, arguments: list[str]) -> argparse.Namespace:
        """Return the arguments by name, once the files of --register were run."""
        flags = self.parse_intermixed_args(arguments)
        for path in flags.register:
            read_registrations(path)
        return flags


def take_keys(arguments: list[str], section: str = "config") -> tuple[list[str], dict[str, str]]:
    """Split arguments into those without keys of a config's section, and the keys' as written, the last of each.

    A value may be the next argument.
    """
    rest, keys, queue = list[str](), dict[str, str](), list(arguments)
    while queue:
        arg = queue.pop(0)
        if match := re.fullmatch(rf"--?{re.escape(section)}\.([^=]+)(?:=(.*))?", arg, re.DOTALL):
            follows = match[2] is None and queue and not queue[0].startswith("--")
            keys[match[1]] = Text(queue.pop(0) if follows else match[2] or "")
        else:
            rest.append(arg)
    return rest, keys


def run_command(command: Callable[[list[str]], None], arguments: list[str], goes_on: bool = False) -> None:
    """Run a command; what the user can mend is printed as one line, and ends with status 2.

    That is a `UserError`, and what the operating system or a device refuses: a full disk, a place that can't be written
    to, more memory than there is.

    Args:
        command: what to do with the arguments.
        goes_on: whether the same command goes on from what an interrupted one has finished.
    """
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file
    # What is wrong with a file, our one line says; the variable is for a transformers that is yet to be imported.
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    python_logging.getLogger("transformers").setLevel(python_logging.ERROR)
    print_plainly()
    debug, interrupted = "--debug" in arguments, _GOES_ON if goes_on else "interrupted"
    if not debug:
        _say_once()
    _listen(interrupted)
    try:
        with silent_when_unread():
            command(arguments)
    except (UserError, OSError, RuntimeError, MemoryError, KeyboardInterrupt) as error:
        line, status = _ending(error, interrupted)
        if debug or not line:
            raise
        print(line, file=sys.stderr)
        if isinstance(error, SaveError):  # a plain exit waits for all threads
            _leave(status)
        sys.exit(status)


def _ending(error: BaseException, interrupted: str) -> tuple[str, int]:
    """Return what a command ends with: a line, "" where the error is ours, and the status."""
    if isinstance(error, KeyboardInterrupt):
        return f"\n{interrupted}", _INTERRUPTED
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, OSError):
        return f"error: {refused(error)}", 2
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"error: {_out_of_memory(error)}", 2
    return "", 1


def refused(error: OSError) -> str:
    """Tell what the operating system said, and what there is to do about it."""
    path = error.filename2 or error.filename
    remedy = "check the path and its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room; what was finished is kept, and the same command goes on"
    elif error.errno == errno.EMFILE:
        remedy = "raise the limit of open files (ulimit -n)"
    return f"{f'{path}: ' if path else ''}{error.strerror or ' '.join(str(error).split())}; {remedy}"


def _out_of_memory(error: BaseException) -> str:
    """Tell what could not be had, and the settings that change how much is asked for."""
    reason = " ".join(str(error).split()).removeprefix("RESOURCE_EXHAUSTED: ")[:160]
    return (
        f"out of memory ({reason or 'of this machine'}); a step: raise config.STAGE.micro_batches, set "
        "config.model.remat and config.model.scan_layers, or config.sharding.fsdp; evaluation: lower "
        "config.evaluate.batch_size; what was finished is kept, and the same command goes on"
    )


def _say_once() -> None:
    """Have nobody print what a failing save raises as well: Orbax's threads, asyncio, tensorstore's callbacks."""
    python_logging.getLogger("asyncio").setLevel(python_logging.CRITICAL)
    logging.get_absl_logger().addFilter(lambda record: not (record.exc_info and "orbax" in record.pathname))
    print_it = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":  # the loop of another part of the save, which failed
            print_it(unraisable)

    sys.unraisablehook = hook


def _listen(line: str) -> None:
    """Begin to listen to Ctrl-C, in the main thread.

    Args:
        line: what is said at the end.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    # Python drops what is raised in a callback of its garbage collector, and jax has one: then it is raised once more.
    print_it = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            os.write(writing, _DROPPED)
        else:
            print_it(unraisable)

    sys.unraisablehook = hook

    def listen() -> None:
        interrupted = False
        raised_again = 0
        while True:
            byte = os.read(reading, 1)
            if byte == _DROPPED:
                time.sleep(_AGAIN)
                raised_again += 1
                _thread.interrupt_main()  # which is heard here too
                continue
            if byte[0] != signal.SIGINT:
                continue
            if raised_again:
                raised_again -= 1
                continue
            if interrupted:
                print(f"\n{line}", file=sys.stderr)
                _leave(_INTERRUPTED)
            interrupted = True
            if not select.select([reading], [], [], _MOMENT)[0]:
                print(f"\n{_LATER}", file=sys.stderr, flush=True)

    threading.Thread(target=listen, daemon=True).start()


def _leave(status: int) -> None:
    """End the process, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
