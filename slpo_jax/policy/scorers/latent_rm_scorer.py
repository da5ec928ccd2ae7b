"""LatentRM (You et al., 2025, arXiv 2510.07745): a reward model that looks at the latents of a thought alone.

Its parameters are {"reasoner", "classifier"}: a reasoner without its head over words, and a linear map from what a
latent becomes there to a number r_t. Prompts and latents are read without noise; latents are those that were fed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.models.parts import REASONER
from slpo_jax.models.reasoner import BACKBONE
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompts import Prompts, encode_prompts, repeat_to
from slpo_jax.policy.rollout import Trajectories

PART, CLASSIFIER = "latent_rm", "classifier"
_HEAD, _TABLES = "lm_head", ("wte", "embed_tokens")
Params = dict[str, Any]


def begun(params: Params, width: int) -> Params:
    """The reward model before its first step: the reasoner's parameters, and a classifier of zeros.

    Args:
        params: of the policy, all parts.
        width: D.
    """
    backbone = {name: tree for name, tree in params[REASONER][BACKBONE].items() if name != _HEAD}
    classifier = {"kernel": jnp.zeros((width, 1)), "bias": jnp.zeros(1)}
    return {REASONER: {**params[REASONER], BACKBONE: backbone}, CLASSIFIER: classifier}


def latent_scores(
    policy: Policy, model: Params, prompts: Prompts, latents_NTD: jax.Array, lengths_N: jax.Array
) -> jax.Array:
    """r_t of each latent; a thought that has ended keeps its last one, as it keeps its share of right answers.

    So thoughts of different lengths are compared at every t.

    Args:
        model: the reward model's parameters.
        prompts: B; N/B thoughts of each, in a row.
        latents_NTD: what was fed.
    Returns:
        float32 [N, T]; 0 for a thought without latents.
    """
    reasoner, (rows, steps, _) = policy.reasoner, latents_NTD.shape
    if not reasoner.config.tied:  # the module has a head that is not asked
        backbone = model[REASONER][BACKBONE]
        table = next(backbone[name] for name in _TABLES if name in backbone)
        model = {**model, REASONER: {**model[REASONER], BACKBONE: {**backbone, _HEAD: table}}}
    _, prefix = encode_prompts(reasoner, model, prompts, None)
    steps_1T, lengths_N1 = jnp.arange(steps)[None], lengths_N[:, None]
    hidden_NTD, _ = reasoner.forward(
        model,
        latents_NTD,
        repeat_to(prompts.lengths, rows)[:, None] + steps_1T,
        steps_1T < lengths_N1,
        prefix=prefix,
    )
    read_NTD = reasoner.transition(model, hidden_NTD).astype(jnp.float32)
    scores_NT = (read_NTD @ model[CLASSIFIER]["kernel"])[..., 0] + model[CLASSIFIER]["bias"][None]
    last_NT = jnp.maximum(jnp.minimum(steps_1T, lengths_N1 - 1), 0)
    return jnp.where(lengths_N1 > 0, jnp.take_along_axis(scores_NT, last_NT, axis=1), 0)


def thought_scores(policy: Policy, params: Params, prompts: Prompts, thoughts: Trajectories, until) -> jax.Array:
    """float32 [N]: the sum of r_t up to step `until`; under a gate thoughts that have ended keep their last.

    With a number of latents the sum is over those: all thoughts have as many.
    """
    latents_NTD, lengths_N1 = policy.latent_policy.feed(params, thoughts.actions), thoughts.lengths[:, None]
    scores_NT = latent_scores(policy, params[PART], prompts, latents_NTD, thoughts.lengths)
    steps_1T = jnp.arange(scores_NT.shape[1])[None]
    return jnp.sum(scores_NT, axis=1, where=(steps_1T < until) & (policy.stops_itself | (steps_1T < lengths_N1)))


def latent_rm(policy: Policy, params: Params, prompts: Prompts, trajectories: Trajectories) -> jax.Array:
    """`thought_scores` of whole thoughts; see `Scorer`."""
    return thought_scores(policy, params, prompts, trajectories, policy.config.max_latents)
