"""Several processes that make one run, each with devices of its own: who writes, and how all agree.

Every process does the same, in the same order; collectives wait for each other. The first one writes what all read.
Alone, a process is the first, and nothing here costs anything.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from slpo_jax.errors import UserError

_index = 0
_count = 1
_begun = 0
_last = "its start"  # of what all do in the same order
_CHECKS = 20  # in the time after which a process is stuck
_FOLDER = "slpo_jax/place/"


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
    _index = jax.process_index()
    _count = jax.process_count()


def begin(what: str = "") -> None:
    """Note the beginning of a piece of work that all processes do in the same order.

    Args:
        what: in words, if not as before.
    """
    global _begun, _last
    _begun = _begun + 1
    _last = what or _last


def count() -> int:
    """Return the number of processes."""
    return _count


def is_first() -> bool:
    """Return whether this process is the one that writes."""
    return _index == 0


def _together() -> Any:
    """Note that a collective begins, and return jax's collectives."""
    begin()
    from jax.experimental import multihost_utils

    return multihost_utils


def barrier(name: str) -> None:
    """Wait for all to be here, so that the others find the files that the first has written.

    Args:
        name: the same on all, for messages.
    """
    if _count > 1:
        _together().sync_global_devices(name)


def broadcast_flag(flag: bool) -> bool:
    """Return the first process's `flag`, an answer about files, which might change while another process asks."""
    if _count > 1:
        return bool(_together().broadcast_one_to_all(np.int32(flag)))
    return flag


def all_processes_agree(number: int, where: object) -> int:
    """Return the `number` that the first process found in files that all are to see, 0 for nothing.

    Args:
        where: the files, for messages.
    Raises:
        UserError: this process sees less than the first.
    """
    if _count == 1:
        return number
    first = int(_together().broadcast_one_to_all(np.int32(number)))
    if first > number:
        raise UserError(
            f"{where}: process {_index} can't see what the first one does; give all processes a --workdir on storage "
            "that they share"
        )
    return first


def any_of(flag: bool) -> bool:
    """Return whether `flag` holds in one process at least."""
    if _count > 1:
        return bool(np.max(_together().process_allgather(np.int32(flag))))
    return flag


def gather_to_host(array: Any) -> np.ndarray:
    """Return the whole of an array whose rows are spread over the devices of all processes."""
    if _count > 1 and not getattr(array, "is_fully_addressable", True):
        return np.asarray(_together().process_allgather(array, tiled=True))
    return np.asarray(array)


@contextlib.contextmanager
def watch_processes(seconds: float) -> Iterator[None]:
    """Say which of several processes is stuck, and end them all: jax itself notices only those that are dead.

    A process that is alive but gets nowhere leaves the others in a collective that never ends. So a thread of each
    tells the others where its process is, through the store that jax.distributed keeps for them, and watches them.

    Args:
        seconds: without any process getting on, after which they are stuck; 0 is never.
    """
    if not seconds or _count == 1:
        yield
        return
    # jax has no other way to texts that all processes see.
    from jax._src.distributed import global_state

    over = threading.Event()
    watching = (seconds, global_state.client, over.wait, _leave)
    threading.Thread(target=watch, args=watching, daemon=True, name="watchdog").start()
    try:
        yield
    finally:
        over.set()


def watch(
    seconds: float,
    store: Any,
    pause: Callable[[float], bool],
    end: Callable[[str], None],
) -> None:
    """Watch the places of all processes until it is over, or somebody is stuck.

    Time is counted in pauses that were waited for: of a machine that sleeps none pass.

    Args:
        store: has `key_value_set` and `key_value_dir_get`.
        pause: waits some seconds; True where the watch is over.
        end: called with the line that says who is stuck.
    """
    before = None
    waited = 0
    while waited < _CHECKS and not pause(seconds / _CHECKS):
        # Tell the others where this process is, and read where they are.
        machine = f"{socket.gethostname()}, PID {os.getpid()}"
        place = json.dumps([_begun, _last, machine])
        try:
            store.key_value_set(f"{_FOLDER}{_index}", place, allow_overwrite=True)
            texts = dict(store.key_value_dir_get(_FOLDER))
        except RuntimeError:
            # The store is gone with a process that died, and jax ends the others.
            return
        places = []
        for index in range(_count):
            text = texts.get(f"{_FOLDER}{index}", '[-1, "its start", "unknown"]')
            places.append(json.loads(text))
        # Count how often nobody has moved.
        waited = waited + 1 if places == before else 0
        before = places
    if before and waited >= _CHECKS:
        end(_describe_stuck(seconds, before))


def _describe_stuck(seconds: float, places: list[list[Any]]) -> str:
    """Say which processes are behind the others, and where."""
    least = min(number for number, _, _ in places)
    behind = []
    for index, (number, last, machine) in enumerate(places):
        if number == least:
            behind.append(f"process {index} ({machine}) after {last}")
    where = ", ".join(behind)
    waiting = "" if len(behind) == len(places) else "; the others wait for it"
    return (
        f"stuck for {seconds:g} s, of {len(places)} processes: {where}{waiting}; look there for what it does (py-spy "
        "dump --pid PID), or raise config.stuck_after if it only takes long; the same command goes on from the last "
        "checkpoint"
    )


def _leave(line: str) -> None:
    """End the process, whose main thread may never come back; all at once, as far as they are able to."""
    import jax

    print(f"error: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):
        # It waits for the others, which end the same way.
        jax.distributed.shutdown()
    os._exit(2)
