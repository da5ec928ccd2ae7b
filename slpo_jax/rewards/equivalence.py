"""When two expressions in LaTeX are equivalent, as math_verify has it, in bounded time and memory.

It works in processes of its own (`equivalence_worker.py`): its timeouts need the main thread and don't end every
computation, and an interpreter that is stuck in one can only be ended from outside. A verdict is asked for once.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slpo_jax.errors import UserError

Pair = tuple[str, str]

_SECONDS = 2.0  # of processor time, so that a verdict doesn't depend on how busy the machine is
_LONGEST = 500  # characters of an expression; longer ones are taken for wrong unseen
_MOST_WORKERS = 8
_PER_WORKER = 16  # requests that another one is worth starting for, which takes a second

_idle: deque["_Worker"] = deque()


def are_equivalent(pairs: Sequence[Pair]) -> list[bool]:
    """Judge answers.

    Args:
        pairs: N of (answer, reference), in LaTeX without delimiters.
    Returns:
        N verdicts. An answer or a reference that can't be read, is too long, or takes too much time or memory is wrong.
    Raises:
        UserError: math-verify isn't installed.
    """
    new = list(dict.fromkeys(pairs))
    workers = min(_MOST_WORKERS, os.cpu_count() or 1, 1 + len(new) // _PER_WORKER)
    with ThreadPoolExecutor(workers) as threads:
        found = dict(zip(new, threads.map(_judge, new), strict=True))
    return [found[pair] for pair in pairs]


class _Worker:
    """One process; it ends with this one, whose end of the pipe closes."""

    def __init__(self) -> None:
        # -P: the modules beside the file are not to be taken for others' of the same name.
        command = [sys.executable, "-P", str(Path(__file__).with_name("equivalence_worker.py")), str(_SECONDS)]
        self._process: Any = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal is not for it
            env=os.environ | {"PYTHONHASHSEED": "0"},  # which sympy's order of terms depends on
        )
        if self._reply() != "ready":
            self.close()
            raise UserError(
                "math-verify: can't be used, which answers in \\boxed{} are compared with; "
                "install it (pip install 'slpo_jax[latex]')"
            )

    def ask(self, pair: Pair) -> bool | None:
        """The verdict; None if the process ended over it."""
        try:
            self._process.stdin.write(json.dumps(pair) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return {"1": True, "0": False}.get(self._reply())

    def close(self) -> int:
        """End the process, if it hasn't, and say how it did."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # what it didn't read can't be flushed
            pass
        return self._process.wait()

    def _reply(self) -> str:
        return self._process.stdout.readline().strip()


@functools.lru_cache(1 << 16)
def _judge(pair: Pair) -> bool:
    """Ask a worker; one that was ended by something else than the question's own time is replaced once."""
    if max(map(len, pair)) > _LONGEST:
        return False
    for worker in _workers():
        verdict = worker.ask(pair)
        if verdict is not None:
            _idle.append(worker)
            return verdict
        if worker.close() == -signal.SIGPROF:  # its own timer's
            break
    return False


def _workers() -> Iterator[_Worker]:
    """An idle one, if there is one, then a new one."""
    with contextlib.suppress(IndexError):
        yield _idle.pop()
    yield _Worker()
