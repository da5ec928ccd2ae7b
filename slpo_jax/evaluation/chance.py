"""What guessing gets right on a set: always the commonest answer, or one of the candidates that a question names."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from slpo_jax.evaluation.records import EvalRecords, Evals
from slpo_jax.evaluation.statistics import most_k, pass_ks
from slpo_jax.rewards.texts import compared

_CHOICE = re.compile(r"^\(?([A-Za-z])[.):]\s+(.+)$", re.MULTILINE)  # as `data.choices` writes them, a line each
_EITHER = re.compile(r"\b(\w+) or (?:an? |the )?(\w+)\?\s*\Z")  # ProsQA: Is Tom a lempus or a scrompus?


def candidates(question: str, reference: str) -> int:
    """How many answers a question offers, the reference among them; 0 where it offers none."""
    choices, wanted = _CHOICE.findall(question), compared(reference)
    if wanted in {compared(part) for choice in choices for part in choice}:
        return len(choices)
    either, words = _EITHER.search(question), wanted.decode().split()
    return 2 if either and sum(word.lower() in words for word in either.groups()) == 1 else 0


def chance(records: EvalRecords, name: str) -> dict[str, Any]:
    """The better of the two ways to guess.

    Args:
        records: of any row.
        name: of the set.
    Returns:
        acc, the share that one guess gets right; pass@k, that k guesses do, where there are samples, k as in a verdict;
        and both in a sentence.
    """
    total, ks = len(records.references), pass_ks(most_k(records))
    k = 8 if 8 in ks else ks[-1] if ks else 0
    common = Counter(map(compared, records.references)).most_common()
    shown = next(text for text in records.references if compared(text) == common[0][0])
    acc, of_k = (sum(count for _, count in common[:tries]) / total for tries in (1, k))
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    guess, more = f"the commonest answer, {shown},", f"one of the {k} commonest"
    offered = np.array([candidates(*each) for each in zip(records.questions, records.references, strict=False)])
    if offered.size and offered.all() and (share := np.mean(1 / offered)) >= acc:
        acc, of_k = float(share), float(np.mean(1 - (1 - 1 / offered) ** k))
        guess, more = f"one of the {'/'.join(map(str, np.unique(offered)))} candidates", f"one of {k} such guesses"
    said = f"Chance level on {name}: {guess} is right on {100 * acc:.1f} %"
    if not k:
        return {"acc": acc, "text": f"{said}."}
    said += f"; {more} is on {100 * of_k:.1f} %, which Pass@{k} is to be read against."
    return {"acc": acc, f"pass@{k}": of_k, "text": said}


def chance_levels(evals: Evals) -> Mapping[str, dict[str, Any]]:
    """`chance` of every set."""
    return {name: chance(records, name) for sets in evals.values() for name, records in sets.items()}
