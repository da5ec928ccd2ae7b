r"""math_verify, which judges LaTeX answers; imported in processes of `slpo_jax.rewards.equivalence` alone.

What a model writes may keep sympy busy for ever, also in C, where Python can't be interrupted (`10^{10^{10}}`).
"""

import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

# Its own timeouts need the alarm signal and end Python code alone; it warns that they are off.
logging.disable(logging.WARNING)
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0)]


def judge(answer: str, reference: str) -> bool:
    """Whether two expressions in LaTeX are equivalent."""
    return bool(verify(_read(reference), _read(answer), timeout_seconds=None))


def _read(latex: str) -> list[Any]:
    return parse(rf"\boxed{{{latex}}}", _EXTRACTION, parsing_timeout=None)


judge("0.5", r"\frac{1}{2}")  # tables that are made on first use
