"""When two expressions in LaTeX are equivalent, as math_verify has it, in bounded time and memory.

It works in processes of its own: its timeouts need the main thread and don't end every computation, and an interpreter
that is stuck in one can only be ended from outside. A verdict is asked for once.
"""

import functools
import os
import pkgutil
from collections.abc import Sequence

from slpo_jax.errors import UserError
from slpo_jax.rewards.processes import CantRun, Limits, Processes

Pair = tuple[str, str]

_LIMITS = Limits(processor=2.0, memory=2 << 30)
_LONGEST = 500  # characters of an expression; longer ones are taken for wrong unseen
_MOST_WORKERS = 8
_PER_WORKER = 16  # requests that another one is worth starting for, which takes a second
_MOST_KNOWN = 1 << 16

_known: dict[Pair, bool] = {}


class _Judge:
    """`equivalence_judge.judge` where it is sent to; here it isn't imported."""

    def __reduce__(self):
        return pkgutil.resolve_name, ("slpo_jax.rewards.equivalence_judge:judge",)


@functools.cache
def _processes() -> Processes:
    return Processes(_Judge(), min(_MOST_WORKERS, os.cpu_count() or 1), _LIMITS, _PER_WORKER, quiet=True)


def are_equivalent(pairs: Sequence[Pair]) -> list[bool]:
    """Judge answers.

    Args:
        pairs: N of (answer, reference), in LaTeX without delimiters.
    Returns:
        N verdicts. An answer or a reference that can't be read, is too long, or takes too much time or memory is wrong.
    Raises:
        UserError: math-verify isn't installed.
    """
    short = [pair for pair in dict.fromkeys(pairs) if max(map(len, pair)) <= _LONGEST]
    found = {pair: _known[pair] for pair in short if pair in _known}
    new = [pair for pair in short if pair not in found]
    try:
        told = _processes().ask([{"answer": answer, "reference": reference} for answer, reference in new])
    except CantRun as error:
        raise UserError(
            f"math-verify: can't be used ({error}), which answers in \\boxed{{}} are compared with; "
            "install it (pip install 'slpo_jax[latex]')"
        ) from error
    found |= {pair: verdict is True for pair, verdict in zip(new, told, strict=True)}
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    _known.update(found)
    return [found.get(pair, False) for pair in pairs]
