"""The laws of a step of thought. A new one is a file here, a line in `THINKERS`, and `config.thinker.name`."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from slpo_jax.checked import check_fields, setting
from slpo_jax.policy.thinkers.additive import Additive
from slpo_jax.policy.thinkers.gumbel import Gumbel
from slpo_jax.policy.thinkers.hybrid import Hybrid
from slpo_jax.policy.thinkers.latent import Latent
from slpo_jax.policy.thinkers.noisy_soft import NoisySoft
from slpo_jax.policy.thinkers.soft import Soft
from slpo_jax.policy.thinkers.thinker import Action, Thinker

THINKERS = {
    "latent": Latent,
    "additive": Additive,
    "soft": Soft,
    "noisy_soft": NoisySoft,
    "gumbel": Gumbel,
    "hybrid": Hybrid,
}
"""By name the settings of a thinker (`config.thinker.NAME`), which make it of a reasoner and a gate."""

OF_LATENTS = ("latent", "additive")
"""Those that feed the reasoner's own latents, which a text reasoner has none of."""

OF_TEXT = ("hybrid",)
"""Those that write, which a latent reasoner does only after its thought."""

WITH_PARAMETERS = ("hybrid",)
"""Those with parameters of their own, which every checkpoint has then."""


@dataclasses.dataclass(frozen=True)
class ThinkerChoice:
    """The name of a thinker; its settings stand beside it."""

    name: str = "latent"

    @property
    def chosen(self) -> Any:
        """The settings of the one that is used."""
        return getattr(self, self.name)


if TYPE_CHECKING:
    ThinkerConfig = ThinkerChoice
else:
    ThinkerConfig = dataclasses.make_dataclass(
        "ThinkerConfig",
        [
            ("name", Literal[*THINKERS], setting("latent", chooses=THINKERS)),
            *((name, kind, kind()) for name, kind in THINKERS.items()),
        ],
        bases=(ThinkerChoice,),
        frozen=True,
        namespace={"__post_init__": check_fields},
    )
"""The section `config.thinker`: the name of the one that is used, and the settings of each."""

__all__ = ["OF_LATENTS", "OF_TEXT", "THINKERS", "WITH_PARAMETERS", "Action", "Thinker", "ThinkerConfig"]
