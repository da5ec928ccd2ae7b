"""Beam search over latents by a reward model of them: LatentTTS's idea (You et al., 2025, arXiv 2510.07745, section 4).

Its authors published no program of it (theirs falls through to a search that never asks the reward model), so this is
ours: a beam's next latent is drawn `candidates` times, each under noise of its own; all are scored by the sum of r_t so
far, a thought that has ended keeping its last; the best `beams` go on, and the best of the end answers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, Prompts
from slpo_jax.policy.rollout import Trajectories, ends_with, sample, think
from slpo_jax.policy.scorers import thought_scores


def beam_search(
    policy: Policy, params: Any, prompts: Prompts, key: jax.Array, index_B, rule_B, beams: int, candidates: int
) -> Trajectories:
    """Roll out each prompt once, its thought searched for by beams.

    Args:
        policy: stopping by "threshold" or "length".
        params: all parts, the reward model's too.
        key, index_B: candidate m of prompt i has the noise of sample m of i in `noise.row_keys(key, i, m)`; so one beam
            of one candidate is a plain rollout.
        rule_B: see `sample`.
    """
    problems, width = prompts.tokens.shape[0], beams * candidates
    keys_N = noise.rollout_keys(key, index_B, width)
    rule_N, fixed = jnp.repeat(rule_B, width), policy.having(stopping="length")

    def drawn(thoughts, ended_N, step):
        """Add a latent to the thoughts that have not ended, and tell whether they have now."""
        begun_N = jnp.where(ended_N, thoughts.lengths, step - 1)
        prefix, until_N = dataclasses.replace(thoughts, lengths=begun_N), jnp.where(ended_N, begun_N, step)
        thought, _ = think(fixed, params, prompts, keys_N, until_N, given=prefix)
        last = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, step - 1, 1, axis=1), thought.actions)
        ends_N = ends_with(policy, params, last, step, keys_N, rule_N)
        longer = dataclasses.replace(thoughts, actions=thought.actions, lengths=thought.lengths_N)
        return longer, ended_N | ends_N | (thought.lengths_N < step)

    def body(step, state):
        thoughts, ended_N = state
        longer, now_ended_N = drawn(thoughts, ended_N, step)
        score_N = thought_scores(policy, params, prompts, longer, step)
        again_N = ended_N & (jnp.arange(keys_N.size) % candidates > 0)  # the same thought once more
        score_N = jnp.where(again_N, -jnp.inf, score_N)
        _, best = jax.lax.top_k(score_N.reshape(problems, width), beams)
        rows = (best + width * jnp.arange(problems)[:, None]).reshape(-1)
        rows_N = jnp.repeat(rows, candidates)
        return jax.tree.map(lambda x: x[rows_N], (longer, now_ended_N))

    none_N = jnp.zeros(problems * width, jnp.int32)
    shapes = jax.eval_shape(lambda: think(fixed, params, prompts, keys_N, none_N + 1)[0].actions)
    actions = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # Neither tokens nor keys are asked for: noise stays with the place, not with the thought.
    begin = Trajectories(actions, none_N, tokens=none_N, keys=none_N)
    steps = 1, policy.config.max_latents + 1
    thoughts, _ = jax.lax.fori_loop(*steps, body, (begin, none_N > 0))
    best = jax.tree.map(lambda x: x[::width], thoughts)
    return sample(fixed, params, prompts, keys_N[::width], best.lengths, prefix=best)
