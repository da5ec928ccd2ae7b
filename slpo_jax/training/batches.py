"""The batches of the stages that roll out."""

from slpo_jax.policy.prompted import PromptedBatch
from slpo_jax.policy.rollout import Prompts
from slpo_jax.text.batches import EncodedProblems, batch_indices, end_to_end
from slpo_jax.text.verifier import encode_references


def make_batch(
    problems: EncodedProblems, step: int, seed: int, batch_size: int, prompt_slots, width: int, most=0, parts=1
) -> PromptedBatch:
    """The `PromptedBatch` of one step; a pure function of its arguments.

    Args:
        prompt_slots: buckets.
        width: R, of the references.
        most: tokens of the prompts of any part (`EncodedProblems.most_tokens`), which are encoded end to end where that
            is much less than their slots; 0 leaves them padded.
        parts: how many devices and micro-batches the prompts are shared out over.
    """
    indices = batch_indices(seed, step, len(problems), batch_size)
    padded = problems.prompt_batch(indices, prompt_slots)
    references = encode_references([problems.problems[i].answer for i in indices], width)
    places = end_to_end(most, batch_size // parts, padded.valid.shape[1]) if most else 0
    assert not places or padded.valid.reshape(parts, -1).sum(axis=1).max() <= places, "most is too low"
    return PromptedBatch(Prompts(padded.tokens, padded.valid, places), references, padded.index)
