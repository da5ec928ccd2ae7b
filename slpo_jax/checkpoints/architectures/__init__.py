"""The kinds of reasoners. A new one is a file here, and a line in `KINDS`; nothing else knows one from another."""

from slpo_jax.checkpoints.architectures.architecture import Kind, Unwrapped
from slpo_jax.checkpoints.architectures.coconut import Coconut
from slpo_jax.checkpoints.architectures.codi import Codi
from slpo_jax.checkpoints.architectures.colar import Colar
from slpo_jax.checkpoints.architectures.dart import Dart
from slpo_jax.checkpoints.architectures.text import Text
from slpo_jax.errors import UserError
from slpo_jax.models.reasoner import BACKBONES, BackboneConfig

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Coconut, Codi, Colar, Dart, Text)}

PLAIN = Coconut
"""What a language model's tensors are that a latent reasoner is said to be: it has no others."""

REASONERS = {f"{kind}_{backbone}": (KINDS[kind], backbone) for kind in KINDS for backbone in BACKBONES}
"""What `config.reasoner` can name: kind and backbone."""

IN_WORDS = ", ".join(name for name, (kind, _) in REASONERS.items() if not kind.has_latents)
"""Those of them without latents, for messages."""


def kind_of(reasoner: str) -> type[Kind]:
    """The kind that `config.reasoner` names.

    Raises:
        UserError: it is none of `REASONERS`.
    """
    if reasoner not in REASONERS:
        raise UserError(f"config.reasoner: {reasoner!r} is unknown; use one of {', '.join(REASONERS)}")
    return REASONERS[reasoner][0]


def backbone_of(model: BackboneConfig) -> str:
    """The name of a backbone of these shapes."""
    return next(name for name, config in BACKBONES.items() if type(model) is config)


__all__ = ["IN_WORDS", "KINDS", "PLAIN", "REASONERS", "Kind", "Unwrapped", "backbone_of", "kind_of"]
