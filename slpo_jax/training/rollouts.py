"""Rollouts of the stage `rl`: a step's batch, its trajectories and their rewards, and what is counted of them.

Names of arrays end with their axes (`slpo_jax/__init__.py`): B prompts, G rollouts of each, N = B*G of all.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.data.batches import (
    EncodedProblems,
    batch_indices,
    draw_numbers,
    end_to_end,
    pad_suffixes,
)
from slpo_jax.data.problem import Problem
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, PromptedBatch, Prompts, repeat_rows
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.policy.score import are_truncated, used_slots
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.rewards.unjudged import LOWEST, Unjudged
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout, all_gather_params
from slpo_jax.training.state import Sums, TrainState, map_micro_batches

RolledBatch = tuple[PromptedBatch, Trajectories, jax.Array]
"""Prompts [B], trajectories [B*G], a prompt's G consecutive, and rewards [B, G]."""


def make_batch(
    problems: EncodedProblems,
    step: int,
    seed: int,
    batch_size: int,
    prompt_slots,
    encode: Callable[[Sequence[Problem]], np.ndarray] | None,
    max_tokens: int = 0,
    shards: int = 1,
    *,
    answer_slots: int = 0,
    earlier_steps: Sequence[int] = (),
) -> PromptedBatch:
    """Make the `PromptedBatch` of one step; a pure function of its arguments.

    Args:
        prompt_slots: buckets.
        encode: problems -> their references, uint8 [B, R]; None leaves them out.
        max_tokens: of the prompts of any shard (`EncodedProblems.most_tokens`), which are encoded end to end where that
            is much less than their slots; 0 leaves them padded.
        shards: of the prompts: devices times micro-batches.
        answer_slots: A, of the reference answers' tokens; 0 leaves them out.
        earlier_steps: steps whose batches are used together with this one: a problem's randomness is another in each.
    Raises:
        ValueError: a shard has more than `max_tokens` tokens, some of which would be lost.
    """
    indices = batch_indices(seed, step, len(problems), batch_size)
    tokens, valid = problems.prompt_batch(indices, prompt_slots)

    # Prompts lie end to end where that is much less than their slots.
    packed_slots = 0
    if max_tokens:
        _, slots = valid.shape
        packed_slots = end_to_end(max_tokens, batch_size // shards, slots)
    tokens_of_shards = valid.reshape(shards, -1).sum(axis=1)
    fullest = int(tokens_of_shards.max())
    if packed_slots and fullest > packed_slots:
        raise ValueError(
            f"max_tokens: {max_tokens} is too low for a shard of step {step}, whose prompts have {fullest} tokens"
        )
    prompts = Prompts(tokens, valid, packed_slots)

    # What completions are judged by on the device, and what they would be in tokens.
    references = np.zeros((batch_size, 0), np.uint8)
    if encode:
        drawn = [problems.problems[i] for i in indices]
        references = encode(drawn)
    answers = None
    if answer_slots:
        suffixes = [problems.suffix(i, None) for i in indices]
        batch = pad_suffixes(suffixes, answer_slots, problems.template.pad_id)
        answers = np.asarray(batch.targets)

    # A problem's randomness is numbered by how often it has come in the batches that are used together.
    together = []
    for earlier_step in earlier_steps:
        earlier = batch_indices(seed, earlier_step, len(problems), batch_size)
        together.append(earlier)
    together.append(indices)
    numbers = draw_numbers(np.concatenate(together), len(problems))
    return PromptedBatch(
        prompts=prompts,
        references=references,
        draw_ids=numbers[-batch_size:],
        answers=answers,
    )


def roll_out(
    policy: Policy,
    params,
    batch: PromptedBatch,
    reward: RewardFn | None,
    group: int,
    key: jax.Array,
    unjudged: Unjudged = LOWEST,
) -> tuple[Trajectories, jax.Array | None]:
    """Roll out G trajectories a prompt and verify their answers.

    The B*G rollouts are one batch, not a vmap over G, so that one loop ends when the last of them has ended. From here
    on G is in the shapes alone: N = B*G.

    Args:
        reward: None leaves them unverified.
        group: G.
        key: the step's key.
        unjudged: what a truncated completion earns; by "lowest" there is nothing to do: the reward gives it 0.
    Returns:
        `Trajectories` of B*G rows, a prompt's G consecutive, and float32 rewards [B, G], NaN of what is masked.
    """
    rollouts_key = jax.random.fold_in(key, noise.ROLLOUTS)
    keys_N = noise.rollout_keys(rollouts_key, batch.draw_ids, group)
    # None samples the gate's stops, a float is its threshold, and an int the number of latents.
    rules = {"sample": None, "threshold": 0.5, "length": policy.config.max_latents}
    rule = rules[policy.config.stopping]
    trajectories = sample(policy, params, batch.prompts, keys_N, rule)
    if reward is None:
        return trajectories, None
    references = repeat_rows(batch.references, group)
    rewards_N = reward(trajectories.completions, references)
    rewards_N = rewards_N.astype(jnp.float32)
    if unjudged.overrides_truncated:
        truncated_N = are_truncated(policy, trajectories)
        rewards_N = unjudged.fill(rewards_N, truncated_N)
    return trajectories, rewards_N.reshape(-1, group)


def make_draw_program(
    draw: Callable[..., tuple], layout: Layout, stream: str, micro_batches: int
):
    """Jit the first half of a step, which draws: (state, batch, extra) -> (batch, what is drawn for its rows).

    Args:
        draw: (parameters, extra, part of the batch, the step's key) -> a tuple of arrays, whose rows are the part's.
            The extra ones are laid out as parameters.
        layout, stream, micro_batches: see `make_train_step`.
    """

    def first_half(state: TrainState, batch, extra):
        specs = (layout.specs(state.params), layout.specs(extra))

        def local(params, extra, batch, key):
            params, extra = all_gather_params((params, extra), specs)

            def of_part(part):
                return draw(params, extra, part, key)

            return map_micro_batches(of_part, batch, micro_batches)

        key = noise.stream_key(state.key, stream, state.step)
        sharded_draw = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(*specs, ROWS, EVERYWHERE),
            out_specs=ROWS,
            check_vma=False,
        )
        drawn = sharded_draw(state.params, extra, batch, key)
        return batch, *drawn

    return jax.jit(first_half)


