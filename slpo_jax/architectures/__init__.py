"""The architectures. A new one is a file here and a line in `ARCHITECTURES`; nothing else tells one from another."""

import itertools

from slpo_jax.architectures.adalr import Adalr
from slpo_jax.architectures.architecture import Architecture, Text, Unwrapped
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.codi import Codi, Dart
from slpo_jax.architectures.colar import Colar
from slpo_jax.errors import UserError
from slpo_jax.models.reasoner import BACKBONES

ARCHITECTURES: dict[str, type[Architecture]] = {
    architecture.name: architecture
    for architecture in (Coconut, Codi, Colar, Dart, Adalr, Text)
}

PLAIN = Coconut
"""The architecture that a plain language model is taken for: it has no tensors beyond the backbone's."""

REASONERS = {
    f"{architecture.name}_{backbone}": (architecture, backbone)
    for architecture, backbone in itertools.product(ARCHITECTURES.values(), BACKBONES)
}
"""The names that `config.reasoner` can have: architecture and backbone."""

_without_latents = [name for name in REASONERS if not REASONERS[name][0].has_latents]
IN_WORDS = ", ".join(_without_latents)
"""The names of reasoners without latents, for messages."""


def architecture_of(reasoner: str) -> type[Architecture]:
    """Return the architecture that `config.reasoner` names.

    Raises:
        UserError: it is none of `REASONERS`.
    """
    if reasoner not in REASONERS:
        raise UserError(
            "config.reasoner",
            f"{reasoner!r} is unknown; use one of {', '.join(REASONERS)}",
        )
    return REASONERS[reasoner][0]


__all__ = [
    "ARCHITECTURES",
    "IN_WORDS",
    "PLAIN",
    "REASONERS",
    "Architecture",
    "Unwrapped",
    "architecture_of",
]
