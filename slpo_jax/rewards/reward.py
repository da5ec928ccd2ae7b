"""How a completion is read and what it earns: inside jit where answers are numbers or texts, else on the host."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.errors import UserError, in_a_line
from slpo_jax.rewards.answers import AnswerStyle, are_right, parse_completion, read_completion
from slpo_jax.rewards.ending import is_end
from slpo_jax.rewards.text_verifier import ON_DEVICE, verify

RewardFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(tokens int [N, A], references uint8 [N, R]) -> bool [N], traceable."""

TextRewardFn = Callable[[str, str, str], float]
"""(question, reference, completion) -> a finite number."""


class Asked(Protocol):
    """A question, and the reference that its answers are compared with."""

    @property
    def question(self) -> str: ...

    @property
    def answer(self) -> str: ...


CORRECT = "correct"
REWARDS: dict[str, TextRewardFn | None] = {CORRECT: None}
"""By name (`config.reward`) what a completion earns. None: 1 where its answer is the reference, else 0."""

_LARGEST = float(np.finfo(np.float32).max)
_MOST_SEEN = 1 << 16  # completions that are remembered


class Reading(NamedTuple):
    """What a completion says.

    Attributes:
        ids: its tokens, up to and including the one that ended it.
        text: without an end token.
        answer: as `parse_completion` reads it; None where there is none.
        cut: whether no end came within the budget, so that there is no answer. Its text is worth showing.
    """

    ids: list[int]
    text: str
    answer: str | None
    cut: bool


class Reward:
    """What reads and judges the completions of one template.

    Args:
        name: in `REWARDS`.
        style: of the template's answers.
        token_bytes: of each id of its tokenizer.
        eos_ids: the tokens that end an answer.
    Attributes:
        on_device: inside jit; None where only the host can say.
    """

    def __init__(self, name: str, style: AnswerStyle, token_bytes: Sequence[bytes], eos_ids: tuple[int, ...]):
        self.style, self._name, self._function = style, name, REWARDS[name]
        self._bytes, self._eos_ids = token_bytes, eos_ids
        self._read = functools.lru_cache(_MOST_SEEN)(self._read_once)
        self.on_device: RewardFn | None = None
        if self._function is None and style in ON_DEVICE:
            table_VL = ON_DEVICE[style][0](token_bytes)
            self.on_device = lambda tokens_NA, references_NR: verify(
                table_VL, jnp.where(is_end(tokens_NA, eos_ids), eos_ids[0], tokens_NA), references_NR, eos_ids[0], style
            )

    def asking(self, reward: str | TextRewardFn) -> "Reward":
        """One that judges otherwise, on the host, and reads as this does.

        Args:
            reward: a name in `REWARDS`, or a function.
        Raises:
            UserError: there is no such name.
        """
        if isinstance(reward, str) and reward not in REWARDS:
            raise UserError(f"reward: {reward!r} is unknown; give one of {', '.join(REWARDS)}, or a function")
        other = copy.copy(self)
        other._name = reward if isinstance(reward, str) else getattr(reward, "__name__", "reward")
        other._function = REWARDS[reward] if isinstance(reward, str) else reward
        other.on_device = None
        return other

    def on_host(self, tokens_NA: np.ndarray, asked: Sequence[Asked]) -> np.ndarray:
        """float32 [N]: what N completions earn."""
        return np.asarray(self.earned([self.read(tokens) for tokens in tokens_NA], asked), np.float32)

    def read(self, tokens_A: np.ndarray) -> Reading:
        """What one completion says; each distinct one is read once. Ids below 0 are no tokens."""
        return self._read(tuple(tokens_A.tolist()))

    def _read_once(self, tokens: tuple[int, ...]) -> Reading:
        ids = [token for token in tokens if token >= 0]
        done = read_completion(ids, self._bytes, self._eos_ids)
        answer = parse_completion(done.text, self.style) if done.ended else None
        return Reading(ids[: done.tokens], done.text, answer, not done.ended)

    def earned(self, readings: Sequence[Reading], asked: Sequence[Asked]) -> list[float]:
        """What each completion earns; one that is cut, nothing.

        Raises:
            UserError: a registered function gives something else than a finite number.
        """
        function = self._function
        if function is None:
            references = [each.answer for each in asked]
            return list(map(float, are_right([reading.answer for reading in readings], references, self.style)))
        return [
            0.0 if reading.cut else self._asked(function, each, reading.text)
            for reading, each in zip(readings, asked, strict=True)
        ]

    def unearned(self, answers: Sequence[Sequence[int]], asked: Sequence[Asked]) -> list[int]:
        """Which references their very text does not earn; none where a function says what is right.

        Args:
            answers: the ids of each reference's text, as its template writes it, without an end token.
            asked: of each.
        Returns:
            their places. A mark in the answer, for one, hides it.
        """
        if self._function is not None:
            return []
        first = {each.answer: place for place, each in reversed([*enumerate(asked)])}  # most answers come many times
        readings = [self.read(np.array([*answers[place], self._eos_ids[0]], np.int32)) for place in first.values()]
        right = self.right(readings, [asked[place] for place in first.values()])
        lost = {answer for answer, is_right in zip(first, right, strict=True) if not is_right}
        return [place for place, each in enumerate(asked) if each.answer in lost]

    def right(self, readings: Sequence[Reading], asked: Sequence[Asked]) -> list[bool]:
        """Which completions an evaluation counts as right: those that earn 1 or more."""
        return [earned >= 1 for earned in self.earned(readings, asked)]

    def _asked(self, function: TextRewardFn, asked: Asked, text: str) -> float:
        try:
            value: Any = function(asked.question, asked.answer, text)
        except Exception as error:  # it is the user's code, and can raise anything
            raise UserError(f"config.reward: {self._name}: {in_a_line(error)}; mend the function") from error
        number = float(value) if isinstance(value, int | float | np.generic) else math.nan
        if not abs(number) <= _LARGEST:
            shown = f"{self._name} gives {value!r} for {asked.question[:60]!r}"
            raise UserError(f"config.reward: {shown}; return a finite number")
        return number
