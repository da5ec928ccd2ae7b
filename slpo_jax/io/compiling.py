"""What jax compiles: said where it takes a while, and counted, so that nobody takes it for the speed of steps."""

import sys
import threading
from collections.abc import Callable

from slpo_jax.io import hosts

PATIENCE = 1.0  # seconds; what was compiled by an earlier command is read in less
_EVENT = "/jax/core/compile/"
_LOWERED, _COMPILED = f"{_EVENT}jaxpr_to_mlir_module_duration", f"{_EVENT}backend_compile_duration"

Say = Callable[[float | None], None]
"""What is told of a program: None once its compilation has taken a while, and in the end the seconds that it took."""


def _say_line(seconds: float | None) -> None:
    if hosts.is_first() and sys.stderr.isatty():  # what a script asks has its answer alone
        print("compiling .." if seconds is None else f"compiled in {seconds:.0f} s", file=sys.stderr, flush=True)


_seconds = 0.0
_listens = False
_say: list[Say] = [_say_line]
_pending: "_Compilation | None" = None


class _Compilation:
    """One that is under way."""

    def __init__(self, say: Say):
        self._say, self._told, self._lock = say, False, threading.Lock()
        self._timer = threading.Timer(PATIENCE, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        with self._lock:
            self._told = True
            self._say(None)

    def end(self, seconds: float | None) -> None:
        """It is done, or was given up."""
        self._timer.cancel()
        with self._lock:
            if self._told and seconds is not None:
                self._say(seconds)


def watch() -> None:
    """Begin to listen to jax."""
    global _listens
    if not _listens:
        import jax

        jax.monitoring.register_event_duration_secs_listener(_heard)
        _listens = True


def seconds() -> float:
    """What the main thread has spent on tracing and compiling since `watch`."""
    return _seconds


def tell(say: Say) -> Callable[[], None]:
    """Have compilations told to `say` instead of printed, until the function that is returned is called."""
    _say.append(say)
    return lambda: _say.remove(say) if say in _say else None


def _heard(event: str, duration_secs: float, **_facts: str | int) -> None:
    global _seconds, _pending
    if not event.startswith(_EVENT) or threading.current_thread() is not threading.main_thread():
        return
    _seconds += duration_secs
    if event in (_LOWERED, _COMPILED) and _pending is not None:
        _pending.end(duration_secs if event == _COMPILED else None)
        _pending = None
    if event == _LOWERED:
        _pending = _Compilation(_say[-1])
