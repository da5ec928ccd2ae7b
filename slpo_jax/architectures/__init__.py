"""The architectures. A new one is a file here, and a line in `ARCHITECTURES`; nothing else knows one from another."""

from slpo_jax.architectures.adalr import Adalr
from slpo_jax.architectures.architecture import Architecture, Text, Unwrapped
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.codi import Codi, Dart
from slpo_jax.architectures.colar import Colar
from slpo_jax.errors import UserError
from slpo_jax.models.reasoner import BACKBONES

ARCHITECTURES: dict[str, type[Architecture]] = {
    architecture.name: architecture for architecture in (Coconut, Codi, Colar, Dart, Adalr, Text)
}

PLAIN = Coconut
"""The architecture by whose tensors' names a plain language model is read: it has none beyond the backbone's."""

REASONERS = {
    f"{architecture}_{backbone}": (ARCHITECTURES[architecture], backbone)
    for architecture in ARCHITECTURES
    for backbone in BACKBONES
}
"""What `config.reasoner` can name: architecture and backbone."""

IN_WORDS = ", ".join(name for name, (architecture, _) in REASONERS.items() if not architecture.has_latents)
"""Those of them without latents, for messages."""


def architecture_of(reasoner: str) -> type[Architecture]:
    """Return the architecture that `config.reasoner` names.

    Raises:
        UserError: it is none of `REASONERS`.
    """
    if reasoner not in REASONERS:
        raise UserError("config.reasoner", f"{reasoner!r} is unknown; use one of {', '.join(REASONERS)}")
    return REASONERS[reasoner][0]


__all__ = ["ARCHITECTURES", "IN_WORDS", "PLAIN", "REASONERS", "Architecture", "Unwrapped", "architecture_of"]
