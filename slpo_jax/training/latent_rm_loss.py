"""LatentRM's labels and loss (You et al., 2025, arXiv 2510.07745): which of a problem's thoughts is the best so far.

y_nt is the share of completions from the first t latents of thought n that are right. Read off the published program,
apart from which the loss here is a mean over t (there it is divided by the length of a padded row), and thoughts may
have different lengths: one that has ended keeps its label and its score.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, PromptedBatch, Prompts
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.policy.scorers import latent_scores
from slpo_jax.settings import Checked, setting
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.state import LossFn

_THOUGHTS = 0
_COMPLETIONS = 1  # of the stage's stream of noise, whose training has none


@dataclasses.dataclass(frozen=True)
class LatentRmConfig(Checked):
    """The section `config.latent_rm`.

    Attributes:
        problems: training problems that thoughts are drawn for; 0 is all.
        thoughts: n, thoughts a problem; where all are right, or all wrong, the problem is left out.
        completions: completions of each beginning of a thought.
        dropout: dropout rate of thoughts, and of completions, whose answers have it too; None is config.dropout.rate.
        threshold: the gate's threshold, in both; without a gate thoughts have config.max_latents.
        batch_size: problems a step, over all devices.
        micro_batches: gradient accumulation.
        steps: optimizer steps.
        evaluate_every: steps between validations, on as many thoughts of each problem of config.data.valid; the model
            whose largest score is most often a right one's is kept, without validation problems the last one.
        optimizer: of backbone and classifier.
    """

    problems: int = setting(0, least=0, note="0 is all")
    thoughts: int = setting(8, least=2)
    completions: int = setting(64, least=1)
    dropout: float | None = setting(
        None, above=0, below=1, note="None is config.dropout.rate"
    )
    threshold: float = setting(0.5, least=0, most=1)
    batch_size: int = setting(256, least=1)
    micro_batches: int = setting(1, least=1)
    steps: int = setting(1000, least=1)
    evaluate_every: int = setting(100, least=0, note="0 is never")
    optimizer: OptimizerConfig = OptimizerConfig(
        "adamw", 1e-4, warmup_steps=100, schedule="cosine"
    )


@struct.dataclass
class LabelledBatch:
    """Thoughts of B problems, n of each.

    Attributes:
        latents: float32 [B, n, T, D], as they were fed.
        lengths: int [B, n].
        shares: float32 [B, n, T], y.
    """

    prompts: Prompts
    latents: Any
    lengths: Any
    shares: Any


def draw_thoughts(
    policy: Policy, params, batch: PromptedBatch, rule, key, thoughts: int
) -> Trajectories:
    """Draw n rollouts of each prompt.

    Args:
        rule: see `sample`, for all the same.
        key: of the stage's noise.
    """
    key = jax.random.fold_in(key, _THOUGHTS)
    keys_N = noise.rollout_keys(key, batch.draw_ids, thoughts)
    rules_N = jnp.full(keys_N.shape, rule)
    return sample(policy, params, batch.prompts, keys_N, rules_N)


def complete(
    policy: Policy,
    params,
    batch: PromptedBatch,
    actions,
    lengths_N,
    rule,
    key,
    count: int,
):
    """Complete each beginning of each thought `count` times: texts, int [N, T, count, A], and latents, [N, T, count].

    Args:
        policy: of the completions, whose noise may be elsewhere.
        actions, lengths_N: of N thoughts, N/B consecutive ones of each prompt.
    """
    # Each completion's thought, its problem, its number among the problem's, and which of the thought's it is.
    rows = lengths_N.shape[0]
    problems = batch.draw_ids.shape[0]
    thoughts = rows // problems
    rows_N = jnp.repeat(jnp.arange(rows), count)
    problems_N = rows_N // thoughts
    index_N = batch.draw_ids[problems_N]
    number_N = rows_N % thoughts
    completion_N = jnp.tile(jnp.arange(count), rows)
    actions = jax.tree.map(lambda x: x[rows_N], actions)
    key = jax.random.fold_in(key, _COMPLETIONS)

    def from_step(step):
        step_key = jax.random.fold_in(key, step)
        keys_N = noise.row_keys(step_key, index_N, number_N, completion_N)
        whole_N = lengths_N[rows_N]
        given_N = jnp.minimum(whole_N, step)
        begun = Trajectories(
            actions=actions,
            lengths=given_N,
            tokens=rows_N[:, None],
            keys=keys_N,
        )
        rules_N = jnp.full(len(rows_N), rule)
        completed = sample(policy, params, batch.prompts, keys_N, rules_N, given=begun)
        texts = completed.completions.reshape(rows, count, -1)
        lengths = completed.lengths.reshape(rows, count)
        return texts, lengths

    def put_thoughts_first(x):
        return jnp.moveaxis(x, 0, 1)

    steps = 1 + jnp.arange(policy.config.max_latents)
    by_step = jax.lax.map(from_step, steps)
    return jax.tree.map(put_thoughts_first, by_step)


def rank_loss(scores_NT: jax.Array, shares_NT: jax.Array) -> jax.Array:
    """Return -sum_n y_nt log p_nt, p the softmax of the scores over one problem's thoughts at t; mean over t."""
    log_probs_NT = jax.nn.log_softmax(scores_NT, axis=0)
    terms_NT = shares_NT * log_probs_NT
    return -jnp.mean(terms_NT.sum(axis=0))


def make_loss(policy: Policy) -> LossFn:
    """Make the loss summed over problems, of the reward model's parameters, without noise.

    Metrics: `loss`; `chosen_share`, the share of right completions of the thoughts with the largest scores;
    `thought_share`, of all thoughts.
    """

    def loss_fn(params, batch: LabelledBatch, key):
        problems, thoughts, steps, width = batch.latents.shape
        latents_NTD = batch.latents.reshape(-1, steps, width)
        lengths_N = batch.lengths.reshape(-1)
        scores_NT = latent_scores(policy, params, batch.prompts, latents_NTD, lengths_N)
        scores_BNT = scores_NT.reshape(problems, thoughts, steps)
        losses_B = jax.vmap(rank_loss)(scores_BNT, batch.shares)
        loss = losses_B.sum()

        # How often the thought that it likes best is right, beside how often any is.
        whole_BN = batch.shares[:, :, -1]
        totals_BN = scores_BNT.sum(axis=2)
        best_B = totals_BN.argmax(axis=1)
        chosen_B1 = jnp.take_along_axis(whole_BN, best_B[:, None], axis=1)
        chosen = chosen_B1.sum()
        count = jnp.float32(problems)
        shares_B = whole_BN.mean(axis=1)
        metrics = {
            "loss": (loss, count),
            "chosen_share": (chosen, count),
            "thought_share": (shares_B.sum(), count),
        }
        return loss, metrics

    return loss_fn
