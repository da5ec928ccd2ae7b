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
_patience: threading.Timer | None = None  # of the program that is being compiled


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
    global _seconds, _patience
    if not event.startswith(_EVENT) or threading.current_thread() is not threading.main_thread():
        return
    _seconds += duration_secs
    if event in (_LOWERED, _COMPILED) and _patience is not None:
        told, _ = _patience.finished.is_set(), _patience.cancel()
        if told and event == _COMPILED:
            _say[-1](duration_secs)
        _patience = None
    if event == _LOWERED:
        _patience = threading.Timer(PATIENCE, _say[-1], [None])
        _patience.daemon = True
        _patience.start()
