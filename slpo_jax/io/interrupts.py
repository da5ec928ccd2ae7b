"""Ctrl-C while XLA compiles, or computes for long.

Python obeys a signal between two instructions of its own, and a compilation is one call, of up to minutes. So a thread
hears of the signal too, and ends the process during a compilation, as long as no finished step would be lost by that.
A stage takes its step and is saved first, which is said where it isn't a matter of a moment; a second Ctrl-C then ends
the process. Where there is no stage, it is ended once jax has not come back for a while.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

LINE = "interrupted; the same command goes on from what is finished"
STATUS = 128 + signal.SIGINT
_LATER = (
    "interrupted; what is under way is finished and the stage saved first (Ctrl-C again ends at once, without the "
    "steps since the last checkpoint)"
)
_COMPILER = os.path.join("jax", "_src", "compiler.py")
_JAX = os.path.join("", "jax", "_src", "")
_SECONDS = 0.1  # between two looks, once there was a Ctrl-C
_MOMENT = 5  # looks before it is said that something is finished first
_LONG = 10  # looks at which jax has not come back


class Stage(Protocol):
    """What may be lost.

    Attributes:
        unsaved: steps were taken since the last checkpoint.
        saving: a checkpoint is being written.
        shared: other processes would wait for this one.
    """

    unsaved: bool

    @property
    def saving(self) -> bool: ...

    @property
    def shared(self) -> bool: ...


_stage: Stage | None = None
_asked = False  # there was a Ctrl-C


def guard(stage: Stage | None) -> None:
    """The stage under way, None for none."""
    global _stage
    _stage = stage


def watch(line: str = LINE) -> None:
    """Begin to listen; in the main thread, before anything is compiled.

    Args:
        line: what is said at the end.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reading, line), daemon=True).start()
    ignored = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        """Ctrl-C within a callback, out of which nothing can be raised, comes once more after it."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            ignored(unraisable)

    sys.unraisablehook = hook


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt, whatever an extension that was being imported makes of it."""
    try:
        yield
    except ImportError as error:
        if not _asked:
            raise
        raise KeyboardInterrupt from error


def _listen(reading: int, line: str) -> None:
    global _asked
    asked, looks, stuck, told = 0, 0, 0, False
    while True:
        if select.select([reading], [], [], _SECONDS if asked else None)[0]:
            asked += os.read(reading, 1)[0] == signal.SIGINT
            _asked = asked > 0
        if not asked:
            continue
        stage, frames, looks = _stage, _frames(), looks + 1
        compiles = any(name.endswith(_COMPILER) for name in frames)
        if stage is None:
            stuck = stuck + 1 if _JAX in "".join(frames[:1]) else 0
            if compiles or stuck >= _LONG:
                _end(line)
        elif not (stage.saving or stage.shared):
            if (compiles and not stage.unsaved) or (told and asked > 1):
                _end(line)
            if not told and (compiles or looks >= _MOMENT):
                told, asked = True, 1  # what came before was not asked for
                print(f"\n{_LATER}", file=sys.stderr, flush=True)


def _frames() -> list[str]:
    """The files of what the main thread does, the innermost first."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    return found


def _end(line: str) -> None:
    print(f"\n{line}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(STATUS)
