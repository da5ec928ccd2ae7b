"""Setting up jax, and timing its compilations: long ones are announced, and none counts as a step's time."""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from absl import logging

from slpo_jax.runtime import hosts

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4  # of malloc.h
PATIENCE = 1.0  # seconds; what was compiled by an earlier command is read in less
_EVENT = "/jax/core/compile/"
_LOWERED = f"{_EVENT}jaxpr_to_mlir_module_duration"
_COMPILED = f"{_EVENT}backend_compile_duration"

Say = Callable[[float | None], None]
"""What is told of a program: None once its compilation has taken a while, and in the end the seconds that it took."""


def _say_line(seconds: float | None) -> None:
    if (
        hosts.is_first() and sys.stderr.isatty()
    ):  # what a script asks has its answer alone
        print(
            "compiling .." if seconds is None else f"compiled in {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )


_seconds = 0.0
_listens = False
_say: list[Say] = [_say_line]
_patience: threading.Timer | None = None  # of the program that is being compiled


def set_up_jax(cpu_devices: int = 1) -> None:
    """Set devices, memory, and a cache of compiled programs that other runs find again.

    In a process that has used jax already the devices stay as they are; results don't depend on their number.

    Args:
        cpu_devices: shards of the batch where there is no accelerator.
    """
    import jax  # a second that --help need not wait for

    watch()
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:  # this process has used jax before
        if jax.default_backend() == "cpu" and jax.device_count() != cpu_devices:
            devices = jax.device_count()
            logging.warning(
                "config.cpu_devices: %d, but jax has begun with %d, which stays",
                cpu_devices,
                devices,
            )
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update(
            "jax_compilation_cache_dir", str(Path("~/.cache/slpo_jax/xla").expanduser())
        )
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Have glibc keep what a program's buffers occupied, for the next step's.

    By default it hands large blocks back to the system, which makes every step on a CPU fault its pages in again. The
    heaps of threads hold no block above 64 MB all the same; one heap for all would be slower. Elsewhere than on Linux
    with glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        # Never trim the heap, and take large blocks from it as well.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
        if not libc.mallopt(
            _M_MMAP_THRESHOLD, 2**30
        ):  # older versions refuse more than 32 MB
            libc.mallopt(_M_MMAP_MAX, 0)


def watch() -> None:
    """Begin to listen to what jax compiles."""
    global _listens
    if not _listens:
        import jax

        jax.monitoring.register_event_duration_secs_listener(_heard)
        _listens = True


def seconds() -> float:
    """Return the seconds that the main thread has spent on tracing and compiling since `watch`."""
    return _seconds


def tell(say: Say) -> Callable[[], None]:
    """Have compilations told to `say` instead of printed, until the function that is returned is called."""
    _say.append(say)
    return lambda: _say.remove(say) if say in _say else None


def say_compilation(seconds: float | None) -> None:
    """Tell the newest who asked, see `Say`."""
    _say[-1](seconds)


def _heard(event: str, duration_secs: float, **_facts: str | int) -> None:
    global _seconds, _patience
    if (
        not event.startswith(_EVENT)
        or threading.current_thread() is not threading.main_thread()
    ):
        return
    _seconds += duration_secs
    # The program before is compiled, or was read: say how long it took if that was told
    # of.
    if event in (_LOWERED, _COMPILED) and _patience is not None:
        if _patience.finished.is_set() and event == _COMPILED:
            say_compilation(duration_secs)
        _patience.cancel()
        _patience = None
    # This one is compiled from here on: say so once it takes a while.
    if event == _LOWERED:
        _patience = threading.Timer(PATIENCE, say_compilation, [None])
        _patience.daemon = True
        _patience.start()
