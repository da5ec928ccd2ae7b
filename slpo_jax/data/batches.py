"""Input order and padded batches in the slot layout of `slpo_jax`, in numpy."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from slpo_jax.data.problem import Problem, Problems
from slpo_jax.data.templates import Ids, Template
from slpo_jax.errors import UserError

Indices = Sequence[int] | np.ndarray
Padded = tuple[np.ndarray, np.ndarray]


class SuffixBatch(NamedTuple):
    """A batch of right-padded suffixes, as inputs and next-token targets.

    Attributes:
        tokens: int32 [B, A], end marker, s_1, s_2, ... (eos is never an input).
        targets: int32 [B, A], s_1, s_2, ..., eos.
        weights: float32 [B, A], 1 where there's a target, 0 where padded.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class EncodedProblems:
    """A problem set with its token ids, all lists in the order of `problems`.

    Attributes:
        problems: the set, and what is known of its source.
        prompts: ids of each prompt, start marker included.
        steps: ids of each problem's steps, one list a step.
        answers: ids of each answer, without end marker and eos; none of a problem without one.
        template: what made the ids.
    """

    problems: Problems
    prompts: list[Ids]
    steps: list[list[Ids]]
    answers: list[Ids]
    template: Template

    def __len__(self) -> int:
        return len(self.problems)

    def most_tokens(self, seed: int, steps: int, batch_size: int, parts: int) -> int:
        """Return the largest number of tokens of the prompts of a part of a batch, in a run's steps; 0 without steps.

        Args:
            seed, batch_size: of `batch_indices`.
            parts: of equal size, that each batch is cut into.
        """
        lengths = np.array([len(prompt) for prompt in self.prompts])
        # The order is the same for any batch size, so that all steps are one batch here.
        n_drawn = steps * batch_size
        indices = batch_indices(seed, 0, len(self), n_drawn)
        size = batch_size // parts
        lengths_in_order = lengths[indices]
        lengths_of_parts = lengths_in_order.reshape(-1, size)
        totals = lengths_of_parts.sum(axis=1)
        return int(totals.max(initial=0))

    def suffix(
        self, index: int, first_step: int | None = 0, first_token: int = 0
    ) -> Ids:
        """Return ids of a problem's suffix with the steps from `first_step` on; None for the answer alone.

        Of these steps, what comes before their token `first_token` is left out. Without an end marker the prompt's last
        token is the first: what the suffix comes out of.
        """
        tokens = self._tokens_of_steps(index, first_step)
        rest = tokens[first_token:]
        answer = self.answers[index]
        suffix = self.template.join_suffix([rest], answer)
        if self.template.closing_ids:
            return suffix
        prompt = self.prompts[index]
        return [prompt[-1], *suffix]

    def suffix_size(self, index: int, first_step: int | None = 0) -> int:
        """Return how many ids such a `suffix` has."""
        tokens = self._tokens_of_steps(index, first_step)
        # Without an end marker the prompt's last token is in its place.
        closing = len(self.template.closing_ids) or 1
        answer = len(self.answers[index])
        eos = 1
        return closing + len(tokens) + answer + eos

    def _tokens_of_steps(self, index: int, first_step: int | None) -> Ids:
        tokens: Ids = []
        if first_step is None:
            return tokens
        for step in self.steps[index][first_step:]:
            tokens.extend(step)
        return tokens

    def subset(self, indices: Indices) -> "EncodedProblems":
        """Return the problems at `indices`, in that order."""
        problems: list[Problem] = []
        prompts: list[Ids] = []
        steps: list[list[Ids]] = []
        answers: list[Ids] = []
        for index in indices:
            problems.append(self.problems[index])
            prompts.append(self.prompts[index])
            steps.append(self.steps[index])
            answers.append(self.answers[index])
        return EncodedProblems(
            problems=self.problems.with_only(problems),
            prompts=prompts,
            steps=steps,
            answers=answers,
            template=self.template,
        )

    def prompt_batch(self, indices: Indices, slots: Sequence[int]) -> Padded:
        """Pad the prompts of the problems at `indices`, see `pad_prompts`."""
        prompts = [self.prompts[index] for index in indices]
        return pad_prompts(prompts, slots, self.template.pad_id)


def encode_problems(
    template: Template,
    problems: Sequence[Problem],
    with_steps: bool = True,
    unknown: Counter[str] | None = None,
) -> EncodedProblems:
    """Tokenise a set at once.

    Args:
        template: the reasoner's texts, bound to its tokenizer.
        problems: the set.
        with_steps: False leaves the steps out, where none are going to be written: they need not be in the vocabulary.
        unknown: is given the words of questions and answers that the tokenizer doesn't know.
    Returns:
        the ids, to be cut into batches.
    Raises:
        UserError: without `unknown`, a text has such a word.
    """
    if not isinstance(problems, Problems):
        problems = Problems(problems)
    questions: list[str] = []
    texts_of_steps: list[Sequence[str]] = []
    texts_of_answers: list[str] = []
    for problem in problems:
        questions.append(problem.question)
        texts_of_steps.append(problem.steps if with_steps else ())
        # Problems without an answer have no ids of one, and not those of an empty text.
        if problem.answer:
            texts_of_answers.append(problem.answer)
    prompts = template.prompts(questions, unknown)
    steps = template.step_ids(texts_of_steps)
    ids_of_answers = iter(template.answer_ids(texts_of_answers, unknown))
    answers: list[Ids] = []
    for problem in problems:
        ids: Ids = []
        if problem.answer:
            ids = next(ids_of_answers)
        answers.append(ids)
    return EncodedProblems(
        problems=problems,
        prompts=prompts,
        steps=steps,
        answers=answers,
        template=template,
    )


