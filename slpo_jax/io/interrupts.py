"""Ctrl-C while XLA compiles.

Python obeys a signal between two instructions of its own, and a compilation is one call, of up to minutes. So a thread
hears of the signal too, and ends the process during a compilation, as long as no finished step would be lost by that.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from typing import Any, Protocol

LINE = "interrupted; the same command goes on from what is finished"
STATUS = 128 + signal.SIGINT
_LATER = (
    "interrupted; what is being compiled is finished and the stage saved first (Ctrl-C again ends at once, without the "
    "steps since the last checkpoint)"
)
_COMPILER = os.path.join("jax", "_src", "compiler.py")
_SECONDS = 0.1  # between two looks, once there was a Ctrl-C


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


def _listen(reading: int, line: str) -> None:
    asked, told = 0, False
    while True:
        if select.select([reading], [], [], _SECONDS if asked else None)[0]:
            asked += os.read(reading, 1)[0] == signal.SIGINT
        if not (asked and _compiles()):
            continue
        stage = _stage
        if stage is None or not (stage.saving or stage.shared or (stage.unsaved and asked == 1)):
            _end(line)
        if stage is not None and stage.unsaved and not (stage.shared or told):
            told = True
            print(f"\n{_LATER}", file=sys.stderr, flush=True)


def _compiles() -> bool:
    """Whether that is what the main thread does."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_code.co_filename.endswith(_COMPILER):
        frame = frame.f_back
    return frame is not None


def _end(line: str) -> None:
    print(f"\n{line}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(STATUS)
