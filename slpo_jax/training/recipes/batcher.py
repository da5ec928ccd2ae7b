"""The batches of imitation: which problems a step draws, and the buckets that their texts are padded to.

A recipe says what its texts are (`Recipe.needs`, `Recipe.rows`); everything else about a batch is here.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from slpo_jax.data.batches import EncodedProblems, SuffixBatch, draw_numbers, pad_prompts, pad_suffixes
from slpo_jax.data.templates import Ids
from slpo_jax.policy.prompted import Prompts

Slots = tuple[Any, ...]
"""Shapes of a phase's batches: buckets of its main texts, and the one size of everything else."""
Needs = tuple[int, ...]
"""Of one problem, at most: positions, slots of its main text, and the size of everything else."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """What one step's batch is made of.

    Attributes:
        phase: `recipe.Phase`.
        indices: int [B], of the problems.
        prompt_slots: buckets.
        slots: of `Recipe.slots`.
    """

    problems: EncodedProblems
    phase: Any
    step: int
    seed: int
    indices: np.ndarray
    prompt_slots: Sequence[int]
    slots: Slots

    @cached_property
    def index(self) -> np.ndarray:
        """int [B], what the rows' randomness is drawn by."""
        return draw_numbers(self.indices, len(self.problems))

    def rng(self, stream: int) -> np.random.Generator:
        """What is drawn on the host in this step; each use has a stream of its own."""
        return np.random.default_rng([self.seed, self.step, stream])

    def fit(self, longest: int) -> int:
        """The smallest bucket of the main texts that holds so many slots."""
        return next(size for size in self.slots[0] if size >= longest)

    def prompts(self, rows: Sequence[Ids]) -> Prompts:
        """B prompts in their smallest bucket."""
        return Prompts(*pad_prompts(rows, self.prompt_slots, self.problems.template.pad_id))

    def suffixes(self, rows: Sequence[Ids]) -> SuffixBatch:
        """B main texts in their smallest bucket."""
        return pad_suffixes(rows, self.fit(max(map(len, rows)) - 1), self.problems.template.pad_id)


def in_fours(size: int) -> int:
    """The first multiple of 4 that holds it, so that few programs are compiled."""
    return -(-size // 4) * 4


def usable(problems: EncodedProblems, max_tokens: int) -> list[int]:
    """The problems whose question, steps and answer together have at most `max_tokens` tokens; 0 is no limit."""
    texts = zip(problems.prompts, problems.steps, problems.answers, strict=True)
    sizes = [len(prompt) - 1 + sum(map(len, steps)) + len(answer) for prompt, steps, answer in texts]
    return [i for i, size in enumerate(sizes) if size <= max_tokens or not max_tokens]
