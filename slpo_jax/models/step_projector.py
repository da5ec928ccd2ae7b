"""From the code of a step of a written solution to the latent that stands for it (ReGuLaR, Wang et al., 2026)."""

import math

import flax.linen as nn
import jax.numpy as jnp

_GROUPS = 32  # of 1280 channels, as published


class StepProjector(nn.Module):
    """Linear, GroupNorm, GELU, Linear, GroupNorm of one group; in float32, each step by itself.

    Attributes:
        width: D.
    """

    width: int

    @nn.compact
    def __call__(self, code_ND):
        draw = nn.initializers.xavier_uniform()
        groups = math.gcd(_GROUPS, max(1, self.width // 8))  # one channel normalised by itself would be 0
        x_ND = nn.Dense(self.width, kernel_init=draw)(code_ND.astype(jnp.float32))
        x_ND = nn.gelu(nn.GroupNorm(groups, epsilon=1e-5)(x_ND), approximate=False)
        return nn.GroupNorm(1, epsilon=1e-5)(nn.Dense(self.width, kernel_init=draw)(x_ND))
