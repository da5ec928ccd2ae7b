"""A process that calls one function for `slpo_jax.rewards.processes`, which runs this file.

Its arguments are the number of an open pipe, and limits of a request: seconds of processor time, bytes of memory; 0 is
none. What it gets first is where modules are imported from and the function; it answers with a text, "" or what is
wrong with it. Then requests come, keywords each; an answer is (True, value), or (False, why there is none).

A function may be busy for ever, also in C, where Python can't be interrupted: then the kernel ends the process, by a
timer of its own processor time, or the one who asked does, and starts another.
"""

import fcntl
import os
import pickle
import resource
import signal
import sys
import types
from multiprocessing.connection import Connection


def main(pipe: Connection, processor: float) -> None:
    """Answer requests until there are no more."""
    path, function = pipe.recv()
    sys.path[:] = path
    try:
        function = pickle.loads(function)
    except BaseException as error:  # it imports whatever the function names
        pipe.send(in_words(error))
        return
    keep_module(function)
    pipe.send("")
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        # Its signal ends a process that has no handler.
        signal.setitimer(signal.ITIMER_PROF, processor)
        try:
            answer = pickle.dumps((True, function(**request)))
        except BaseException as error:
            # It is the user's code, and can raise anything, SystemExit too.
            answer = pickle.dumps((False, in_words(error)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(answer)


def keep_module(function: object) -> None:
    """Have the module of a function that came with its code be what the function sees.

    A pool that the function opens sends functions by name, and they have to be those of the module of that name.
    """
    namespace = getattr(function, "__globals__", None)
    name = getattr(function, "__module__", None)
    if namespace is None or name is None or name in sys.modules:
        return
    module = types.ModuleType(name)
    module.__dict__.update(namespace)
    sys.modules[name] = module


def in_words(error: BaseException) -> str:
    """Write an error in a line."""
    kind = type(error).__name__
    words = f"{kind}: {error}".split()
    return " ".join(words)


def obey() -> None:
    """Take signals as a Python program does that has no handlers of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def apart(pipe: int) -> None:
    """End with the one who asks, at once, and with nobody else; leave the standard streams to the function.

    Args:
        pipe: that it asks by.
    """
    # The one who asked ends its step before it obeys a signal to all, and needs the verdicts. Programs that the
    # function starts are to obey theirs, so these aren't ignored: a handler doesn't outlive `exec`.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # When the other end of standard input closes, the kernel ends this session, whatever it is busy with.
    if sys.platform == "linux":
        alive = os.dup(0)
        group = os.getpgid(0)
        fcntl.fcntl(alive, fcntl.F_SETOWN, -group)
        fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC)
    elif os.fork() == 0:
        # Where its signal, SIGIO, ends no process, another one waits for that.
        os.close(pipe)
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)
    # A process that the function forks, such as one of a pool, is to obey its signals.
    os.register_at_fork(after_in_child=obey)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)


if __name__ == "__main__":
    pipe_number = int(sys.argv[1])
    seconds = float(sys.argv[2])
    memory = int(sys.argv[3])
    apart(pipe_number)
    if sys.platform == "linux" and memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    main(Connection(pipe_number), seconds)
