"""What is said of a run while it goes: its first line, warnings as lines, and how far a long piece of work is."""

import io
import logging as python_logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from absl import logging
from tqdm import tqdm

from slpo_jax.runtime import backend, hosts
from slpo_jax.version import __version__

_SECONDS = 60.0  # between lines where there is no terminal
_QUICK = 1.0  # seconds of work that nobody has to be told of


class Progress:
    """A count of steps done out of a total, on standard error, of several processes the first's.

    On a terminal it is a bar. Elsewhere it is a plain line at the beginning, at most once a minute, and at the end, so
    that a log file can be read. How fast it is there, and the time left, are without compilation, which is said.

    Args:
        label: what is being done.
        total: steps in all.
        done: steps done before.
        unit: what a step is.
        keep: False for what is one of many: its bar goes when it is done, it has no first line, and its last is left
            out if it had no other.
    """

    def __init__(self, label: str, total: int, done: int = 0, unit: str = "step", keep: bool = True):
        self.done = done
        self._label, self._total, self._unit, self._keep = label, total, unit, keep
        self._file = sys.stderr if hosts.is_first() else io.StringIO()
        self._facts: Mapping[str, str] = {}
        self._bar: tqdm | None = None
        if self._file.isatty():
            self._bar = tqdm(
                total=total, initial=done, desc=label, unit=unit, leave=keep, mininterval=1.0, dynamic_ncols=True,
                file=self._file,
            )  # fmt: skip
        elif keep:
            print(f"{label}: begins at {unit} {done} of {total}", file=self._file, flush=True)
        self._last, self._shown = time.monotonic(), False
        self._began = self._last - backend.seconds(), done
        self._untell = backend.tell(self._compiles)

    def update(self, done: int, facts: Mapping[str, str] | None = None) -> None:
        """Say that so many steps are done in all, and what else is known now: texts by name."""
        hosts.begin(f"{self._label}, {self._unit} {done}")
        self._facts = self._facts if facts is None else facts
        steps, self.done = done - self.done, done
        if self._bar is not None:
            self._bar.set_postfix(self._facts, refresh=False)
            self._bar.update(steps)
        elif time.monotonic() - self._last >= _SECONDS:
            self._write()

    def end_at(self, total: int) -> None:
        """Set other steps in all than was thought."""
        self._total = total
        if self._bar is not None:
            self._bar.total = total

    def close(self) -> None:
        """End the line: the work is done, or given up."""
        self._untell()
        if self._bar is not None:
            self._bar.close()
        elif self._keep or self._shown:
            self._write()

    def _write(self) -> None:
        """Print one line: how many of how many, how fast on the whole, what is left, and the facts."""
        self._last, self._shown = time.monotonic(), True
        seconds, steps = self._last - backend.seconds() - self._began[0], self.done - self._began[1]
        rate = f", {steps / seconds:.3g} {self._unit}s/s" if seconds > 0 and steps else ""
        if rate and self.done < self._total:
            rate += f", {tqdm.format_interval((self._total - self.done) * seconds / steps)} left"
        facts = "".join(f", {name} {value}" for name, value in self._facts.items())
        print(f"{self._label}: {self.done}/{self._total} {self._unit}s{rate}{facts}", file=self._file, flush=True)

    def _compiles(self, seconds: float | None) -> None:
        """Say that something is compiled, see `backend.Say`."""
        what = "compiling .." if seconds is None else f"compiled in {seconds:.0f} s"
        if self._bar is not None:
            self._bar.set_postfix_str(what)
        else:
            print(f"{self._label}: {what}", file=self._file, flush=True)


def begin(text: str) -> None:
    """Print a line where a piece of work begins; on a terminal its bar says so."""
    if hosts.is_first() and not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def if_slow(text: str, total: int) -> Callable[[int], None]:
    """Return a function that is told how much is done; if work is slow, a line says the text and the time left.

    Args:
        total: all of it, in the units of what is done.
    """
    start, is_told = time.monotonic(), False

    def tell(done: int) -> None:
        nonlocal is_told
        seconds = time.monotonic() - start
        seconds_left = seconds * (total - done) / done
        if not is_told and min(seconds, seconds_left) >= _QUICK:
            is_told = True
            if hosts.is_first():
                print(f"{text}, about {tqdm.format_interval(seconds_left)} left", file=sys.stderr, flush=True)

    return tell


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def print_plainly() -> None:
    """Have warnings of our own printed as lines for as long as nobody has said where messages go.

    absl's `logging` begins with `basicConfig()` then, whose handler would put "WARNING:absl:" before them.
    """
    if not python_logging.root.handlers and _print not in (logger := logging.get_absl_logger()).filters:
        logger.addFilter(_print)


def _print(record: python_logging.LogRecord) -> bool:
    """Print it, or leave it to the handlers."""
    layouts = [getattr(handler.formatter, "_fmt", "") for handler in python_logging.root.handlers]
    if not record.pathname.startswith(_PACKAGE) or any(layout != python_logging.BASIC_FORMAT for layout in layouts):
        return True
    print(record.getMessage(), file=sys.stderr)
    return False


_begun: list[str] = []  # workdirs that were said


def say_start(workdir: str | Path, config: str = "") -> None:
    """Say where it is, on standard error, once.

    Args:
        config: its name or file.
    """
    if str(workdir) not in _begun:
        _begun.append(str(workdir))
        suffix = f", config {config}" if config else ""
        print(f"slpo_jax {__version__}: workdir {workdir}{suffix}", file=sys.stderr, flush=True)
