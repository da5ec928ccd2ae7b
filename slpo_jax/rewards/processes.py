"""Verifiers in processes of their own (`worker.py`): several at a time, in bounded time, whatever they do.

A function is sent as it is, code and all that it names: its file, a notebook or a script isn't run a second time, and
jax isn't imported. Processes are started anew, not forked, so that none has threads of this one.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from slpo_jax.errors import in_a_line

_WORKER = Path(__file__).with_name("worker.py")


@dataclasses.dataclass(frozen=True)
class Failed:
    """The outcome of a request without a value.

    Attributes:
        reason: why, in words.
    """

    reason: str


class CantRun(Exception):
    """A function can't be sent, or can't be loaded where it was sent to."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a request may take; 0 is whatever it takes.

    Attributes:
        seconds: of time.
        processor: seconds of processor time, which don't depend on how busy the machine is.
        memory: bytes of address space.
    """

    seconds: float = 0.0
    processor: float = 0.0
    memory: int = 0


class Processes:
    """A function in processes that are started when they are needed, and end with this object.

    Args:
        function: is called by keywords.
        most: processes.
        limits: of a request.
        per_process: requests at once that another process is worth starting for.
        quiet: what it writes to standard error is of no interest; standard output goes there too.
    Raises:
        CantRun: the function can't be sent.
    """

    def __init__(
        self,
        function: Any,
        most: int,
        limits: Limits | None = None,
        per_process: int = 1,
        quiet: bool = False,
    ):
        limits = limits or Limits()
        self._start = (pickle_function(function), limits, quiet)
        self._most = most
        self._per_process = per_process
        self._limits = limits
        self._idle = deque[_Worker]()
        self._all = set[_Worker]()
        weakref.finalize(self, _end, self._all)

    def ask(self, requests: Sequence[dict[str, Any]]) -> list[Any]:
        """Ask for each request; `Failed` where the function raises, takes too much, or ends its process.

        Raises:
            CantRun: it can't be loaded.
        """
        worthwhile = -(-len(requests) // self._per_process)
        most = min(self._most, worthwhile)
        stopped = list[bool]()
        with ThreadPoolExecutor(max(most, 1)) as threads:
            try:
                return list(
                    threads.map(
                        lambda request: self._ask_again(request, stopped), requests
                    )
                )
            except BaseException:
                # Ctrl-C, for one: nobody is to wait for what is under way
                stopped.append(True)
                _end(self._all)
                raise

    def _ask_again(self, request: dict[str, Any], stopped: list[bool]) -> Any:
        """Ask once, and again where the process ends by something else than its limits, maybe by another's fault."""
        answer: Any = Failed("it was interrupted")
        for worker in self._workers():
            if stopped:
                self._idle.append(worker)
                break
            answer, ended = worker.ask(request)
            if ended is None:
                self._idle.append(worker)
                break
            self._all.discard(worker)
            if ended:
                break
        return answer

    def _workers(self) -> Iterator["_Worker"]:
        """Yield an idle worker, if there is one, then a new one."""
        with contextlib.suppress(IndexError):
            yield self._idle.pop()
        worker = _Worker(*self._start)
        self._all.add(worker)
        yield worker


class _Worker:
    """A process, which a pipe tells when this one has ended."""

    def __init__(self, function: bytes, limits: Limits, quiet: bool):
        self._limits = limits
        self._pipe, other_end = Pipe()
        with other_end:
            # -P: the modules beside the file are not to be taken for others' of the same name.
            command = [
                sys.executable,
                "-P",
                str(_WORKER),
                str(other_end.fileno()),
                str(limits.processor),
            ]
            self.process = subprocess.Popen(
                [*command, str(limits.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                pass_fds=[other_end.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is not for it
                # The order of a set depends on the seed of hashes.
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )
        try:
            self._pipe.send((_path(), function))
            fault = self._pipe.recv()
        except (EOFError, ConnectionError):
            fault = "its process ended"
        if fault:
            self.end()
            raise CantRun(fault)

    def ask(self, request: dict[str, Any]) -> tuple[Any, bool | None]:
        """Return the answer, and None; or `Failed`, and whether a limit ended the process."""
        seconds = self._limits.seconds
        try:
            self._pipe.send(request)
            if self._pipe.poll(seconds or None):
                succeeded, value = self._pipe.recv()
                return (value if succeeded else Failed(value)), None
            self.end()
            return Failed(f"it took more than {seconds:g} s"), True
        except (EOFError, ConnectionError):
            status = self.end()
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        if -status == signal.SIGPROF:  # its own timer's
            return Failed(
                f"it took more than {self._limits.processor:g} s of processor time"
            ), True
        return Failed(f"its process ended with {name}"), False

    def end(self) -> int:
        """End the process, if it hasn't, with all that it has started, and say how it did."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with self.process, self._pipe:
            return self.process.wait()


def _end(workers: set[_Worker]) -> None:
    for worker in [*workers]:
        worker.end()
    workers.clear()


def _hidden() -> dict[str, Any]:
    """Return modules that nobody else can import: a user's files, which were run under names of their own."""
    hidden: dict[str, Any] = {}
    for name, module in [*sys.modules.items()]:
        has_no_spec = getattr(module, "__spec__", module) is None
        if has_no_spec and name != "__main__" and getattr(module, "__file__", None):
            hidden[name] = module
    return hidden


def _path() -> list[str]:
    """Return the folders that modules are imported from, those of a user's files among them."""
    folders = [*sys.path]
    for module in _hidden().values():
        file = Path(module.__file__).resolve()
        folders.append(str(file.parent))
    return folders


def pickle_function(function: Callable[..., Any]) -> bytes:
    """Pickle a function: by name where that can be imported, else its code and whatever it names.

    Raises:
        CantRun: something that it names can't be sent, such as an open file or a lock.
    """
    import dill

    hidden = _hidden()
    for name in hidden:
        # Functions of these modules are taken for what can't be imported.
        del sys.modules[name]
    try:
        return dill.dumps(function, recurse=True)
    except Exception as error:  # pickling runs code of all that it meets
        raise CantRun(in_a_line(error)) from error
    finally:
        sys.modules.update(hidden)