def extremes(rewards_BG: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the lowest and the highest reward of each group, [B]; inf and -inf where all are masked, as NaN."""
    masked_BG = jnp.isnan(rewards_BG)
    masked_as_inf_BG = jnp.where(masked_BG, jnp.inf, rewards_BG)
    low_B = masked_as_inf_BG.min(axis=1)
    masked_as_minus_inf_BG = jnp.where(masked_BG, -jnp.inf, rewards_BG)
    high_B = masked_as_minus_inf_BG.max(axis=1)
    return low_B, high_B


def rollout_sums(
    policy: Policy, trajectories: Trajectories, rewards_BG: jax.Array
) -> Sums:
    """Sum the metrics of `make_rollout_and_loss` that rollouts alone decide on."""
    num_prompts = jnp.float32(rewards_BG.shape[0])
    num_rollouts = jnp.float32(rewards_BG.size)
    masked_BG = jnp.isnan(rewards_BG)
    low_B, high_B = extremes(rewards_BG)

    # Tokens of the whole completion, and so of a thought that is written down.
    fed_NT, spoken_NA = used_slots(policy, trajectories)
    tokens = spoken_NA.sum()
    if trajectories.said is not None:
        tokens = fed_NT.sum() + tokens
    return {
        "reward": (
            jnp.sum(rewards_BG, where=~masked_BG),
            num_rollouts - masked_BG.sum(),
        ),
        "solved": ((high_B >= 1).sum(), num_prompts),
        "mixed": ((high_B > low_B).sum(), num_prompts),
        "latent_steps": (trajectories.lengths.sum(), num_rollouts),
        "answer_tokens": (tokens, num_rollouts),
        "cut": (are_truncated(policy, trajectories).sum(), num_rollouts),
    }
