"""Scorers choose among a problem's samples. A new one is a function, a line in `SCORERS`, and its name in a config.

LatentRM (You et al., 2025, arXiv 2510.07745) is a reward model that reads the latents of a thought alone. Its
parameters are {"reasoner", "classifier"}: a reasoner without its head over words, and a linear map from its output at a
latent to a number r_t. Prompts and latents are read without noise; the latents are those that were fed.

Beam search over latents with it is LatentTTS's idea (section 4). Its authors' program does not do it (it falls through
to a search that never asks the reward model), so this one is ours: a beam's next latent is drawn `candidates` times,
each under noise of its own; all are scored by the sum of r_t so far, a thought that has ended keeping its last; the
best `beams` go on, and the best one at the end answers.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.errors import UserError, in_a_line
from slpo_jax.models.gate import stop_log_likelihood
from slpo_jax.models.parts import REASONER, Params
from slpo_jax.models.reasoner import BACKBONE
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, Prompts, encode_prompts, repeat_to
from slpo_jax.policy.rollout import Trajectories, ends_with, sample, think
from slpo_jax.policy.score import score, used_slots

PART = "latent_rm"
CLASSIFIER = "classifier"
_HEAD = "lm_head"
_TABLES = ("wte", "embed_tokens")

ScoreFn = Callable[[Policy, Any, Prompts, Trajectories], jax.Array]
"""(policy, all parts of the parameters, prompts of B rows, trajectories of N rows, N/B consecutive ones of each prompt)
-> float32 [N], the largest is the best."""


@dataclass(frozen=True)
class Scorer:
    """A score, and how it is used.

    Attributes:
        score: 0 or more, the weight of a sample's vote.
        log: the score is any number instead, and a vote weighs e to it, among the samples of its problem.
        part: the part of the parameters that it has beside the policy's, which the stage of this name trains; "": none.
        needs_gate: it asks a trained gate.
    """

    score: ScoreFn
    log: bool = False
    part: str = ""
    needs_gate: bool = False


def stop_log_prob(policy, params, prompts, trajectories):
    """Return log P(tau) [N] of the gate's first stop; a thought of T latents has to stop there."""
    logits_NT = policy.latent_policy.stop_logits(params, trajectories.actions)
    lengths_N = jnp.maximum(trajectories.lengths, 1)
    return jax.vmap(stop_log_likelihood)(logits_NT, lengths_N)


def likelihood(
    policy: Policy, params: Any, prompts: Prompts, trajectories: Trajectories
) -> jax.Array:
    """Return the geometric mean of the probabilities of the answer's tokens, its end included; see `Scorer`.

    Returns:
        float32 [N], in (0, 1]; 1 for an answer without tokens.
    """
    scores = score(policy, params, prompts, trajectories, None)
    _, spoken_NA = used_slots(policy, trajectories)
    tokens_N = jnp.maximum(spoken_NA.sum(axis=1), 1)
    return jnp.exp(scores.answer_log_prob / tokens_N)


def self_certainty(policy, params, prompts, trajectories):
    """Return the mean of KL(uniform || p) over answer tokens, after the own thought, without noise (Kang et al., 2025).

    Returns:
        float32 [N], 0 or more; 0 for an answer without tokens.
    """
    _, spoken_NA = used_slots(policy, trajectories)
    hidden_NAD = score(policy, params, prompts, trajectories, None).hidden

    def divergence(hidden_ND):
        logits_NV = policy.reasoner.logits(
            params,
            hidden_ND[:, None],
        )[:, 0]
        log_probs_NV = jax.nn.log_softmax(logits_NV)
        return -math.log(log_probs_NV.shape[1]) - log_probs_NV.mean(axis=1)

    # One slot at a time: the logits of all would take much memory.
    divergence_AN = jax.lax.map(divergence, hidden_NAD.swapaxes(0, 1))
    sum_N = jnp.sum(divergence_AN.T, axis=1, where=spoken_NA)
    tokens_N = jnp.maximum(spoken_NA.sum(axis=1), 1)
    return sum_N / tokens_N


