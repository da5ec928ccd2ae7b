"""Imitation of the best of one's own samples: rejection sampling with a verifier (Yuan et al., 2023, arXiv 2308.01825).

Of N rollouts of a problem, those with a right answer are kept; of these the one that a scorer likes best is imitated.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from slpo_jax.policy.policy import Policy, PromptedBatch, Prompts
from slpo_jax.policy.rollout import Trajectories, replay
from slpo_jax.policy.score import answer_after_replay
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, over_rows
from slpo_jax.settings import Checked, FieldError, setting
from slpo_jax.training.host_rewards import HostVerdicts
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.rollouts import roll_out
from slpo_jax.training.state import LossFn, map_micro_batches


@dataclass(frozen=True)
class BestOfNConfig(Checked):
    """The section `config.best_of_n`.

    Attributes:
        samples: N, rollouts a problem under `config.dropout`, by the checkpoint that the stage starts from; a problem
            has the same ones each time that it comes.
        scorer: a name in `config.evaluate.scorers`, without parameters of its own.
        temperature: temperature of the samples' answers; 0 is greedy.
        batch_size: problems a step, over all devices.
        micro_batches: gradient accumulation.
        steps: optimizer steps.
        optimizer: of the reasoner.
    """

    samples: int = setting(8, least=1)
    scorer: str = "likelihood"
    temperature: float = setting(1.0, least=0)
    batch_size: int = setting(64, least=1)
    micro_batches: int = setting(1, least=1)
    steps: int = setting(1000, least=1)
    optimizer: OptimizerConfig = OptimizerConfig("adamw", 1e-5)

    def __post_init__(self) -> None:
        super().__post_init__()
        usable = [name for name, scorer in SCORERS.items() if not scorer.part]
        if self.scorer not in usable:
            raise FieldError(self, "scorer", f"give one of {', '.join(usable)}")


@struct.dataclass
class Chosen:
    """The completions that are imitated, of B problems.

    Attributes:
        trajectories: B of them; of a problem without a right one any.
        right_B: bool, whether there is a right one.
    """

    prompts: Prompts
    trajectories: Trajectories
    right_B: jax.Array


def best_right(scores_BN: jax.Array, rewards_BN: jax.Array) -> jax.Array:
    """Choose, int [B], the right sample (reward 1 or more) with the largest score, the first on a tie."""
    is_right_BN = rewards_BN >= 1
    right_scores_BN = jnp.where(is_right_BN, scores_BN, -jnp.inf)
    return jnp.argmax(right_scores_BN, axis=1)


def make_choice(
    policy: Policy,
    reward: RewardFn | None,
    config: BestOfNConfig,
    mesh: Mesh,
    verdicts: HostVerdicts | None = None,
):
    """Roll out, verify, and keep the best: (params, batch, key) -> `Chosen`, one program where it can be one.

    Args:
        reward: None where only the host can say, which `verdicts` asks.
        mesh: the batch's rows are spread over it.
    Returns:
        it takes all parts of the checkpoint that the stage starts from, and the same key at every step.
    """

    score = SCORERS[config.scorer].score

    def draw(params, batch: PromptedBatch, key):
        trajectories, rewards_BN = roll_out(
            policy, params, batch, reward, config.samples, key
        )
        scores_N = score(policy, params, batch.prompts, trajectories)
        return trajectories, scores_N.reshape(-1, config.samples), rewards_BN

    def by_rows(function):
        def local(params, batch, key):
            params = policy.reasoner.stack(params)

            def of_part(part):
                return function(params, part, key)

            return map_micro_batches(of_part, batch, config.micro_batches)

        return over_rows(local, mesh, (EVERYWHERE, ROWS, EVERYWHERE))

    # The device judges inside the program that draws.
    def draw_and_choose(params, batch: PromptedBatch, key):
        return _choose(batch, *draw(params, batch, key))

    if reward is not None:
        return by_rows(draw_and_choose)

    # The host judges between two programs.
    def draw_for_host(params, batch: PromptedBatch, key):
        trajectories, scores_BN, _ = draw(params, batch, key)
        return trajectories, scores_BN, trajectories.completions, trajectories.lengths

    first = by_rows(draw_for_host)
    second = over_rows(_choose, mesh, (ROWS,) * 4)

    def choose(params, batch: PromptedBatch, key):
        trajectories, scores_BN, tokens_NA, latents_N = first(params, batch, key)
        assert verdicts is not None
        rewards_BN = verdicts.ask(tokens_NA, batch.draw_ids, latents_N)
        return second(batch, trajectories, scores_BN, rewards_BN)

    return choose


def _choose(
    batch: PromptedBatch,
    trajectories: Trajectories,
    scores_BN: jax.Array,
    rewards_BN: jax.Array,
) -> Chosen:
    """Choose of each prompt's N samples the right one with the largest score."""
    best_B = best_right(scores_BN, rewards_BN)
    problems, samples = scores_BN.shape
    first_B = jnp.arange(problems) * samples
    rows_B = first_B + best_B
    chosen = jax.tree.map(lambda x: x[rows_B], trajectories)
    is_right_BN = rewards_BN >= 1
    return Chosen(
        prompts=batch.prompts,
        trajectories=chosen,
        right_B=is_right_BN.any(axis=1),
    )


def make_loss(policy: Policy) -> LossFn:
    """Make minus the log-likelihood of chosen answers after replayed thoughts, summed over problems with a right one.

    Metrics: `loss`; `answer_log_likelihood`, the mean of these; `solved`, the share of problems with a right one.
    """

    def loss_fn(params, chosen: Chosen, key):
        params = policy.reasoner.stack(params)
        replayed = replay(policy, params, chosen.prompts, chosen.trajectories)
        scores_B = answer_after_replay(
            policy, params, replayed, chosen.trajectories, chosen.trajectories.tokens
        )
        total = jnp.sum(scores_B, where=chosen.right_B)
        count = chosen.right_B.sum().astype(jnp.float32)
        return -total, {
            "loss": (-total, count),
            "answer_log_likelihood": (total, count),
            "solved": (count, jnp.float32(scores_B.size)),
        }

    return loss_fn
