r"""A process that judges LaTeX answers with math_verify for `slpo_jax.rewards.equivalence`, which runs this file.

Its argument is the time of a request in seconds. A request is a line of JSON, [answer, reference]; the reply is a line,
1 or 0. The first line says that it is ready.
What a model writes may keep sympy busy for ever, also in C, where Python can't be interrupted (`10^{10^{10}}`): then
the kernel ends the process, by a timer of its own processor time, and the one who asked starts another.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

_MEMORY = 2 << 30  # bytes of address space


def main(seconds: float) -> None:
    """Answer requests until standard input ends, each in so much processor time."""
    from math_verify import LatexExtractionConfig, parse, verify

    # Its own timeouts need the alarm signal and end Python code alone; it warns that they are off.
    logging.disable(logging.WARNING)
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(latex: str) -> list[Any]:
        return parse(rf"\boxed{{{latex}}}", extraction, parsing_timeout=None)

    verify(read(r"\frac{1}{2}"), read("0.5"), timeout_seconds=None)  # tables that are made on first use
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends a process that has no handler
        answer, reference = json.loads(line)
        try:
            right = verify(read(reference), read(answer), timeout_seconds=None)
        except Exception:  # a grammar and an algebra system on arbitrary input: whatever fails is no right answer
            right = False
        print(int(right), flush=True)


if __name__ == "__main__":
    # The one who asked ends its step before it obeys a signal to all, and needs the verdicts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    main(float(sys.argv[1]))