def init_reward_model(params: Params, width: int) -> Params:
    """Make the reward model before its first step: the reasoner's parameters, and a classifier of zeros.

    Args:
        params: of the policy, all parts.
        width: D.
    """
    backbone = dict(params[REASONER][BACKBONE])
    backbone.pop(_HEAD, None)
    return {
        REASONER: {**params[REASONER], BACKBONE: backbone},
        CLASSIFIER: {"kernel": jnp.zeros((width, 1)), "bias": jnp.zeros(1)},
    }


def latent_scores(
    policy: Policy,
    model: Params,
    prompts: Prompts,
    latents_NTD: jax.Array,
    lengths_N: jax.Array,
) -> jax.Array:
    """Score each latent, r_t; a thought that has ended keeps its last one, as it keeps its share of right answers.

    So thoughts of different lengths are compared at every t.

    Args:
        model: the reward model's parameters.
        prompts: B; N/B consecutive thoughts of each.
        latents_NTD: as they were fed.
    Returns:
        float32 [N, T]; 0 for a thought without latents.
    """
    reasoner = policy.reasoner
    rows, steps, _ = latents_NTD.shape

    # The module wants the head that the reward model does without: it gets the embedding, and nobody asks it.
    if not reasoner.config.tied:
        backbone = dict(model[REASONER][BACKBONE])
        table = next(backbone[name] for name in _TABLES if name in backbone)
        backbone[_HEAD] = table
        model = {**model, REASONER: {**model[REASONER], BACKBONE: backbone}}

    # Read each prompt once, and its thoughts behind it.
    _, prefix = encode_prompts(reasoner, model, prompts, None)
    steps_1T = jnp.arange(steps)[None]
    lengths_N1 = lengths_N[:, None]
    before_N1 = repeat_to(prompts.lengths, rows)[:, None]
    hidden_NTD, _ = reasoner.forward(
        model,
        latents_NTD,
        before_N1 + steps_1T,
        steps_1T < lengths_N1,
        prefix=prefix,
    )

    # Classify each latent; after a thought's last one take that one's score.
    classifier = model[CLASSIFIER]
    read_NTD = reasoner.transition(model, hidden_NTD).astype(jnp.float32)
    product_NT = (read_NTD @ classifier["kernel"])[..., 0]
    scores_NT = product_NT + classifier["bias"][None]
    last_NT = jnp.maximum(jnp.minimum(steps_1T, lengths_N1 - 1), 0)
    kept_NT = jnp.take_along_axis(scores_NT, last_NT, axis=1)
    return jnp.where(lengths_N1 > 0, kept_NT, 0)


def thought_scores(
    policy: Policy, params: Params, prompts: Prompts, thoughts: Trajectories, until
) -> jax.Array:
    """Sum r_t up to step `until`, float32 [N]; under a gate thoughts that have ended keep their last.

    With a given number of latents, all thoughts have as many, and the sum is over those.
    """
    latents_NTD = policy.latent_policy.feed(params, thoughts.actions)
    lengths_N1 = thoughts.lengths[:, None]
    scores_NT = latent_scores(
        policy, params[PART], prompts, latents_NTD, thoughts.lengths
    )
    steps_1T = jnp.arange(scores_NT.shape[1])[None]
    is_reached = steps_1T < until
    counts = policy.stops_itself | (steps_1T < lengths_N1)
    return jnp.sum(scores_NT, axis=1, where=is_reached & counts)


def latent_rm(
    policy: Policy, params: Params, prompts: Prompts, trajectories: Trajectories
) -> jax.Array:
    """Score whole thoughts by `thought_scores`; see `Scorer`."""
    return thought_scores(
        policy, params, prompts, trajectories, policy.config.max_latents
    )


SCORERS: dict[str, Scorer] = {
    "likelihood": Scorer(likelihood),
    "self_certainty": Scorer(self_certainty),
    "gate": Scorer(stop_log_prob, log=True, needs_gate=True),
    "latent_rm": Scorer(latent_rm, log=True, part=PART),
}
"""By name in `config.evaluate.scorers`."""


