"""The common parts of the commands: flags, keys of a config, and exits.

An error that the user can mend is one line and status 2. Ctrl-C is a line and status 130. Python obeys it between two
of its own instructions, and a compilation is one call of up to minutes. So a thread listens too: it says that the
program is waiting, and ends the process at a second Ctrl-C.
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
_MOMENT = 0.5  # seconds before `_LATER` is printed
_DROPPED = b"\0"  # not the number of a signal, which is above 0
_AGAIN = 0.05  # seconds until a dropped Ctrl-C is raised once more, when the callback that dropped it has ended
_INTERRUPTED = 128 + signal.SIGINT


class _Formatter(argparse.HelpFormatter):
    """A formatter that fills paragraphs, except for indented ones, and puts flags beside their help."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            is_indented = "\n  " in paragraph
            paragraphs.append(
                paragraph if is_indented else textwrap.fill(paragraph, width)
            )
        return "\n\n".join(paragraphs)


class CommandParser(FlagParser):
    """The flags of `slpo COMMAND`, which may stand before, between or after the other arguments.

    Args:
        name: of the command.
        about: the text of --help, with three examples.
        keys: lists the keys of a config that may be given too.
    """

    def __init__(
        self, name: str, about: str | None, keys: Callable[[], list[str]] = list
    ):
        super().__init__(
            prog=f"slpo {name}",
            usage=argparse.SUPPRESS,
            description=about,
            formatter_class=_Formatter,
        )
        self._keys = keys
        self._positionals.title = "arguments"
        self._optionals.title = "flags"
        self.add_argument("--debug", action="store_true", help="show tracebacks")
        self.add_argument(
            "--register",
            action="append",
            default=[],
            metavar="FILE",
            help="has methods of your own",
        )

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --?([^ =]+)", message)
        if unknown:
            known = [*self._option_string_actions]
            known += [f"--config.{key}" for key in self._keys()]
            message += nearest(unknown[1], known)
        super().error(message)

    def read(self, arguments: list[str]) -> argparse.Namespace:
        """Parse the arguments, and run the files of --register."""
        flags = self.parse_intermixed_args(arguments)
        for path in flags.register:
            read_registrations(path)
        return flags


def take_keys(
    arguments: list[str], section: str = "config"
) -> tuple[list[str], dict[str, str]]:
    """Separate the keys of a config's section from other arguments.

    Returns:
        the other arguments; and values as written by key, the last of each. A value may be the next argument.
    """
    rest = list[str]()
    keys = dict[str, str]()
    queue = list(arguments)
    pattern = re.compile(rf"--?{re.escape(section)}\.([^=]+)(?:=(.*))?", re.DOTALL)
    while queue:
        arg = queue.pop(0)
        match = pattern.fullmatch(arg)
        if not match:
            rest.append(arg)
            continue
        value = match[2]
        if value is None and queue and not queue[0].startswith("--"):
            value = queue.pop(0)
        keys[match[1]] = Text(value or "")
    return rest, keys


def run_command(
    command: Callable[[list[str]], None], arguments: list[str], goes_on: bool = False
) -> None:
    """Run a command; an error that the user can mend is printed as one line, with status 2.

    Such an error is a `UserError`, or a refusal of the operating system or a device: a full disk, a folder without
    permission, too little memory.

    Args:
        command: takes the arguments.
        goes_on: whether the same command goes on where an interrupted one ended.
    """
    # Orbax logs every file, and transformers warns of files that our one line speaks of. The variable is for a
    # transformers that is imported later.
    logging.set_verbosity(logging.WARNING)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    python_logging.getLogger("transformers").setLevel(python_logging.ERROR)
    print_plainly()

    # Listen to Ctrl-C, and run.
    debug = "--debug" in arguments
    interrupted = _GOES_ON if goes_on else "interrupted"
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
    """Return the last line of a command, "" for an error of our own, and its status."""
    if isinstance(error, KeyboardInterrupt):
        return f"\n{interrupted}", _INTERRUPTED
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, OSError):
        return f"error: {describe_os_error(error)}", 2
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"error: {_out_of_memory(error)}", 2
    return "", 1


def describe_os_error(error: OSError) -> str:
    """Describe an error of the operating system, and its remedy."""
    remedy = "check the path and its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room; what was finished is kept, and the same command goes on"
    elif error.errno == errno.EMFILE:
        remedy = "raise the limit of open files (ulimit -n)"
    problem = error.strerror or " ".join(str(error).split())
    path = error.filename2 or error.filename
    if path:
        problem = f"{path}: {problem}"
    return f"{problem}; {remedy}"


def _out_of_memory(error: BaseException) -> str:
    """Describe a lack of memory, and the settings that lower the need."""
    reason = " ".join(str(error).split()).removeprefix("RESOURCE_EXHAUSTED: ")[:160]
    return (
        f"out of memory ({reason or 'of this machine'}); a step: raise config.STAGE.micro_batches, set "
        "config.model.remat and config.model.scan_layers, or config.sharding.fsdp; evaluation: lower "
        "config.evaluate.batch_size; what was finished is kept, and the same command goes on"
    )


def _say_once() -> None:
    """Silence what others print about a failing save: Orbax's threads, asyncio, tensorstore's callbacks."""
    python_logging.getLogger("asyncio").setLevel(python_logging.CRITICAL)
    logging.get_absl_logger().addFilter(
        lambda record: not (record.exc_info and "orbax" in record.pathname)
    )
    print_it = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # The loop is that of another part of the save, which failed.
        if str(unraisable.exc_value) != "Event loop is closed":
            print_it(unraisable)

    sys.unraisablehook = hook


def _listen(line: str) -> None:
    """Begin to listen to Ctrl-C, in the main thread.

    Args:
        line: the last line before the process ends.
    """
    # Python writes the number of each signal into this pipe.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    # Python drops an exception in a callback of its garbage collector, and jax has such a callback. The thread then
    # interrupts the program once more.
    print_it = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            os.write(writing, _DROPPED)
        else:
            print_it(unraisable)

    sys.unraisablehook = hook

    # The first Ctrl-C raises KeyboardInterrupt, and a line follows if the program is still busy. The second one ends.
    def listen() -> None:
        interrupted = False
        raised_again = 0
        while True:
            byte = os.read(reading, 1)
            if byte == _DROPPED:
                time.sleep(_AGAIN)
                raised_again += 1
                _thread.interrupt_main()
                continue
            if byte[0] != signal.SIGINT:
                continue
            # The thread hears its own interruptions too.
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
    """End the process without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
