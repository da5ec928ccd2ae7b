"""The reasoners that a config can name: a kind and a backbone each."""

import dataclasses
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.reasoner import BackboneConfig, Reasoner, coconut, codi
from slpo_jax.text.templates import Template, coconut_template, codi_template


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What one reasoner is made of.

    Attributes:
        kind: "coconut" or "codi".
        backbone: "gpt2" or "llama".
        model_config: the backbone's config class.
        functions: (backbone config, projector width) -> the model.
        template: (tokenizer, id of the first token to be added, tidy) -> the texts.
        has_projector: whether the transition has parameters.
    """

    kind: str
    backbone: str
    model_config: type[GPT2Config] | type[LlamaConfig]
    functions: Callable[[BackboneConfig, int], Reasoner]
    template: Callable[[PreTrainedTokenizerFast, int | None, bool], Template]
    has_projector: bool


_BACKBONES: dict[str, Any] = {"gpt2": GPT2Config, "llama": LlamaConfig}
_KINDS: dict[str, Any] = {
    "coconut": (lambda config, _: coconut(config), lambda *arguments: coconut_template(*arguments[:2]), False),
    "codi": (codi, codi_template, True),
}
REASONERS = {
    f"{kind}_{backbone}": Recipe(kind, backbone, config, *parts)
    for kind, parts in _KINDS.items()
    for backbone, config in _BACKBONES.items()
}
