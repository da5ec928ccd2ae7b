"""jax as our programs use it."""

import ctypes
import os
import platform
from pathlib import Path

from absl import logging

from slpo_jax.io import compiling

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of malloc.h


def set_up_jax(cpu_devices: int = 1) -> None:
    """Devices, memory, and a cache of compiled programs that other runs find again.

    In a process that has used jax already the devices stay as they are; results don't depend on their number.

    Args:
        cpu_devices: shards of the batch where there is no accelerator.
    """
    import jax  # a second that --help need not wait for

    compiling.watch()

    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:  # this process has used jax before
        if jax.default_backend() == "cpu" and jax.device_count() != cpu_devices:
            there = jax.device_count()
            logging.warning("config.cpu_devices: %d, but jax has begun with %d, which stays", cpu_devices, there)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/slpo_jax/xla").expanduser()))
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Have glibc keep what a program's buffers occupied, for the next step's.

    By default it hands large blocks back to the system, which makes every step on a CPU fault its pages in anew. The
    heaps of threads hold no block above 64 MB all the same; one heap for all would be slower. Elsewhere than on Linux
    with glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
        if not libc.mallopt(_M_MMAP_THRESHOLD, 2**30):  # older versions refuse more than 32 MB
            libc.mallopt(_M_MMAP_MAX, 0)
