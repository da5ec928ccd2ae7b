"""Group-relative advantages (paper appendix, reward and advantage; SPEC section 2.3). G is at least 2."""

import chex
import jax
import jax.numpy as jnp


def rloo(rewards_G: jax.Array) -> jax.Array:
    """Leave-one-out advantage: A_i = r_i - mean of the other rewards of the group.

    Args:
        rewards_G: float [G].
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    others_G = (rewards_G.sum() - rewards_G) / (rewards_G.shape[0] - 1)
    return jax.lax.stop_gradient(rewards_G - others_G)


def grpo(rewards_G: jax.Array) -> jax.Array:
    """Group-normalised advantage: (r_i - mean) / (std + 1e-4), std with Bessel's correction.

    Args:
        rewards_G: float [G].
    Returns:
        [G], without gradient.
    """
    chex.assert_rank(rewards_G, 1)
    return jax.lax.stop_gradient((rewards_G - rewards_G.mean()) / (jnp.std(rewards_G, ddof=1) + 1e-4))
