"""Messages of a run in progress: its first line, warnings as lines, and how far a long piece of work is."""

import logging as python_logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from absl import logging
from tqdm import tqdm

from slpo_jax.runtime import backend, hosts
from slpo_jax.version import __version__

_SECONDS = 60.0  # between lines where there is no terminal
_LINE = "{desc}: {n_fmt}/{total_fmt} {unit}s, {rate_fmt}, {remaining} left{postfix}"
_QUICK = 1.0  # seconds of work that nobody has to be told of


class Progress:
    """A count of steps done out of a total, on standard error, of several processes the first's.

    On a terminal it is tqdm's bar. Elsewhere each state of the bar is a plain line: at the beginning, at most once a
    minute, where something compiles, and at the end, so that a log file can be read.

    Args:
        label: name of the work.
        total: steps in all.
        done: steps done before.
        unit: name of a step.
        keep: False for one of many pieces of work: its bar goes when it is done, and it has no lines if it is quick.
    """

    def __init__(
        self,
        label: str,
        total: int,
        done: int = 0,
        unit: str = "step",
        keep: bool = True,
    ):
        self.done = done
        self._label = label
        self._unit = unit
        self._facts: Mapping[str, str] = {}
        # A terminal has tqdm's bar, everything else its states as lines.
        layout: dict[str, Any] = dict(
            file=sys.stderr, mininterval=1.0, dynamic_ncols=True
        )
        if not sys.stderr.isatty():
            layout = dict(
                file=_Lines(sys.stderr),
                bar_format=_LINE,
                mininterval=_SECONDS,
                position=0,
                delay=0.0 if keep else _SECONDS,
            )
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=label,
            unit=unit,
            leave=keep,
            miniters=1,
            disable=not hosts.is_first(),
            **layout,
        )
        self._untell = backend.tell(self._show_compilation)

    def update(self, done: int, facts: Mapping[str, str] | None = None) -> None:
        """Report the number of steps done in all, and further facts: texts by name."""
        hosts.begin(f"{self._label}, {self._unit} {done}")
        if facts is not None:
            self._facts = facts
        self._bar.set_postfix(self._facts, refresh=False)
        self._bar.update(done - self.done)
        self.done = done

    def end_at(self, total: int) -> None:
        """Set other steps in all than was thought."""
        self._bar.total = total

    def close(self) -> None:
        """End the line: the work is done, or given up."""
        self._untell()
        self._bar.close()

    def _show_compilation(self, seconds: float | None) -> None:
        """Say that something is compiled, see `backend.Say`."""
        self._bar.set_postfix_str(
            "compiling .." if seconds is None else f"compiled in {seconds:.0f} s"
        )


class _Lines:
    """A file in which each state of a bar is a line, rather than written over the last one."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> None:
        # tqdm also writes line ends and blanks, to wipe out what stood there.
        state = text.strip()
        if state:
            self._file.write(state + "\n")

    def flush(self) -> None:
        self._file.flush()


def begin(text: str) -> None:
    """Print a line where a piece of work begins; on a terminal its bar says so."""
    if hosts.is_first() and not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def if_slow(text: str, total: int) -> Callable[[int], None]:
    """Return a function that is told how much is done; if work is slow, a line says the text and the time left.

    Args:
        total: all of it, in the units of what is done.
    """
    start = time.monotonic()
    is_told = False

    def tell(done: int) -> None:
        nonlocal is_told
        seconds = time.monotonic() - start
        seconds_left = seconds * (total - done) / done
        if not is_told and min(seconds, seconds_left) >= _QUICK:
            is_told = True
            if hosts.is_first():
                print(
                    f"{text}, about {tqdm.format_interval(seconds_left)} left",
                    file=sys.stderr,
                    flush=True,
                )

    return tell


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def print_plainly() -> None:
    """Have warnings of our own printed as lines for as long as nobody has said where messages go.

    absl's `logging` begins with `basicConfig()` then, whose handler would put "WARNING:absl:" before them.
    """
    logger = logging.get_absl_logger()
    if not python_logging.root.handlers and _print not in logger.filters:
        logger.addFilter(_print)


def _print(record: python_logging.LogRecord) -> bool:
    """Print it, or leave it to the handlers."""
    # Leave it to them where it isn't ours, or somebody has said how messages look.
    if not record.pathname.startswith(_PACKAGE):
        return True
    for handler in python_logging.root.handlers:
        if getattr(handler.formatter, "_fmt", "") != python_logging.BASIC_FORMAT:
            return True
    # A bar on a terminal makes room for the line.
    tqdm.write(record.getMessage(), file=sys.stderr)
    return False


# Workdirs that were named already.
_begun: list[str] = []


def say_start(workdir: str | Path, config: str = "") -> None:
    """Say where it is, on standard error, once.

    Args:
        config: its name or file.
    """
    if str(workdir) not in _begun:
        _begun.append(str(workdir))
        suffix = f", config {config}" if config else ""
        print(
            f"slpo_jax {__version__}: workdir {workdir}{suffix}",
            file=sys.stderr,
            flush=True,
        )
