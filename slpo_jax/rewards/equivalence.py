"""Equivalence of expressions in LaTeX, as math_verify has it, in bounded time and memory.

It works in processes of its own: its timeouts need the main thread and don't end every computation, and an interpreter
that is stuck in one can only be ended from outside. A verdict is asked for once.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from slpo_jax.errors import UserError
from slpo_jax.rewards.processes import CantRun, Limits, Processes

Pair = tuple[str, str]

_LIMITS = Limits(processor=2.0, memory=2 << 30)
_LONGEST = 500  # characters of an expression; longer ones are taken for wrong unseen
_MOST_WORKERS = 8
# The number of requests that another worker is worth starting for, which takes a second.
_PER_WORKER = 16
_MOST_KNOWN = 1 << 16

_known: dict[Pair, bool] = {}


def _load_judge() -> Callable[[str, str], bool]:
    r"""Return math_verify's (answer, reference) -> whether they are equivalent; called in processes of its own alone.

    What a model writes may keep sympy busy for ever, also in C, where Python can't be interrupted (`10^{10^{10}}`).
    """
    from math_verify import LatexExtractionConfig, parse, verify

    # Its own timeouts need the alarm signal and end Python code alone; it warns that they are off.
    logging.disable(logging.WARNING)
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(latex: str) -> list[Any]:
        return parse(rf"\boxed{{{latex}}}", extraction, parsing_timeout=None)

    def judge(answer: str, reference: str) -> bool:
        expected = read(reference)
        given = read(answer)
        return bool(verify(expected, given, timeout_seconds=None))

    judge("0.5", r"\frac{1}{2}")  # tables that are made on first use
    return judge


class _Judge:
    """The judge, which is loaded where it is sent to."""

    def __reduce__(self):
        return _load_judge, ()


@functools.cache
def _processes() -> Processes:
    return Processes(
        _Judge(),
        min(_MOST_WORKERS, os.cpu_count() or 1),
        _LIMITS,
        _PER_WORKER,
        quiet=True,
    )


def are_equivalent(pairs: Sequence[Pair]) -> list[bool]:
    """Judge answers by math_verify.

    Args:
        pairs: N of (answer, reference), in LaTeX without delimiters.
    Returns:
        N verdicts. An answer or a reference that can't be read, is too long, or takes too much time or memory is wrong.
    Raises:
        UserError: math-verify isn't installed.
    """
    short = []
    for pair in dict.fromkeys(pairs):
        if max(map(len, pair)) <= _LONGEST:
            short.append(pair)
    verdicts = {pair: _known[pair] for pair in short if pair in _known}
    new = [pair for pair in short if pair not in verdicts]
    requests: list[dict[str, Any]] = []
    for answer, reference in new:
        requests.append({"answer": answer, "reference": reference})
    try:
        judged = _processes().ask(requests)
    except CantRun as error:
        raise UserError(
            f"math-verify: can't be used ({error}), which answers in \\boxed{{}} are compared with; "
            "install it (pip install 'slpo_jax[latex]')"
        ) from error
    for pair, verdict in zip(new, judged, strict=True):
        verdicts[pair] = verdict is True
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    _known.update(verdicts)
    return [verdicts.get(pair, False) for pair in pairs]
