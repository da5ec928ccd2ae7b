"""Rewards: reading completions and judging them, inside jit where every verifier can be, else on the host."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import (
    STYLES,
    AnswerStyle,
    are_right,
    parse_completion,
    read_completion,
)
from slpo_jax.rewards.functions import (
    Function,
    ProblemLike,
    Written,
    asked_of,
    cant_run,
    name_of,
    names_of,
)
from slpo_jax.rewards.processes import CantRun, Failed, Limits, Processes
from slpo_jax.rewards.relative_length import RELATIVE_LENGTH, relative_length
from slpo_jax.rewards.task_rewards import (
    COUNTDOWN,
    GYM,
    countdown,
    countdown_reference,
    gym,
    reaches_goal,
)
from slpo_jax.rewards.verifier import (
    ON_DEVICE,
    Judge,
    is_end,
    judge_completions,
    padded_table,
    text_table,
)

RewardFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(tokens int [N, A], references uint8 [N, R]) -> bool [N], traceable."""


class DeviceReward(NamedTuple):
    """A verifier inside jit, which says 0 or 1.

    Attributes:
        table: the bytes of each token id -> the bytes that it is read with, uint8 [V, L], 0 behind them.
        encode: problem -> what `judge` has to know of it, in bytes that zeros may follow.
        judge: see `verifier.Judge`.
    """

    table: Callable[[Sequence[bytes]], np.ndarray]
    encode: Callable[[ProblemLike], bytes]
    judge: Judge


