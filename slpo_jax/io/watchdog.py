"""Says which of several processes is stuck, and ends them all: jax itself notices only those that are dead.

A process that is alive but gets nowhere leaves the others in a collective that never ends. So a thread of each tells
the others where its process is, through the store that jax.distributed keeps for them, and watches them.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from slpo_jax.io import hosts

_CHECKS = 20  # in the time after which a process is stuck
_FOLDER = "slpo_jax/place/"


class Watchdog:
    """One process's watch over all.

    Args:
        seconds: without any process getting on, after which they are stuck.
        process: which this one is.
        count: how many there are.
        store: of jax.distributed, or what has `key_value_set` and `key_value_dir_get`.
        pause: waits some seconds; True where the watch is over.
        end: what to do with the line that says who is stuck.
    """

    def __init__(self, seconds: float, process: int, count: int, store: Any, pause: Callable[[float], bool],
                 end: Callable[[str], None]):  # fmt: skip
        self._seconds, self._process, self._count = seconds, process, count
        self._store, self._pause, self._end = store, pause, end

    def run(self) -> None:
        """Watch until it is over, or somebody is stuck.

        Time is counted in pauses that were waited for: of a machine that sleeps none pass.
        """
        before, waited = None, 0
        while not self._pause(self._seconds / _CHECKS):
            self._store.key_value_set(f"{_FOLDER}{self._process}", json.dumps(_own_place()), allow_overwrite=True)
            places = self._places()
            waited = waited + 1 if places == before else 0
            before = places
            if waited >= _CHECKS:
                self._end(self._verdict(places))
                return

    def _places(self) -> list[list[Any]]:
        """Where each process is: how many things that all do in the same order it has begun, the last, and its name."""
        found = {int(key.removeprefix(_FOLDER)): json.loads(text) for key, text in
                 self._store.key_value_dir_get(_FOLDER)}  # fmt: skip
        return [found.get(index, [-1, "its start", "unknown"]) for index in range(self._count)]

    def _verdict(self, places: list[list[Any]]) -> str:
        """Who is behind the others, and where."""
        least = min(done for done, _, _ in places)
        behind = [index for index, (done, _, _) in enumerate(places) if done == least]
        where = ", ".join(f"process {index} ({places[index][2]}) after {places[index][1]}" for index in behind)
        others = "" if len(behind) == self._count else "; the others wait for it"
        return (
            f"stuck for {self._seconds:g} s, of {self._count} processes: {where}{others}; look there for what it does "
            "(py-spy dump --pid PID), or raise config.stuck_after if it only takes long; the same command goes on from "
            "the last checkpoint"
        )


def _own_place() -> list[Any]:
    begun, last = hosts.place()
    return [begun, last, f"{socket.gethostname()}, PID {os.getpid()}"]


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Watch over the processes of this run.

    Args:
        seconds: see `Watchdog`; 0 is never.
    """
    store = hosts.store()
    if not seconds or store is None:
        yield
        return
    over = threading.Event()
    dog = Watchdog(seconds, *hosts.which(), store, over.wait, _leave)
    # A store that is gone has its own end: jax ends the others of a process that died.
    threading.Thread(target=_quietly, args=(dog.run,), daemon=True, name="watchdog").start()
    try:
        yield
    finally:
        over.set()


def _quietly(watch: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):
        watch()


def _leave(line: str) -> None:
    """End the process, whose main thread may never come back; all at once, as far as they are able to."""
    import jax

    print(f"error: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()  # waits for the others
    os._exit(2)