def score_rollouts(
    name: str, policy: Policy, params: Any, prompts: Prompts, out: Trajectories
) -> jax.Array:
    """Score each of N rollouts by a scorer of `SCORERS`, float32 [N].

    Raises:
        UserError: the scorer fails, or does not return one number for each rollout.
    """
    scorer = SCORERS[name]
    try:
        scores = scorer.score(policy, params, prompts, out)
        score_N = jnp.asarray(scores, jnp.float32)
        return score_N.reshape(out.lengths.shape)
    # A scorer may be the user's code, and can raise anything.
    except Exception as error:
        raise UserError(
            f"config.evaluate.scorers: {name}: {in_a_line(error)}; mend it: it returns a number of each rollout"
        ) from error


def beam_search(
    policy: Policy,
    params: Any,
    prompts: Prompts,
    key: jax.Array,
    index_B,
    rule_B,
    beams: int,
    candidates: int,
) -> Trajectories:
    """Roll out each prompt once, with a thought that beam search finds.

    Args:
        policy: stopping by "threshold" or "length".
        params: all parts, the reward model's too.
        key, index_B: candidate m of prompt i has the noise of sample m of i in `noise.row_keys(key, i, m)`; so one beam
            of one candidate is a plain rollout.
        rule_B: see `sample`.
    """
    problems = prompts.tokens.shape[0]
    width = beams * candidates
    keys_N = noise.rollout_keys(key, index_B, width)
    rule_N = jnp.repeat(rule_B, width)
    fixed = policy.with_config(stopping="length")

    def draw_step(thoughts, ended_N, step):
        """Add a latent to the thoughts that have not ended, and return whether they have now."""
        lengths_N = jnp.where(ended_N, thoughts.lengths, step - 1)
        given = dataclasses.replace(thoughts, lengths=lengths_N)
        until_N = jnp.where(ended_N, lengths_N, step)
        thought, _ = think(
            fixed,
            params,
            prompts,
            keys_N,
            until_N,
            given=given,
        )
        last = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, step - 1, 1, axis=1),
            thought.actions,
        )
        ends_N = ends_with(policy, params, last, step, keys_N, rule_N)
        longer = dataclasses.replace(
            thoughts,
            actions=thought.actions,
            lengths=thought.lengths_N,
        )
        return longer, ended_N | ends_N | (thought.lengths_N < step)

    def select_beams(step, state):
        """Draw a step of all candidates; the best beams of each problem go on, `candidates` copies of each."""
        thoughts, ended_N = state
        longer, now_ended_N = draw_step(thoughts, ended_N, step)

        # The copies of a thought that has ended are the same thought: only the first counts.
        score_N = thought_scores(policy, params, prompts, longer, step)
        is_copy_N = jnp.arange(keys_N.size) % candidates > 0
        score_N = jnp.where(ended_N & is_copy_N, -jnp.inf, score_N)

        _, best = jax.lax.top_k(score_N.reshape(problems, width), beams)
        first_rows = width * jnp.arange(problems)[:, None]
        rows = (best + first_rows).reshape(-1)
        rows_N = jnp.repeat(rows, candidates)
        return jax.tree.map(lambda x: x[rows_N], (longer, now_ended_N))

    # All thoughts start without latents.
    none_N = jnp.zeros(problems * width, jnp.int32)

    def first_actions():
        thought, _ = think(
            fixed,
            params,
            prompts,
            keys_N,
            none_N + 1,
        )
        return thought.actions

    shapes = jax.eval_shape(first_actions)
    actions = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        shapes,
    )
    # Neither tokens nor keys are asked for: noise stays with the place, not with the thought.
    empty = Trajectories(actions, none_N, tokens=none_N, keys=none_N)

    # Search for the thoughts, then answer after the best of each problem, which comes first.
    last_step = policy.config.max_latents
    thoughts, _ = jax.lax.fori_loop(
        1,
        last_step + 1,
        select_beams,
        (empty, none_N > 0),
    )
    best = jax.tree.map(lambda x: x[::width], thoughts)
    return sample(
        fixed,
        params,
        prompts,
        keys_N[::width],
        best.lengths,
        given=best,
    )
