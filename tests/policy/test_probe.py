"""What is seen of a thought, against a slow loop on a plain GPT-2."""

import jax.numpy as jnp
import numpy as np
from scipy import special
from tiny import CONFIG, ROLLOUT, SlowReasoner, both_params, compiled, policy_of, random_prompts, real_tokens

from slpo_jax.policy.explain import NEAREST, probe


def test_the_tokens_nearest_to_a_latent_are_of_the_state_that_made_it():
    params, prompts, lengths = both_params(), random_prompts((4, 6), 6), (3, ROLLOUT.max_latents)
    latents = np.random.default_rng(0).normal(size=(2, ROLLOUT.max_latents, CONFIG.n_embd)).astype(np.float32)
    _, probability, token = compiled(probe, policy_of())(params, prompts, latents, jnp.array(lengths))
    slow = SlowReasoner(params["reasoner"])
    for row, length in enumerate(lengths):
        prompt = real_tokens(prompts, row)
        hidden = slow.hidden(np.concatenate([slow.embed(prompt), latents[row, :length]]))
        law = special.softmax(slow.logits(hidden[len(prompt) - 1 : -1]), axis=-1)
        np.testing.assert_array_equal(token[row, :length], np.argsort(-law, axis=1)[:, :NEAREST])
        np.testing.assert_allclose(probability[row, :length], -np.sort(-law, axis=1)[:, :NEAREST], rtol=1e-3)
