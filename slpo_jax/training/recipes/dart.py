"""In the spirit of DART (2506.11752): a pathway in words and a silent one, of one model, are trained together.

The first is taught the written steps and the answer, the second the answer after silent tokens; at the separator before
the answer the second's hidden states are drawn to the first's. That is CODI's loss (`distil`), with all steps written.
"""

import dataclasses

from slpo_jax.config.bounds import setting
from slpo_jax.training.recipes.distil import Distillation


@dataclasses.dataclass(frozen=True)
class Dart(Distillation):
    """The section `config.imitate.silent`; attributes as of `Distillation`."""

    distil_factor: float = setting(1.0, least=0)
    last_step: bool = True