def batch_indices(seed: int, step: int, n: int, batch_size: int) -> np.ndarray:
    """Return the examples of one training step; a pure function, so that resuming needs no saved position.

    The input is the concatenation of one shuffle of 0..n-1 per epoch, cut into batches that go on over the borders of
    epochs: no example is left out, and none comes twice within an epoch.

    Args:
        seed: non-negative; another seed gives another order.
        step: training step, from 0.
        n: number of examples, at least 1.
        batch_size: B, may be larger than n.
    Returns:
        int64 [B].
    """
    epoch, start = divmod(step * batch_size, n)
    end = start + batch_size
    # Lay the shuffles of as many epochs end to end as the batch reaches into.
    last_epoch = epoch + end // n
    shuffles: list[np.ndarray] = []
    for each in range(epoch, last_epoch + 1):
        shuffles.append(_permutation(seed, each, n))
    order = np.concatenate(shuffles)
    return order[start:end]


def draw_numbers(indices: np.ndarray, n: int) -> np.ndarray:
    """Number a batch's rows for its randomness: an example's index, and n more each time that it comes again.

    A batch that goes over the border of an epoch may hold an example twice, whose rollouts must not be equal.

    Args:
        indices: int [B], examples of one batch, each below n.
        n: number of examples.
    Returns:
        int32 [B], all different.
    """
    times = Counter[int]()
    numbers = np.empty(len(indices), np.int32)
    for row, index in enumerate(indices.tolist()):
        repeats = times[index]
        numbers[row] = index + n * repeats
        times[index] += 1
    return numbers


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    rng = np.random.default_rng([seed, epoch])
    return rng.permutation(n)


def pad_prompts(
    prompts: Sequence[Ids], slots: Sequence[int], pad_id: int = 0
) -> Padded:
    """Left-pad prompts to the smallest bucket that holds them all.

    Args:
        prompts: B lists of ids.
        slots: sizes of the buckets (`config.prompt_slots`), one of which they fit (`run.run_checks.check_prompts`).
        pad_id: what padded slots hold; models mask them.
    Returns:
        tokens int32 [B, P] and valid bool [B, P], False where padded, with P the bucket.
    """
    longest = max(map(len, prompts))
    large_enough = [size for size in slots if size >= longest]
    bucket = min(large_enough)
    shape = (len(prompts), bucket)
    tokens = np.full(shape, pad_id, dtype=np.int32)
    valid = np.zeros(shape, dtype=bool)
    for number, row in enumerate(prompts):
        begin = bucket - len(row)
        tokens[number, begin:] = row
        valid[number, begin:] = True
    return tokens, valid


def end_to_end(most: int, rows: int, slots: int) -> int:
    """Return how many slots a row has in which a batch's prompts lie end to end (`Prompts.packed_slots`).

    Args:
        most: tokens of the prompts of any batch that is encoded at once, on one device.
        rows: B, its prompts.
        slots: P, what the prompts are padded to otherwise.
    Returns:
        `most` up to a multiple of 4 B, so that few programs are compiled; 0, for no such row, where it saves too
            little.
    """
    unit = 4 * rows
    units = -(-most // unit)
    capacity = units * unit
    saves_enough = capacity <= 0.85 * rows * slots
    return capacity if saves_enough else 0


def pad_suffixes(suffixes: Sequence[Ids], slots: int, pad_id: int = 0) -> SuffixBatch:
    """Right-pad suffixes and shift them into inputs and targets.

    Args:
        suffixes: B lists of ids, end marker to eos; one of m ids takes m - 1 slots.
        slots: A (`config.max_answer_tokens`).
        pad_id: what padded slots hold.
    Returns:
        the batch.
    Raises:
        UserError: a suffix needs more slots, say for a long `config.prompt.closing`.
    """
    shape = (len(suffixes), slots)
    tokens = np.full(shape, pad_id, dtype=np.int32)
    targets = np.full(shape, pad_id, dtype=np.int32)
    weights = np.zeros(shape, dtype=np.float32)
    for number, suffix in enumerate(suffixes):
        length = len(suffix) - 1
        if length > slots:
            raise UserError(
                f"config.max_answer_tokens: row {number} of the batch needs {length} answer slots, there are {slots}; "
                "set it higher or shorten the steps"
            )
        # The target of each token is the one that follows it.
        tokens[number, :length] = suffix[:-1]
        targets[number, :length] = suffix[1:]
        weights[number, :length] = 1.0
    return SuffixBatch(tokens, targets, weights)


def padded_chunks(n: int, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut 0..n-1 into whole batches, the last one filled up with its last example.

    Args:
        n: number of examples.
        batch_size: B.
    Yields:
        (indices int64 [B], real bool [B]): real is False for the filling, which results must leave out.
    """
    for begin in range(0, n, batch_size):
        end = begin + batch_size
        positions = np.arange(begin, end, dtype=np.int64)
        indices = np.minimum(positions, n - 1)
        is_real = positions < n
        yield indices, is_real
