"""The batches of the stages that roll out."""

from collections.abc import Callable, Sequence

import numpy as np

from slpo_jax.data.batches import EncodedProblems, batch_indices, draw_numbers, end_to_end, pad_suffixes
from slpo_jax.data.problem import Problem
from slpo_jax.policy.prompted import PromptedBatch, Prompts


def make_batch(
    problems: EncodedProblems,
    step: int,
    seed: int,
    batch_size: int,
    prompt_slots,
    encode: Callable[[Sequence[Problem]], np.ndarray] | None,
    most: int = 0,
    parts: int = 1,
    answer_slots: int = 0,
    before: Sequence[int] = (),
) -> PromptedBatch:
    """The `PromptedBatch` of one step; a pure function of its arguments.

    Args:
        prompt_slots: buckets.
        encode: problems -> their references, uint8 [B, R]; None leaves them out.
        most: tokens of the prompts of any part (`EncodedProblems.most_tokens`), which are encoded end to end where that
            is much less than their slots; 0 leaves them padded.
        parts: how many devices and micro-batches the prompts are sharded over.
        answer_slots: A, of the reference answers' tokens; 0 leaves them out.
        before: steps whose batches are used together with this one: a problem's randomness is another in each.
    Raises:
        ValueError: a part has more than `most` tokens, some of which would be lost.
    """
    indices = batch_indices(seed, step, len(problems), batch_size)
    tokens, valid = problems.prompt_batch(indices, prompt_slots)
    references = encode([problems.problems[i] for i in indices]) if encode else np.zeros((batch_size, 0), np.uint8)
    capacity = end_to_end(most, batch_size // parts, valid.shape[1]) if most else 0
    found = int(valid.reshape(parts, -1).sum(axis=1).max())
    if capacity and found > capacity:
        raise ValueError(f"most: {most} is too low for a part of step {step}, whose prompts have {found} tokens")
    answers = None
    if answer_slots:
        suffixes = [problems.suffix(i, None) for i in indices]
        answers = np.asarray(pad_suffixes(suffixes, answer_slots, problems.template.pad_id).targets)
    together = [batch_indices(seed, other, len(problems), batch_size) for other in before]
    index = draw_numbers(np.concatenate([*together, indices]), len(problems))[-batch_size:]
    return PromptedBatch(Prompts(tokens, valid, capacity), references, index, answers)