class RewardEntry(NamedTuple):
    """A reward.

    Attributes:
        function: on the host, of what it names (`rewards.functions`); None is whether the answer is the reference.
        on_device: the same inside jit; None where only the host can say.
    """

    function: Function | None
    on_device: DeviceReward | None = None

    @property
    def needs_answer(self) -> bool:
        """Whether it can't judge a problem without an answer."""
        return self.function is None or names_of(self.function).needs_answer

    @property
    def follows(self) -> bool:
        """Whether it has to know what the rewards before it count as right."""
        return (
            self.function is not None and "is_right" in names_of(self.function).needed
        )

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns of a record that it can use; None for all."""
        if self.function is None:
            return frozenset()
        return names_of(self.function).columns


CORRECT = "correct"
REWARDS: dict[str, RewardEntry] = {
    CORRECT: RewardEntry(None),
    COUNTDOWN: RewardEntry(
        countdown, DeviceReward(text_table, countdown_reference, reaches_goal)
    ),
    GYM: RewardEntry(gym),
    RELATIVE_LENGTH: RewardEntry(relative_length),
}
"""By name what a completion earns (`config.reward`, `config.rewards`)."""

Weighted = Sequence[tuple[str, float]]
"""Names in `REWARDS`, each with its weight; the first that gives a verdict says what is right."""

_MOST_SEEN = 1 << 16  # completions that are remembered
# The verdict of a reward that is asked of whole completions alone
_TRUNCATED = Failed("it is truncated")


class Reading(NamedTuple):
    """A completion as it is read.

    Attributes:
        ids: its tokens, up to and including the one that ended it.
        text: without an end token.
        answer: as `parse_completion` reads it; None where there is none.
        cut: whether no end came within the budget, so that there is no answer. Its text is worth showing.
        latents: how many its thought took.
    """

    ids: list[int]
    text: str
    answer: str | None
    cut: bool
    latents: int = 0


class Verdicts(NamedTuple):
    """The rewards of N completions.

    Attributes:
        total: float32 [N], the weighted sum of the verdicts; 0 of an unjudged one.
        by_name: float32 [N] of each reward, without its weight; NaN where it gave no verdict.
        right: bool [N], see `Reward.right`.
        unjudged: bool [N]: a reward failed, wasn't asked as the completion is truncated, which no other judged by name,
            or gave None where it judged another completion of the problem; or no reward gave a verdict.
        cut: bool [N], truncated.
        failed: bool [N], where a reward failed.
    """

    total: np.ndarray
    by_name: dict[str, np.ndarray]
    right: np.ndarray
    unjudged: np.ndarray
    cut: np.ndarray
    failed: np.ndarray


class Reward:
    """The reader and judge of the completions of one template.

    Args:
        rewards: a name in `REWARDS`, or several with weights.
        style: of the template's answers.
        token_bytes: of each id of its tokenizer.
        eos_ids: the tokens that end an answer.
        processes: that each function is asked in; 0: in this one.
        seconds: that a function may take for a completion, in a process of its own; 0 is any.
    Attributes:
        on_device: inside jit; None where only the host can say.
        entries: the rewards by name.
    """

    def __init__(
        self,
        rewards: str | Weighted,
        style: AnswerStyle,
        token_bytes: Sequence[bytes],
        eos_ids: tuple[int, ...],
        processes: int = 0,
        seconds: float = 0.0,
    ):
        weighted = [(rewards, 1.0)] if isinstance(rewards, str) else rewards
        self.style = style
        self._bytes = token_bytes
        self._eos_ids = eos_ids
        # A tokenizer of words has a space before each; no text begins with the first one.
        first_bytes = {word[:1] for word in token_bytes}
        self._are_words = first_bytes <= {
            b"",
            b" ",
        }
        self.entries = {name: REWARDS[name] for name, _ in weighted}
        self._weights = dict(weighted)
        # A limit of time needs a process of its own.
        self._most = max(processes, 1) if seconds > 0 else processes
        self._limits = Limits(seconds)
        self._processes = self._start_processes()
        self._read = functools.lru_cache(_MOST_SEEN)(self._read_once)
        self.on_device: RewardFn | None = None
        if self._device is not None:
            self.on_device = self._make_on_device(self._device)

    def _make_on_device(self, device: DeviceReward) -> RewardFn:
        table_VL = device.table(self._bytes)
        eos_ids = self._eos_ids
        eos_id = eos_ids[0]

        def judge(tokens_NA, references_NR):
            # All end tokens are one.
            tokens_NA = jnp.where(is_end(tokens_NA, eos_ids), eos_id, tokens_NA)
            return judge_completions(
                table_VL, tokens_NA, references_NR, eos_id, device.judge
            )

        return judge

    @property
    def _device(self) -> DeviceReward | None:
        """The verifier inside jit: of one reward of weight 1."""
        ((name, entry), *more) = self.entries.items()
        if more or self._weights[name] != 1:
            return None
        if entry.function is not None:
            return entry.on_device
        compared = STYLES[self.style].compared
        if compared is None or self.style not in ON_DEVICE:
            return entry.on_device
        table, judge = ON_DEVICE[self.style]
        return DeviceReward(table, lambda problem: compared(problem.answer), judge)

    def asking(self, reward: str | Function) -> "Reward":
        """Return a copy that reads as this does, and judges by another reward, on the host.

        Args:
            reward: a name in `REWARDS` or of one of its own, or a function of what it names.
        Raises:
            UserError: there is no such name, or it can't be asked.
        """
        if callable(reward):
            name = name_of(reward)
            entry = RewardEntry(reward)
        elif reward in self.entries:
            name = reward
            entry = self.entries[reward]
        elif reward in REWARDS:
            name = reward
            entry = REWARDS[reward]
        else:
            names = ", ".join(REWARDS)
            raise UserError(
                f"reward: {reward!r} is unknown; give one of {names}, or a function"
            )
        if entry.follows:
            raise UserError(
                f"reward: {name} has to know what is right; give a reward that says so by itself"
            )
        judge = copy.copy(self)
        judge.entries = {name: entry}
        judge._weights = {name: 1.0}
        judge.on_device = None
        judge._processes = judge._start_processes()
        return judge

    def _start_processes(self) -> dict[str, Processes]:
        """Make the processes of each function, if they are asked in some.

        Raises:
            UserError: one can't be sent there.
        """
        processes: dict[str, Processes] = {}
        for name, entry in self.entries.items():
            # The relative length compares the completions of a batch.
            if not self._most or entry.function is None or name == RELATIVE_LENGTH:
                continue
            try:
                processes[name] = Processes(entry.function, self._most, self._limits)
            except CantRun as error:
                raise cant_run(name, error) from error
        return processes

    @property
    def needs_answer(self) -> bool:
        """Whether it can't judge a problem without an answer."""
        return any(entry.needs_answer for entry in self.entries.values())

    def width(self, problems: Iterable[ProblemLike]) -> int:
        """Return R, the bytes that `encode` needs for these problems, at least 1."""
        assert self._device is not None
        width = 1
        for problem in problems:
            reference = self._device.encode(problem)
            width = max(width, len(reference))
        return width

    def encode(self, problems: Sequence[ProblemLike], width: int) -> np.ndarray:
        """Encode B problems for `on_device`: uint8 [B, R], 0 behind them.

        Args:
            problems: B of them. (A row of zeros, say for padding, is matched by no completion.)
            width: R, enough for each, and the same for every batch so that shapes stay put.
        """
        assert self._device is not None
        references = [self._device.encode(problem) for problem in problems]
        return padded_table(references, width)

    def on_host(
        self, tokens_NA: np.ndarray, problems: Sequence[ProblemLike]
    ) -> np.ndarray:
        """Return the rewards of N completions, float32 [N]."""
        readings = [self.read(tokens) for tokens in tokens_NA]
        verdicts = self.judge(readings, problems)
        return verdicts.total

    def read(self, tokens_A: np.ndarray, latents: int = 0) -> Reading:
        """Read a completion, each distinct one once. Ids below 0 are no tokens.

        Args:
            latents: how many its thought took.
        """
        tokens = tuple(tokens_A.tolist())
        reading = self._read(tokens)
        return reading._replace(latents=int(latents))

    def _read_once(self, tokens: tuple[int, ...]) -> Reading:
        ids = [token for token in tokens if token >= 0]
        completion = read_completion(ids, self._bytes, self._eos_ids)
        answer = None
        if completion.ended:
            answer = parse_completion(completion.text, self.style)
        ids = ids[: completion.tokens]
        text = completion.text
        if self._are_words:
            text = text.removeprefix(" ")
        return Reading(ids, text, answer, not completion.ended)

    def judge(
        self,
        readings: Sequence[Reading],
        problems: Sequence[ProblemLike],
        with_truncated: bool = False,
    ) -> Verdicts:
        """Judge completions.

        Args:
            with_truncated: a truncated one is judged as if its text had ended.
        Raises:
            UserError: a function gives something else than a finite number.
        """
        truncated = np.array([reading.cut for reading in readings], bool)
        if with_truncated:
            readings = [self._as_ended(reading) for reading in readings]
        count = len(readings)
        total = np.zeros(count)
        by_name = dict[str, np.ndarray]()
        failed = np.zeros(count, bool)
        unjudged = np.zeros(count, bool)
        left_out = np.zeros(count, bool)
        judged_truncated = np.zeros(count, bool)
        decided = np.zeros(count, bool)
        right = np.zeros(count, bool)
        for name in self.entries:
            verdicts = self._ask(name, readings, problems, right, truncated)
            values = _values(verdicts)
            is_given = ~np.isnan(values)
            is_lost = _lost(verdicts, problems)
            is_left_out = np.array(
                [verdict is _TRUNCATED for verdict in verdicts], bool
            )
            has_failed = np.array(
                [isinstance(verdict, Failed) for verdict in verdicts], bool
            )
            failed |= has_failed & ~is_left_out
            unjudged |= is_lost & ~is_left_out
            left_out |= is_left_out
            if self._judges_truncated(name):
                judged_truncated |= is_given
            # The first reward that could say what is right has said so; None leaves it to the next one.
            right |= ~decided & (values >= 1)
            decided |= is_given | has_failed
            earned = np.where(is_given, values, 0.0)
            total += self._weights[name] * earned
            by_name[name] = values.astype(np.float32)
        # A truncated one, which some rewards leave out, is judged by those that name `truncated`.
        unjudged |= left_out & ~judged_truncated
        unjudged |= ~decided
        cut = np.array([reading.cut for reading in readings], bool)
        total = np.where(unjudged, 0.0, total)
        return Verdicts(
            total=total.astype(np.float32),
            by_name=by_name,
            right=right & ~cut,
            unjudged=unjudged,
            cut=cut,
            failed=failed,
        )

    def _judges_truncated(self, name: str) -> bool:
        function = self.entries[name].function
        return function is not None and "truncated" in names_of(function).named

    def _as_ended(self, reading: Reading) -> Reading:
        if not reading.cut:
            return reading
        answer = parse_completion(reading.text, self.style)
        return reading._replace(answer=answer, cut=False)

    def _ask(
        self,
        name: str,
        readings: Sequence[Reading],
        problems: Sequence[ProblemLike],
        right: np.ndarray,
        truncated: np.ndarray,
    ) -> list[float | Failed | None]:
        """Ask one reward; a function of many completions sees the truncated ones too, a function of one if it says so.

        Args:
            right: bool [N], what the rewards before it count as right.
            truncated: bool [N], whether a completion has no end, though it may be read as if it had.
        """
        function = self.entries[name].function
        if function is None:
            references = [problem.answer for problem in problems]
            answers = [reading.answer for reading in readings]
            are_same = are_right(answers, references, self.style)
            return [float(is_same) for is_same in are_same]

        # Truncated completions are left out, unless the function compares a batch or asks for them.
        names = names_of(function)
        judges_cut = self._judges_truncated(name)
        takes_cut = judges_cut or names.is_batched
        places: list[int] = []
        asked: list[ProblemLike] = []
        completions: list[Written] = []
        for place, reading in enumerate(readings):
            if reading.cut and not takes_cut:
                continue
            is_right = bool(right[place])
            places.append(place)
            asked.append(problems[place])
            completion = Written(
                text=reading.text,
                ids=reading.ids,
                latents=reading.latents,
                truncated=bool(truncated[place]),
                is_right=is_right,
            )
            completions.append(completion)

        # Those that were left out are not judged, nor are truncated ones that were only compared with.
        verdicts: list[float | Failed | None] = [_TRUNCATED] * len(readings)
        if places:
            processes = self._processes.get(name)
            given = asked_of(function, asked, completions, name, processes)
            for place, verdict in zip(places, given, strict=True):
                if judges_cut or not readings[place].cut:
                    verdicts[place] = verdict
        return verdicts

    def find_unearned(
        self, answers: Sequence[Sequence[int]], problems: Sequence[ProblemLike]
    ) -> list[int]:
        """Return places of references that their very text does not earn; none where functions alone say what is right.

        Args:
            answers: the ids of each reference's text, as its template writes it, without an end token.
            problems: of each.
        Returns:
            their places. A mark in the answer, for one, hides it.
        """
        if all(entry.function is not None for entry in self.entries.values()):
            return []
        # Most answers come many times, and are read once, in the order of the last of each.
        first: dict[str, int] = {}
        for place in reversed(range(len(problems))):
            first[problems[place].answer] = place
        end_id = self._eos_ids[0]
        given: list[str | None] = []
        for place in first.values():
            tokens_A = np.array([*answers[place], end_id], np.int32)
            reading = self.read(tokens_A)
            given.append(reading.answer)
        right = are_right(given, list(first), self.style)

        # Return all places of those that are not read as themselves.
        is_read = dict(zip(first, right, strict=True))
        places: list[int] = []
        for place, problem in enumerate(problems):
            if not is_read[problem.answer]:
                places.append(place)
        return places

    def right(
        self, readings: Sequence[Reading], problems: Sequence[ProblemLike]
    ) -> list[bool]:
        """Tell which completions count as right: those that earn 1 or more of the first reward with a verdict on them.

        A reward that gives None leaves it to the next one; where one fails, and of a truncated one, it is not right.
        """
        truncated = np.array([reading.cut for reading in readings], bool)
        open_ = ~truncated
        right = np.zeros(len(readings), bool)
        for name in self.entries:
            if not open_.any():
                break
            verdicts = self._ask(name, readings, problems, right, truncated)
            values = _values(verdicts)
            right |= open_ & (values >= 1)
            is_none = [verdict is None for verdict in verdicts]
            open_ &= np.array(is_none, bool)
        return right.tolist()


def _values(verdicts: Sequence[float | Failed | None]) -> np.ndarray:
    """Return the numbers among verdicts, float64 [N], NaN for what is none."""
    values = np.full(len(verdicts), np.nan)
    for row, verdict in enumerate(verdicts):
        if isinstance(verdict, float):
            values[row] = verdict
    return values


def _lost(
    verdicts: Sequence[float | Failed | None], problems: Sequence[ProblemLike]
) -> np.ndarray:
    """Tell, bool [N], which verdicts are missing: those that failed, and None where the problem has others."""
    judged: set[int] = set()
    for problem, verdict in zip(problems, verdicts, strict=True):
        if isinstance(verdict, float):
            judged.add(id(problem))
    lost = np.zeros(len(verdicts), bool)
    for row, verdict in enumerate(verdicts):
        if verdict is None:
            lost[row] = id(problems[row]) in judged
        else:
            lost[row] = isinstance(verdict, Failed)
    return lost
