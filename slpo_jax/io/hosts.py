"""Several processes that make one run, each with devices of its own: who writes, and what all agree on.

Every process does the same, in the same order; collectives wait for each other. The first one writes what all read.
Alone, a process is the first, and nothing here costs anything.
"""

from typing import Any

import numpy as np

_index, _count = 0, 1
_begun, _last = 0, "its start"  # of what all do in the same order, for `watchdog`


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Become one of several processes; before anything asks jax for devices.

    Args:
        coordinator: HOST:PORT of the first process.
        processes: how many there are.
        process: which of them this one is, from 0. Where all three are None, jax asks the cluster's environment
            (SLURM, Open MPI, Kubernetes, Cloud TPU).
    Raises:
        ValueError, RuntimeError: there is no such environment, or the others can't be reached.
    """
    global _index, _count
    import jax

    jax.distributed.initialize(coordinator, processes, process)
    _index, _count = jax.process_index(), jax.process_count()


def begin(what: str = "") -> None:
    """Note that something begins which all processes do in the same order.

    Args:
        what: in words, if not as before.
    """
    global _begun, _last
    _begun, _last = _begun + 1, what or _last


def place() -> tuple[int, str]:
    """How many such things have begun here, and the last that had words."""
    return _begun, _last


def which() -> tuple[int, int]:
    """Which process this is, and of how many."""
    return _index, _count


def store() -> Any:
    """Texts by key that all processes see, also while their main threads wait; None where there are no others.

    jax has no other way to it.
    """
    if _count == 1:
        return None
    from jax._src.distributed import global_state

    return global_state.client


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return _index == 0


def is_alone() -> bool:
    """Whether there are no others."""
    return _count == 1


def _together() -> Any:
    """jax's collectives, of which one begins."""
    begin()
    from jax.experimental import multihost_utils

    return multihost_utils


def barrier(name: str) -> None:
    """Wait for all to be here, so that what the first has written is there for the others.

    Args:
        name: the same on all, for messages.
    """
    if _count > 1:
        _together().sync_global_devices(name)


def decided(flag: bool) -> bool:
    """The first process's answer to a question about files, which might change while another asks it."""
    if _count > 1:
        return bool(_together().broadcast_one_to_all(np.int32(flag)))
    return flag


def any_of(flag: bool) -> bool:
    """Whether it holds in one of the processes at least."""
    if _count > 1:
        return bool(np.max(_together().process_allgather(np.int32(flag))))
    return flag


def whole(array: Any) -> np.ndarray:
    """All of an array whose rows are spread over the devices of all processes."""
    if _count > 1 and not getattr(array, "is_fully_addressable", True):
        return np.asarray(_together().process_allgather(array, tiled=True))
    return np.asarray(array)
