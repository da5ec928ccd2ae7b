"""Train a latent reasoner with a reward of your own: `python examples/own_reward.py`.

A problem of Countdown gives three or four numbers and a goal; the answer is an expression that reaches it. The reward
below gives part of a point for an answer that comes close, so it can tell two wrong answers apart.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slpo_jax as slpo

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def value_of(words: list[str]) -> int | None:
    """What an expression comes to, from left to right; None if it is no expression."""
    numbers = words[::2]
    operations = words[1::2]
    if not all(word.isdigit() for word in numbers):
        return None
    if len(numbers) != len(operations) + 1:
        return None
    if not all(word in OPERATIONS for word in operations):
        return None
    value = int(numbers[0])
    for operation, number in zip(operations, numbers[1:], strict=True):
        value = OPERATIONS[operation](value, int(number))
    return value


def near(numbers: list[int], goal: int, completion: str) -> float:
    """1 for an answer that reaches the goal with each number once, up to 0.25 for one that comes close."""
    words = completion.split("###")[-1].split()
    value = value_of(words)
    if value is None or sorted(int(word) for word in words[::2]) != sorted(numbers):
        return 0.0
    distance = abs(value - goal)
    return 1.0 if distance == 0 else 0.5 / (1 + distance)


def main(
    workdir: Path = Path("runs/own_reward"), more: Mapping[str, Any] | None = None
) -> slpo.Evaluation:
    """Imitate, reward, and compare the reasoner before and after.

    Args:
        more: further keys of the config.
    """
    config = {"rl.objectives": ("answer_only",), **(more or {})}
    run = slpo.train("countdown", workdir=workdir, reward=near, config=config)
    before = run["imitate"].evaluate("countdown:test", samples=8, limit=200)
    after = run["answer_only"].evaluate("countdown:test", samples=8, limit=200)
    print(after.compare(before))
    print(run["answer_only"].solve("3 11 19 = 68"))
    return after


if __name__ == "__main__":
    main()
