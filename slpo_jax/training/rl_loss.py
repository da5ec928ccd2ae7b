"""The loss of the stage `rl`: roll out, verify, and improve by whatever objective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
from slpo_jax.models.lora import LoraConfig
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, PromptedBatch, Prompts, repeat_rows
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.policy.score import are_truncated, used_slots
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.rewards.unjudged import Truncated, Unjudged
from slpo_jax.settings import Checked, FieldError, setting
from slpo_jax.training.host_rewards import LOWEST
from slpo_jax.training.objectives import Objective
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.state import LossFn, Sums


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
        packed_slots = end_to_end(max_tokens, batch_size // shards, valid.shape[1])
    longest = int(valid.reshape(shards, -1).sum(axis=1).max())
    if packed_slots and longest > packed_slots:
        raise ValueError(
            f"max_tokens: {max_tokens} is too low for a shard of step {step}, whose prompts have {longest} tokens"
        )
    prompts = Prompts(tokens, valid, packed_slots)

    # What completions are judged by on the device, and what they would be in tokens.
    references = np.zeros((batch_size, 0), np.uint8)
    if encode:
        references = encode([problems.problems[i] for i in indices])
    answers = None
    if answer_slots:
        suffixes = [problems.suffix(i, None) for i in indices]
        batch = pad_suffixes(suffixes, answer_slots, problems.template.pad_id)
        answers = np.asarray(batch.targets)

    # A problem's randomness is numbered by how often it has come in the batches that are used together.
    together = []
    for earlier_step in earlier_steps:
        together.append(batch_indices(seed, earlier_step, len(problems), batch_size))
    numbers = draw_numbers(np.concatenate([*together, indices]), len(problems))
    return PromptedBatch(prompts, references, numbers[-batch_size:], answers)


@dataclass(frozen=True)
class RlConfig(Checked):
    """The section `config.rl`: what all objectives have in common.

    Attributes:
        batch_size: prompts a step, over all devices, of G completions each.
        micro_batches: gradient accumulation.
        steps: steps of each objective that has no number of its own: rollouts, and as many optimizer updates of them as
            the objective has.
        objectives: names under `config.objective`; each is trained from the same start, or after another of them.
        group: G, rollouts a prompt (TRL's num_generations).
        temperature: temperature of the answers in training rollouts; 0 is greedy, where a group's rollouts differ by
            dropout and by where they stop.
        top_k: likeliest tokens that they are sampled from; 0 is all.
        top_p: then the likeliest of these that have this probability together; 1 is all.
        stopping: "sample" stops with the gate's probability, "threshold" where it is at least 0.5.
        capacities: shares of the latent and answer slots that scoring has room for, ascending to (1, 1): the smallest
            pair that a batch fits in is used, each a compiled program.
        truncated: "lowest": a completion that is not judged, as it is truncated or a reward failed on it, earns what
            the lowest judged one of its batch earns, over all processes, and at most 0; "value": `truncated_value`;
            "masked": nothing, as it is out of loss and advantage (DAPO's overlong filtering); "judged": a truncated one
            is judged by its text. With "value" and "masked" this is so of all truncated ones, whether a reward has
            judged them or not.
        truncated_value: what each earns where `truncated` is "value".
        dynamic_batches: batches that may be rolled out for a step, until `batch_size` groups have rewards that differ,
            which alone are improved on (DAPO's dynamic sampling); 0 improves on every group of one batch.
        evaluate_every: steps between validations; an objective then leaves the parameters of its best one instead of
            the last ones.
        lora: adapters instead of the whole reasoner.
        optimizer: of each objective, but for its own learning rate.
    """

    batch_size: int = setting(64, least=1)
    micro_batches: int = setting(1, least=1)
    steps: int = setting(40_000, least=1)
    objectives: tuple[str, ...] = setting(("slpo",), fewest=1)
    group: int = setting(8, least=2, note="fewer give no baseline")
    temperature: float = setting(0.0, least=0)
    top_k: int = setting(0, least=0, note="0 is all")
    top_p: float = setting(1.0, above=0, most=1)
    stopping: Literal["sample", "threshold"] = "sample"
    capacities: tuple[tuple[float, float], ...] = setting(
        ((0.75, 0.5), (1.0, 1.0)),
        above=0,
        most=1,
        note="they ascend to (1, 1)",
    )
    truncated: Truncated = "lowest"
    truncated_value: float = setting(0.0, least=-1e6, most=1e6)
    dynamic_batches: int = setting(0, least=0, note="0 keeps every group")
    evaluate_every: int = setting(0, least=0, note="0 is never")
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig("adafactor", 1e-6, warmup_steps=2_000)

    @property
    def unjudged(self) -> Unjudged:
        """The rule for completions that are not judged."""
        return Unjudged(self.truncated, self.truncated_value)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.objectives)) < len(self.objectives):
            raise FieldError(self, "objectives", "give each name once")
        columns = [list(column) for column in zip(*self.capacities, strict=True)]
        if self.capacities[-1:] != ((1, 1),) or any(
            column != sorted(column) for column in columns
        ):
            raise FieldError(
                self,
                "capacities",
                "give pairs that ascend to (1, 1), e.g. ((0.5, 0.5), (1, 1))",
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
    keys_N = noise.rollout_keys(jax.random.fold_in(key, 0), batch.noise_ids, group)
    rules = {"sample": None, "threshold": 0.5, "length": policy.config.max_latents}
    rule = rules[policy.config.stopping]
    trajectories = sample(policy, params, batch.prompts, keys_N, rule)
    if reward is None:
        return trajectories, None
    references = repeat_rows(batch.references, group)
    rewards_N = reward(trajectories.completions, references).astype(jnp.float32)
    if unjudged.overrides_truncated:
        rewards_N = unjudged.settle(rewards_N, are_truncated(policy, trajectories))
    return trajectories, rewards_N.reshape(-1, group)


def make_rollout_and_loss(
    policy: Policy,
    objective: Objective,
    reward: RewardFn,
    group: int,
    unjudged: Unjudged = LOWEST,
) -> LossFn:
    """Make the loss of a step that rolls out, verifies and improves at once.

    Metrics, each a mean: `loss`, `reward`, `solved` (prompts with a rollout that earns 1 or more, which counts as
    right), `mixed` (prompts whose rewards differ), `latent_steps`, `answer_tokens`, `cut` (rollouts without an end
    within the maximum of new tokens), the objective's own, and where `answer_log_likelihood` is one of these,
    `answer_entropy` in nats a token.
    """
    rollout_loss = make_rollout_loss(policy, objective)

    def loss_fn(params, batch: PromptedBatch, key):
        # Once for both halves: of stacked ones it changes nothing.
        params = policy.reasoner.stack(params)
        rolled = jax.lax.stop_gradient(
            roll_out(policy, params, batch, reward, group, key, unjudged)
        )
        return rollout_loss(params, (batch, *rolled), key)

    return loss_fn


def make_rollout_loss(policy: Policy, objective: Objective) -> LossFn:
    """Make the loss of (batch, trajectories, rewards [B, G]): `make_rollout_and_loss` after the rollout."""

    def loss_fn(params, rolled: tuple[PromptedBatch, Trajectories, jax.Array], key):
        batch, trajectories, rewards_BG = rolled
        params = policy.reasoner.stack(params)
        loss, count, metrics = objective(
            policy, params, batch, trajectories, rewards_BG, key
        )
        sums = {
            "loss": (loss, jnp.float32(count)),
            **rollout_sums(policy, trajectories, rewards_BG),
        }
        if "answer_log_likelihood" in metrics:
            log_likelihood, _ = metrics["answer_log_likelihood"]
            _, spoken_NA = used_slots(policy, trajectories)
            tokens = spoken_NA.sum().astype(jnp.float32)
            sums["answer_entropy"] = (-log_likelihood, tokens)
        return loss, sums | metrics

    return loss_fn


def extremes(rewards_BG: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the lowest and the highest reward of each group, [B]; inf and -inf where all are masked, as NaN."""
    masked_BG = jnp.isnan(rewards_BG)
    low_B = jnp.where(masked_BG, jnp.inf, rewards_BG).min(axis=1)
    high_B = jnp.where(masked_BG, -jnp.inf, rewards_BG).max(axis=1)
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
