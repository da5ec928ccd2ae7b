"""In the spirit of DART (2506.11752): silent tokens of a learned embedding, which a light network lets evolve."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from slpo_jax.architectures.architecture import NO_PROMPT, Architecture
from slpo_jax.architectures.codi import Codi
from slpo_jax.architectures.weights import Weight, linear
from slpo_jax.models.reasoner import LatentReasoner
from slpo_jax.settings import setting


class Evolution(nn.Module):
    """A silent token's input: the learned embedding, and what an MLP makes of the state before, at first nothing."""

    hidden: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, h_BLD):
        silent_D = self.param("silent", nn.initializers.normal(0.02), (self.width,))
        x_BLD = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype, name="fc_in")(h_BLD), approximate=False)
        zeros = nn.initializers.zeros
        x_BLD = nn.Dense(self.width, dtype=self.dtype, kernel_init=zeros, name="fc_out")(x_BLD)
        return x_BLD + jnp.asarray(silent_D, self.dtype)[None, None]


class Evolving(LatentReasoner):
    """A reasoner whose latents are silent tokens.

    Attributes:
        hidden: width of the network's hidden layer.
    """

    hidden: int

    def setup(self):
        config = self.backbone.config
        self.evolution = Evolution(self.hidden, config.n_embd, config.dtype)

    def transition(self, hidden_BLD):
        return self.evolution(hidden_BLD)


@dataclasses.dataclass(frozen=True)
class Dart(Architecture):
    """A learned embedding, and a light network: Linear, GELU, Linear. No program or checkpoint is published.

    Attributes:
        projector: width of the network's hidden layer.
    """

    projector: int = setting(least=1)

    name, title = "dart", "DART"
    default_recipe = "silent"
    latents = 20
    tokens, after_vocabulary = Codi.tokens, True
    head_prefix, first_of_head = "silent.", "silent.fc_in.weight"
    about_head = "`silent.*`: a learned embedding, and Linear, GELU, Linear of the last hidden state, added to it"

    def module(self, backbone):
        return Evolving(backbone, self.projector)

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        """CODI's."""
        return Codi(self.projector, tidy=False).template(tokenizer, first_id, prompt)

    def heads(self, width):
        return [
            Weight(("evolution", "silent"), "silent.embedding", (width,)),
            *linear(("evolution", "fc_in"), "silent.fc_in", (self.projector, width)),
            *linear(("evolution", "fc_out"), "silent.fc_out", (width, self.projector)),
        ]
