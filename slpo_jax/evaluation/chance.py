"""What guessing gets right on a test set, which its figures are to be read against."""

import re
from collections import Counter
from typing import Any

import numpy as np

from slpo_jax.evaluation.records import EvalRecords
from slpo_jax.evaluation.statistics import most_k, pass_ks
from slpo_jax.rewards.texts import normalise_text

# A line for each choice, as `data.choices` writes them.
_CHOICE = re.compile(r"^\(?([A-Za-z])[.):]\s+(.+)$", re.MULTILINE)
# As in ProsQA: Is Tom a lempus or a scrompus?
_EITHER = re.compile(r"\b(\w+) or (?:an? |the )?(\w+)\?\s*\Z")
_LONGEST = 40  # characters of an answer that the sentence quotes


def count_candidates(question: str, reference: str) -> int:
    """Count the answers that a question offers, the reference among them; 0 where it offers none."""
    target = normalise_text(reference)
    choices = _CHOICE.findall(question)
    for letter, text in choices:
        if target == normalise_text(letter):
            return len(choices)
        if target == normalise_text(text):
            return len(choices)
    either = _EITHER.search(question)
    if either is None:
        return 0
    words = target.decode().split()
    first, second = either.groups()
    has_first = first.lower() in words
    has_second = second.lower() in words
    if has_first == has_second:
        return 0
    return 2


def chance_level(records: EvalRecords, name: str) -> dict[str, Any]:
    """Compute the better of two ways to guess: the commonest answers, or a choice among the candidates.

    Args:
        records: of any row.
        name: of the set.

    Returns:
        acc, the share that one guess gets right; where there are samples also pass@k, the share that k guesses
        get right, k being 8 or the largest; and both in a sentence.
    """
    ks = pass_ks(most_k(records))
    k = 0
    if 8 in ks:
        k = 8
    elif ks:
        k = ks[-1]

    # Guess the answers that most references are.
    references = records.references
    total = len(references)
    answers: Counter[bytes] = Counter()
    spellings: dict[bytes, str] = {}
    for text in references:
        answer = normalise_text(text)
        answers[answer] += 1
        spellings.setdefault(answer, text)
    ((commonest, count),) = answers.most_common(1)
    acc = count / total
    solved = 0
    for _, times in answers.most_common(k):
        solved += times
    acc_of_k = solved / total
    shown = spellings[commonest]
    if len(shown) > _LONGEST:
        shown = shown[: _LONGEST - 3] + "..."
    guess = f"the commonest answer, {shown},"
    guesses = f"one of the {k} commonest"

    # Or choose among the candidates, where every question offers some.
    counts: list[int] = []
    for question, reference in zip(records.questions, references, strict=False):
        counts.append(count_candidates(question, reference))
    offered = np.array(counts)
    if offered.size and offered.all():
        right = 1 / offered
        share = float(np.mean(right))
        if share >= acc:
            acc = share
            wrong = 1 - right
            all_wrong = wrong**k
            acc_of_k = float(np.mean(1 - all_wrong))
            different = np.unique(offered)
            numbers = "/".join(map(str, different))
            guess = f"one of the {numbers} candidates"
            guesses = f"one of {k} such guesses"

    sentence = f"Chance level on {name}: "
    sentence += f"{guess} is right on {100 * acc:.1f} %"
    if not k:
        return {"acc": acc, "text": f"{sentence}."}
    sentence += f"; {guesses} is on {100 * acc_of_k:.1f} %"
    sentence += f", which Pass@{k} is to be read against."
    return {
        "acc": acc,
        f"pass@{k}": acc_of_k,
        "text": sentence,
    }
